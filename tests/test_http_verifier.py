"""An OpenAI-compatible endpoint as the verifier, and one that misbehaves (mintrl 6.1, 6.2)."""

from __future__ import annotations

import json
import re
import threading
import time
import warnings
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fastcollab.http_verifier import HTTPVerifier, VerifierError
from fastcollab.verifiers import Keep, Request, Revise


@contextmanager
def endpoint(reply, **options):
    """A server on this machine; ``reply(number of the call, body) -> status, answer, headers, seconds``."""
    calls, lock, flying = [], threading.Lock(), {"now": 0, "most": 0}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                calls.append((self.path, body, dict(self.headers)))
                n = len(calls) - 1
                flying["now"] += 1
                flying["most"] = max(flying["now"], flying["most"])
            try:
                self.answer(*reply(n, body))
            except OSError:
                pass  # the client has gone

        def answer(self, status, answer, headers=None, seconds=0):
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            drip = seconds if isinstance(seconds, list) else []  # a byte, a pause, a byte, …
            done.wait(0 if drip else seconds)
            with lock:
                flying["now"] -= 1  # before the client can know it
            if status is None:
                return  # and close the connection
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(drip or data)))
            self.end_headers()
            for pause in drip:
                self.wfile.write(b" ")
                done.wait(pause)
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    done = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        settings = dict(timeout=5.0, backoff=0.01) | options
        verifier = HTTPVerifier(f"http://127.0.0.1:{server.server_port}/v1/", "judge", **settings)
        verifier.calls, verifier.flying = calls, flying
        yield verifier
    finally:
        done.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def says(text):
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}, {}, 0


def rows(n):
    return [Request(f"task {i}", (), ("a\n", "b")) for i in range(n)]


def task(body):
    return int(re.search(r"T\| task (\d+)", body["messages"][1]["content"])[1])


def test_verdicts_and_corrections_of_an_endpoint():
    with endpoint(lambda n, body: says(f"REVISE {task(body)}" if task(body) else "KEEP"), api_key="k") as verifier:
        assert verifier.review(rows(4)) == [Keep(), Revise(0), Revise(1), Keep("out_of_range")]
        path, body, headers = verifier.calls[0]
        assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer k"
        assert body["model"] == "judge" and body["temperature"] == 0 and body["max_tokens"] == 16
        assert verifier.counts == {"calls": 4}
    fixes = ["So y.", "", "<think>hm</think>So z."]
    with endpoint(lambda n, body: says(fixes[task(body)]), temperature=0.5, extra={"seed": 1}) as verifier:
        assert verifier.correct(rows(3)) == ["So y.", None, "So z."]
        body = verifier.calls[0][1]
        assert body["temperature"] == 0.5 and body["max_tokens"] == 256 and body["seed"] == 1
        assert verifier.review([]) == []


GARBAGE = [b"", b"not json", b"[]", b"null", b'{"choices": []}', b'{"choices": [{"message": {"content": 3}}]}', b"\xff",
           b"[" * 100_000, b'{"choices": [{"message": {"content": "<think>REVISE 1"}}]}', b" " * (1 << 21)]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_a_malformed_verdict(garbage):
    """6.2: asked once more, then kept and counted; no correction comes of it."""
    with endpoint(lambda n, body: (200, garbage)) as verifier:
        assert verifier.review(rows(1)) == [Keep("malformed")] and len(verifier.calls) == 2
        assert verifier.calls[0][1] == verifier.calls[1][1] and verifier.counts == {"calls": 2}
        assert verifier.correct(rows(1)) == [None]


@pytest.mark.parametrize("failure", [(500, b"x"), (503, b""), (429, b""), (408, b""), (None, b"")])
def test_failures_are_retried(failure):
    with endpoint(lambda n, body: failure if n < 2 else says("REVISE 2")) as verifier:
        assert verifier.review(rows(1)) == [Revise(1)] and verifier.counts == {"calls": 1, "retries": 2}
    with endpoint(lambda n, body: failure, retries=1) as verifier:
        assert verifier.review(rows(2)) == [Keep("malformed")] * 2 and len(verifier.calls) == 4
        assert verifier.correct(rows(1)) == [None] and verifier.counts["unanswered"] == 3


def test_the_body_of_a_failure_is_not_waited_for():
    """It was read outside the retries: a time-out there ended the run."""
    stalled = (503, b"xx", {"Retry-After": "\xb2"}, [9])  # a byte, then nothing; a wait that no one can read
    with endpoint(lambda n, body: stalled if n < 1 else says("KEEP"), timeout=0.3) as verifier:
        assert verifier.review(rows(1)) == [Keep()] and verifier.counts == {"calls": 1, "retries": 1}
    with endpoint(lambda n, body: (401, b"xx", {}, [9]), timeout=0.3) as verifier:
        with pytest.raises(VerifierError, match="got status 401 .*, need a completion"):
            verifier.review(rows(1))


