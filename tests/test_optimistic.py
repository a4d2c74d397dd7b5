"""Writing on while a verdict is out (mintrl 5.6): the rollouts of a row that stops for it, whatever was written."""

from __future__ import annotations

import time
import zlib
from collections import Counter

import numpy as np
import pytest
from test_interventions import LINES, PROMPTS, Own, both, engine, far, same

import fastcollab as fc
from fastcollab import reviews
from fastcollab.reviews import Reviews
from fastcollab.schedules import Intervene
from fastcollab.verifiers import Keep, Revise, settle

SAMPLING = fc.SamplingParams(temperature=1.3, max_new_tokens=44)


def number(request) -> int:
    """The same for the same question, whenever it is asked."""
    return zlib.crc32(repr((request.prompt, request.accepted, request.new)).encode())


def review(requests):
    """Keep, a step of the chunk, one before it, or one that does not exist."""
    return [(Keep(), Revise(0), Revise(len(r.new) - 1), Revise(-1), Revise(99))[number(r) % 5] for r in requests]


def correct(requests):
    return [(" 2 + 2 = 4\n", " 7\n", "", None)[number(r) // 5 % 4] for r in requests]


def plan(verifier, **changes) -> Intervene:
    settings = dict(chunk=6, longest_chunk=12, max_tokens=8, reserve=2, steps=LINES, leaks=lambda text, row: False,
                    max_reviews=5, max_interventions=3)  # fmt: skip
    return Intervene(verifier=verifier, **settings | changes)


def log(r: fc.Rollout) -> tuple:
    return r.ids, r.author.tolist(), r.draws, r.reviews, r.interventions, r.finish


@pytest.fixture
def cuts(monkeypatch) -> Counter:
    """What the rows that were cut had come to by then."""
    seen, revise = Counter(), Reviews._revise

    def spy(self, i, due, step, raw):
        before = "ended" if i in self.ended and not due.request.ended else "on"
        state = "held" if i in self.held and self.scheduler.asking().count(i) else before
        written = len(self.scheduler.view(i)[1]) - due.position
        reason = revise(self, i, due, step, raw)
        seen[state if reason is None and written else "other"] += 1
        return reason

    monkeypatch.setattr(Reviews, "_revise", spy)
    return seen


@both
@pytest.mark.parametrize("rollback", ["chunk", "deep"])
@pytest.mark.parametrize("part", [1, reviews.PART, 1 << 30])
def test_the_rollouts_are_those_of_rows_that_stop(scheduler, rollback, part, cuts, monkeypatch):
    """Ids, authors, draws, reviews, cuts, ends and log-probs, in enough memory and in little."""
    monkeypatch.setattr(reviews, "PART", part)
    arms = [plan(Own(review, correct), rollback=rollback, optimistic=on) for on in (False, True)]
    stopped, on = (engine(scheduler).generate(PROMPTS, 12, arm, SAMPLING, seed=9) for arm in arms)
    small = engine(scheduler, kv_memory="384KiB", token_budget=48)
    little = small.generate(PROMPTS, 12, arms[1], SAMPLING, seed=9)
    stats = small.stats()
    assert stats["preemptions"] > 0
    assert stats["tokens_per_s"] * stats["wall_s"] == pytest.approx(sum((r.author == 0).sum() for r in little))
    for rollouts in (on, little):
        assert [log(r) for r in rollouts] == [log(r) for r in stopped] and same(rollouts, stopped)
    assert len({review.outcome for r in on for review in r.reviews}) >= 5  # keep, intervention and ways to reject
    assert not any(r.unread for r in stopped)
    if part < 1 << 30:
        assert sum(r.unread for r in on) > 0 and cuts["on"] and cuts["ended"]
    if part == 1:
        assert cuts["held"]  # a second chunk was complete before the verdict on the first


@both
def test_a_remote_verdict_may_come_at_any_time(scheduler, cuts):
    rng = np.random.default_rng(0)

    def slow(requests):
        time.sleep(rng.choice([0.0, 0.02, 0.2]))
        return review(requests)

    verifier = far(slow)
    verifier.correct = correct
    on = engine(scheduler).generate(PROMPTS, 6, plan(verifier), SAMPLING, seed=11)
    stopped = engine(scheduler).generate(PROMPTS, 6, plan(Own(review, correct), optimistic=False), SAMPLING, seed=11)
    assert [log(r) for r in on] == [log(r) for r in stopped] and same(on, stopped)
    assert sum(r.unread for r in on) > 0 and cuts["held"] and cuts["ended"]


def test_a_row_writes_while_its_verdict_is_out():
    """One row alone, whose verdict waits for the end of the text."""
    written = []

    def slow(requests):
        until = time.monotonic() + 20
        while len(e.scheduler.view(0)[1]) < 40 and time.monotonic() < until:
            time.sleep(0.01)
        written.append(len(e.scheduler.view(0)[1]))
        return [Keep() for _ in requests]

    e = engine()
    sampling = fc.SamplingParams(max_new_tokens=40, ignore_eos=True)
    (r,) = e.generate(PROMPTS[:1], 1, plan(far(slow), chunk=8, longest_chunk=8, max_reviews=1), sampling, seed=1)
    assert len(r.ids) == 40 and written == [40] and 8 <= r.reviews[0].position < 20


def test_a_remote_verifier_is_asked_for_corrections_first():
    """They waited until no verdict was asked for, for ten rounds."""
    calls = []

    class Far:
        remote = True

        def review(self, requests):
            time.sleep(0.01)
            given = [settle(v, r) for v, r in zip(review(requests), requests, strict=True)]
            calls.append(("review", sum(isinstance(v, Revise) for v in given)))
            return given

        def correct(self, requests):
            calls.append(("correct", len(requests)))
            return correct(requests)

    engine().generate(PROMPTS, 6, plan(Far()), SAMPLING, seed=2)
    assert sum(kind == "correct" for kind, _ in calls) > 3
    for (kind, wrong), after in zip(calls, calls[1:], strict=False):
        assert after == ("correct", wrong) if kind == "review" and wrong else after[0] == "review"


def test_rows_that_a_correction_fills_are_no_longer_open(monkeypatch):
    """With reserve=0 no forward reports their end; a verifier that is not remote was asked late for the others."""
    seen, close = [], Reviews.close
    monkeypatch.setattr(Reviews, "close", lambda self: (seen.append((set(self.open), len(self.drafts))), close(self)))
    fill = Own(
        lambda requests: [Revise(len(r.new) - 1) for r in requests],
        lambda requests: [[int(i) for i in long] for _ in requests],
    )
    e = engine()
    long = e.tokenizer(" 2 + 2 = 4 + 1" * 9, add_special_tokens=False)["input_ids"]
    found = e.generate(PROMPTS, 2, plan(fill, max_tokens=44, reserve=0), SAMPLING, seed=4)
    full = [r for r in found if r.finish == "length" and r.author[-1] == 1]
    assert full and seen == [(set(), 10)]
