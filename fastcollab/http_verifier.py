"""A verifier behind an address: any endpoint that speaks OpenAI's chat completions. Standard library only."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, build_opener
from urllib.request import Request as Call

from fastcollab.config import require
from fastcollab.verifiers import Request, Template, Verdict, review_by_text

LARGEST = 1 << 20  # bytes of an answer
LONGEST_WAIT = 30.0  # s between two attempts
UNFIT = (400, 413, 422)  # status of a request that is wrong in itself, such as a draft beyond the server's context


class VerifierError(RuntimeError):
    """The endpoint refuses what it is asked, or has gone: going on would be a run without interventions."""


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


class HTTPVerifier:
    """``url`` is the API's base, as in ``http://127.0.0.1:8000/v1``. Calls of several threads share ``concurrency``.

    An attempt that times out, loses its connection or ends in 408, 429 or 5xx is repeated; a row whose attempts are
    used up has no answer: Keep("malformed"), or no correction. So has one that an endpoint which answered others
    finds unfit (``UNFIT``); a warning says so once. Any other status is a :class:`VerifierError`, and so are
    ``patience`` rows in a row without an answer. ``counts`` holds calls, retries, timeouts, unanswered.
    """

    remote = True

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        template: Template | None = None,
        timeout: float = 60.0,  # s, of connecting and of each wait, and of reading the answer as a whole
        retries: int = 2,
        backoff: float = 0.5,  # s before the first retry, doubled at each; Retry-After goes before it
        concurrency: int = 8,  # calls in flight at most
        patience: int = 64,
        max_tokens: int = 256,  # of a correction, the endpoint's own
        temperature: float = 0.0,  # of a correction; verdicts are greedy
        extra: Mapping[str, Any] | None = None,  # more fields of the body, e.g. {"seed": 1}
    ) -> None:
        require(str(url).startswith(("http://", "https://")), "url", url, "http://... or https://...")
        require(isinstance(model, str) and model, "model", model, "the name that the endpoint knows it by")
        for name, value in {"timeout": timeout, "concurrency": concurrency, "patience": patience}.items():
            require(value > 0, name, value, "> 0")
        require(max_tokens >= 1, "max_tokens", max_tokens, ">= 1")
        for name, value in {"retries": retries, "backoff": backoff, "temperature": temperature}.items():
            require(value >= 0, name, value, ">= 0")
        self.url, self.model, self.template = url.rstrip("/") + "/chat/completions", model, template or Template()
        self.timeout, self.retries, self.backoff, self.patience = timeout, retries, backoff, patience
        self.max_tokens, self.temperature, self.extra = max_tokens, temperature, dict(extra or {})
        self.counts: Counter[str] = Counter()
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener, self._lock, self._silent = build_opener(_NoRedirects), threading.Lock(), 0
        self._served = self._warned = False  # it has answered; a refusal was told
        self._threads = ThreadPoolExecutor(concurrency, "verifier")

    def review(self, requests: Sequence[Request]) -> list[Verdict]:
        return review_by_text(
            lambda rows: self._ask([self.template.verdict_messages(r) for r in rows], 16, 0.0), requests
        )

    def correct(self, requests: Sequence[Request]) -> list[str | None]:
        messages = [self.template.fix_messages(r) for r in requests]
        return [text or None for text in self._ask(messages, self.max_tokens, self.temperature)]

    def _ask(self, messages: list[list[dict]], max_tokens: int, temperature: float) -> list[str | None]:
        """The text of each answer, "" for an answer that is no completion, None for none."""
        common = {"model": self.model, "max_tokens": max_tokens, "temperature": temperature, **self.extra}
        bodies = [json.dumps({**common, "messages": m}).encode() for m in messages]
        return list(self._threads.map(self._answer, bodies))

    def _answer(self, body: bytes) -> str | None:
        wait = 0.0
        for attempt in range(self.retries + 1):
            time.sleep(wait)
            self._count("retries" if attempt else "calls")
            wait = min(self.backoff * 2**attempt, LONGEST_WAIT)
            try:
                text = _completion(self._post(body))
            except HTTPError as error:
                with error:
                    if error.code not in (408, 429) and error.code < 500:
                        message = f"{self.url}: got status {error.code} ({_start(error)}), need a completion"
                        if error.code not in UNFIT or not self._served:
                            raise VerifierError(message) from error
                        self._warn(f"{message}; such rows stay unreviewed")
                        break
                after = error.headers.get("Retry-After", "")
                wait = min(float(after), LONGEST_WAIT) if after.isdecimal() else wait
            except (OSError, HTTPException) as error:  # URLError is an OSError, so are time-outs and lost connections
                if isinstance(getattr(error, "reason", error), TimeoutError):
                    self._count("timeouts")
            else:
                self._silent, self._served = 0, True
                return text
        self._count("unanswered")
        with self._lock:
            self._silent += 1
        if self._silent >= self.patience:
            raise VerifierError(f"{self.url}: got no answer for {self._silent} rows in a row, need an endpoint")
        return None

    def _post(self, body: bytes) -> bytes:
        read, end = b"", time.monotonic() + self.timeout
        with self._opener.open(Call(self.url, body, self._headers), timeout=self.timeout) as response:
            while piece := response.read1(LARGEST):
                read += piece
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.url}: got an answer slower than {self.timeout} s")
                if len(read) > LARGEST:
                    return b""
        return read

    def _warn(self, message: str) -> None:
        with self._lock:
            said, self._warned = self._warned, True
        if not said:
            warnings.warn(message, stacklevel=2)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


def _start(error: HTTPError) -> str:
    """How the body of a refusal begins, as far as it comes."""
    try:
        return error.read(300).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return ""


def _completion(answer: bytes) -> str:
    """The text of the first choice, without a leading block of thoughts; "" where there is none."""
    try:
        text = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):  # not what was asked for: a malformed verdict
        return ""
    if not isinstance(text, str):
        return ""
    return text.partition("</think>")[2] if text.lstrip().startswith("<think>") else text