def test_retries_wait_longer_each_time_or_as_long_as_they_are_told():
    def times(**options):
        seen = []

        def reply(n, body):
            seen.append(time.monotonic())
            return (503, b"", options.get("headers", {})) if n < 2 else says("KEEP")

        with endpoint(reply, backoff=options["backoff"]) as verifier:
            assert verifier.review(rows(1)) == [Keep()]
        return [b - a for a, b in zip(seen, seen[1:], strict=False)]

    first, second = times(backoff=0.1)
    assert first >= 0.1 and second >= 0.2  # no upper bound: the machine may be busy
    assert all(gap < 10 for gap in times(backoff=20.0, headers={"Retry-After": "0"}))


def test_a_hanging_or_dripping_endpoint_times_out():
    """6.2: a time-out is no answer; a byte now and then does not keep a call alive."""
    slow = {0: (200, b"", {}, 30), 1: (200, b"", {}, [0.05] * 600), 2: says("REVISE 1")}
    with endpoint(lambda n, body: slow[task(body)], timeout=1.5, retries=1) as verifier:
        began = time.monotonic()
        assert verifier.review(rows(3)) == [Keep("malformed"), Keep("malformed"), Revise(0)]
        assert time.monotonic() - began < 15
        assert verifier.counts == {"calls": 3, "retries": 2, "timeouts": 4, "unanswered": 2}


def test_slow_answers_come_in_order_and_calls_in_flight_are_bounded():
    with endpoint(
        lambda n, body: (*says(f"REVISE {1 + task(body) % 2}")[:3], 0.02 * (task(body) % 5)), concurrency=3
    ) as v:
        both = [threading.Thread(target=lambda: results.append(v.review(rows(12)))) for _ in range(2)]
        results = []
        [t.start() for t in both]
        [t.join() for t in both]
        assert results == [[Revise(i % 2) for i in range(12)]] * 2 and 1 < v.flying["most"] <= 3


@pytest.mark.parametrize("status", [400, 401, 404, 301, 307])
def test_an_endpoint_that_refuses_stops_the_run(status):
    """A wrong key or name must not become a run without interventions; nor does a key follow a redirect."""
    with endpoint(lambda n, body: (status, b"no such model", {"Location": "http://127.0.0.1:1/"})) as verifier:
        with pytest.raises(VerifierError, match=f"completions: got status {status} \\(no such model\\), need"):
            verifier.review(rows(1))
        assert len(verifier.calls) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_draft_that_an_endpoint_cannot_take_has_no_verdict(status):
    """Beyond its context, say: the others are reviewed and the run goes on, unless it takes none at all."""

    def reply(n, body):
        return (status, b"too long") if task(body) == 1 else says("KEEP")

    with endpoint(reply, concurrency=1, patience=3) as verifier:
        with pytest.warns(UserWarning, match=f"got status {status} \\(too long\\), need a completion; such rows"):
            assert verifier.review(rows(3)) == [Keep(), Keep("malformed"), Keep()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it was said
            assert verifier.correct(rows(2)) == ["KEEP", None]
        assert verifier.counts == {"calls": 5, "unanswered": 2}
        with pytest.raises(VerifierError, match="no answer for 3 rows in a row"):
            verifier.correct([rows(2)[1]] * 3)


def test_an_endpoint_that_has_gone_stops_the_run():
    """Fail closed: some rows may stay without an answer, all of them may not."""
    with endpoint(
        lambda n, body: (500, b"") if n % 3 else says("KEEP"), retries=0, patience=3, concurrency=1
    ) as verifier:
        assert verifier.review(rows(9)).count(Keep()) == 3
    with endpoint(says, retries=0, patience=3) as gone:
        pass
    with pytest.raises(VerifierError, match="got no answer for 3 rows in a row, need an endpoint"):
        gone.review(rows(3))


def test_bad_settings_are_named():
    for options, message in [
        ({"url": "file:///etc/passwd"}, "url: got 'file:///etc/passwd', need http://"),
        ({"model": ""}, "model: got '', need"),
        ({"timeout": 0}, "timeout: got 0, need > 0"),
        ({"concurrency": 0}, "concurrency: got 0, need > 0"),
        ({"retries": -1}, "retries: got -1, need >= 0"),
        ({"max_tokens": 0}, "max_tokens: got 0, need >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            HTTPVerifier(**{"url": "http://127.0.0.1:1", "model": "m", **options})
