"""Intervene in the engine: a scripted verifier's cuts, the ids and the log they leave, and what does not change."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import numpy as np
import pytest

import fastcollab as fc
from fastcollab import reviews
from fastcollab.schedules import Intervene
from fastcollab.verifiers import FunctionVerifier, Keep, Revise

PROMPTS = [row["prompt"] for row in fc.tiny.problems(5, seed=3)]
LINES = re.compile("\n")
GREEDY = fc.SamplingParams(temperature=0.0, max_new_tokens=48)
both = pytest.mark.parametrize("scheduler", ["python", "native"])


def engine(scheduler=None, **changes):
    settings = dict(kv_memory="16MiB", block_size=4, scheduler=scheduler) | changes
    return fc.Engine({"policy": fc.tiny.senior()}, **settings)


def schedule(review, correct=lambda prompt, accepted, new: None, **changes):
    settings = dict(chunk=6, longest_chunk=24, max_tokens=12, reserve=2, steps=LINES, leaks=lambda text, row: False)
    return Intervene(verifier=FunctionVerifier(review, correct), **settings | changes)


def keep(prompt, accepted, new):
    return Keep()


def same(a, b):
    if [r.ids for r in a] != [r.ids for r in b]:
        return False
    return all(np.allclose(x.logprob, y.logprob, atol=1e-5, equal_nan=True) for x, y in zip(a, b, strict=True))


@both
@pytest.mark.parametrize("changes", [{}, {"max_reviews": 0}, {"max_interventions": 0}], ids=["keep", "R=0", "N=0"])
def test_a_verifier_that_keeps_changes_nothing(scheduler, changes):
    """T17: with no review, and with none that cuts, the rollout is the policy's own, token for token."""
    sampling = fc.SamplingParams(max_new_tokens=48)
    alone = engine(scheduler).generate(PROMPTS, n=3, sampling=sampling, seed=1)
    reviewed = engine(scheduler).generate(PROMPTS, n=3, schedule=schedule(keep, **changes), sampling=sampling, seed=1)
    assert same(alone, reviewed) and not any(r.interventions for r in reviewed)
    assert all((r.author == 0).all() and r.writers == ("policy", "verifier") for r in reviewed)


def once(step):
    """Revises one step of the first review of each row, by the number of accepted steps."""
    return lambda prompt, accepted, new: Revise(step) if not accepted and len(new) > step else Keep()


@both
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_cut_leaves_the_ids_and_the_log_that_it_says(scheduler, step):
    """Greedy, so that the text after the correction is the policy's on a fresh prompt of all that stands before it."""
    e, text = engine(scheduler), " 1 + 1 = 2\n"
    plan = schedule(once(step), lambda prompt, accepted, new: text, chunk=24)
    plain = e.generate(PROMPTS, sampling=GREEDY)
    cut = e.generate(PROMPTS, schedule=plan, sampling=GREEDY)
    written = e.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any(r.interventions for r in cut)
    for own, r in zip(plain, cut, strict=True):
        if not r.interventions:
            continue
        (log,) = r.interventions
        at, end = log.position, log.position + len(log.inserted)
        assert r.ids[:at] == own.ids[:at] and list(log.dropped) == own.ids[at : at + len(log.dropped)]
        assert r.ids[at:end] == list(log.inserted) and list(log.inserted)[-len(written) :] == written
        assert r.author.tolist() == [0] * at + [1] * (end - at) + [0] * (len(r.ids) - end)
        assert np.isnan(r.logprob[at:end]).all() and not np.isnan(np.delete(r.logprob, range(at, end))).any()
        fresh = engine(scheduler).generate(
            [r.prompt_ids + r.ids[:end]], sampling=fc.SamplingParams(temperature=0.0, max_new_tokens=48 - end)
        )
        assert fresh[0].ids == r.ids[end:]
        text_before = e.tokenizer.decode(r.ids[:at])
        assert text_before.count("\n") == (step + 1 if step else 0)  # the response opens with a newline


@both
def test_an_answer_that_has_ended_is_reviewed_and_may_be_reopened(scheduler):
    """6.11: Revise discards the EOS, Keep ends the answer; the last chunk is reviewed though it is short."""
    seen = []

    def review(prompt, accepted, new):
        seen.append((len(accepted), "answer" in new[-1]))
        return Revise(len(new) - 1) if "answer" in new[-1] else Keep()

    plan = schedule(
        review, lambda prompt, accepted, new: " 0 + 0 = 0\n", chunk=48, longest_chunk=48, max_interventions=1
    )
    found = engine(scheduler).generate(PROMPTS[:2], schedule=plan, sampling=GREEDY)
    assert all(len(r.interventions) == 1 for r in found)
    eos = engine().models["policy"].eos_ids
    assert all(log.dropped[-1] in eos for r in found for log in r.interventions)
    assert all(i not in eos for r in found for i in r.ids[:-1])


@both
def test_fresh_numbers_after_a_cut(scheduler):
    """The noise that a judge has seen is not used again: after a cut that appends what was dropped first, the row
    goes on differently than before."""
    e, sampling = engine(scheduler), fc.SamplingParams(temperature=3.0, max_new_tokens=40)
    plain = e.generate(PROMPTS, n=4, sampling=sampling, seed=2)

    class Echo:
        """Cuts at the last step and writes what stood there but for its end, so that the policy must go on from it."""

        def review(self, requests):
            return [Revise(0) if not r.accepted else Keep() for r in requests]

        def correct(self, requests):
            return [" 5" for _ in requests]

    plan = Intervene(verifier=Echo(), chunk=8, longest_chunk=8, max_tokens=4, reserve=2, steps=LINES,
                     max_interventions=1, leaks=lambda text, row: False)  # fmt: skip
    cut = e.generate(PROMPTS, n=4, schedule=plan, sampling=sampling, seed=2)
    again = engine(scheduler).generate(PROMPTS, n=4, schedule=plan, sampling=sampling, seed=2)
    assert same(cut, again) and any(r.interventions for r in cut)
    for own, r in zip(plain, cut, strict=True):
        if r.interventions:
            end = r.interventions[0].position + len(r.interventions[0].inserted)
            assert r.ids[end : end + 12] != own.ids[end : end + 12]


@both
def test_a_row_does_not_depend_on_its_company_or_on_who_waits(scheduler):
    plan = schedule(once(0), lambda prompt, accepted, new: " 2 + 2 = 4\n")
    sampling = fc.SamplingParams(max_new_tokens=40)
    together = engine(scheduler).generate(PROMPTS, n=2, schedule=plan, sampling=sampling, seed=4)
    for group, prompt in enumerate(PROMPTS):
        alone = engine(scheduler).generate([prompt], n=2, schedule=plan, sampling=sampling, seed=4)
        assert [r.ids for r in alone] == [r.ids for r in together[2 * group : 2 * group + 2]]


@both
def test_controls_and_reviewed_rollouts_share_a_batch(scheduler):
    """A list has a schedule for each sample: the same rollouts as one schedule at a time, in order of the samples."""
    plan, sampling = (
        schedule(once(0), lambda prompt, accepted, new: " 2 + 2 = 4\n"),
        fc.SamplingParams(max_new_tokens=40),
    )
    solo = fc.Solo("policy")
    mixed = engine(scheduler).generate(PROMPTS, n=4, schedule=[solo, plan, solo, plan], sampling=sampling, seed=4)
    of_one = [engine(scheduler).generate(PROMPTS, n=4, schedule=s, sampling=sampling, seed=4) for s in (solo, plan)]
    assert [(r.group, r.sample) for r in mixed] == [(g, i) for g in range(len(PROMPTS)) for i in range(4)]
    for i, r in enumerate(mixed):
        assert r.ids == of_one[i % 2][i].ids and r.writers == (("policy",), ("policy", "verifier"))[i % 2]
    assert any(r.interventions for r in mixed) and not any(r.reviews for r in mixed[::2])
    with pytest.raises(ValueError, match="schedule: got 2, need one, or 4 for n=4"):
        engine(scheduler).generate(PROMPTS, n=4, schedule=[solo, plan], sampling=sampling)


@both
def test_deep_rollback_reopens_accepted_steps_but_no_correction(scheduler):
    """6.3: by default a step of an earlier chunk is out of range; "deep" allows it, back to the last correction."""
    asked = []

    def review(prompt, accepted, new):
        asked.append(len(accepted))
        return Keep() if len(asked) == 1 else Revise(-len(accepted))

    def correct(prompt, accepted, new):
        return " 2 + 2 = 4\n"

    for rollback in ("chunk", "deep"):
        asked.clear()
        plan = schedule(review, correct, rollback=rollback, max_reviews=3)
        (r,) = engine(scheduler).generate(PROMPTS[:1], schedule=plan, sampling=GREEDY)
        outcomes = [outcome for _, outcome in r.reviews]
        if rollback == "chunk":
            assert outcomes == ["keep", "out_of_range", "out_of_range"] and not r.interventions
        else:  # the second review cuts at the very start, the third may not cut the correction that stands there
            assert outcomes == ["keep", "intervention", "out_of_range"]
            assert r.interventions[0].position == 0 and asked[2] == 1


def test_rejected_corrections_keep_the_draft():
    """6.8, 6.10, 6.13: nothing is cut where the rules reject what the verifier wrote."""
    plain = engine().generate(PROMPTS, sampling=GREEDY)
    for reason, text, changes in [("noop", "", {}), ("noop", "  \n", {}), ("unanswered", None, {}),
                                  ("leak", " 1 + 1 = 2\n", {"leaks": lambda text, row: True}),
                                  ("room", " 1 + 1 = 2\n", {"reserve": 1000}),
                                  ("cap", " 1 + 1 = 2\n", {"cap": 0.0})]:  # fmt: skip
        plan = schedule(once(0), lambda prompt, accepted, new, text=text: text, **changes)
        found = engine().generate(PROMPTS, schedule=plan, sampling=GREEDY)
        assert same(plain, found) and all(r.reviews[0].outcome == reason for r in found)


def test_budgets_and_fresh_steps():
    """Reviews and corrections are counted per rollout, and after a correction a new step must stand first (6.16)."""
    asked = []

    def review(prompt, accepted, new):
        asked.append((accepted, new))
        return Revise(len(new) - 1)

    plan = schedule(
        review, lambda prompt, accepted, new: f" {len(accepted)} + 0 = 0\n", max_reviews=3, max_interventions=2
    )
    (r,) = engine().generate(PROMPTS[:1], schedule=plan, sampling=GREEDY)
    assert len(r.interventions) <= 2 and len(asked) <= 3
    for (accepted, _), (later, _) in zip(asked, asked[1:], strict=False):
        assert later[: len(accepted)] == accepted  # settled text is shown as it was
    assert all(len(new) > 1 for accepted, new in asked[1:] if accepted and accepted[-1].endswith("+ 0 = 0\n"))


def test_other_rows_go_on_while_a_remote_verifier_thinks():
    """A verdict is awaited in another thread; rows that need none are written meanwhile, and the result is the same."""
    here = threading.get_ident()

    class Slow:
        remote = True

        def __init__(self):
            self.threads = set()

        def review(self, requests):
            self.threads.add(threading.get_ident())
            time.sleep(0.05)
            return [Revise(0) if not r.accepted else Keep() for r in requests]

        def correct(self, requests):
            return [" 2 + 2 = 4\n" for _ in requests]

    settings = dict(chunk=6, longest_chunk=24, max_tokens=12, reserve=2, steps=LINES, leaks=lambda text, row: False)
    slow = Slow()
    remote = engine().generate(PROMPTS, schedule=Intervene(verifier=slow, **settings), sampling=GREEDY)
    near = engine().generate(PROMPTS, schedule=schedule(once(0), lambda p, a, n: " 2 + 2 = 4\n"), sampling=GREEDY)
    assert same(remote, near) and here not in slow.threads


class Own:
    """A verifier of a user's own: ``review`` and ``correct`` of all requests at once."""

    def __init__(self, review, correct=lambda requests: [" 2 + 2 = 4\n" for _ in requests]):
        self.review, self.correct = review, correct


def far(review):
    verifier = Own(review)
    verifier.remote = True
    return verifier


@both
def test_where_those_that_wait_hold_all_blocks_the_verdict_is_waited_for(scheduler):
    """It was polled for: 300,000 plans in the five seconds of five verdicts."""

    def review(requests):
        time.sleep(0.05)
        return [Keep() for _ in requests]

    sampling, plans = fc.SamplingParams(max_new_tokens=48), []
    small = engine(scheduler, kv_memory="240KiB")
    real = small.scheduler

    class Counting:
        def __getattr__(self, name):
            if name == "plan":
                plans.append(1)
            return getattr(real, name)

    small.scheduler = Counting()
    plan = Intervene(verifier=far(review), chunk=12, longest_chunk=12, max_reviews=2, steps=LINES)
    found = small.generate(PROMPTS, n=2, schedule=plan, sampling=sampling, seed=1)
    assert small.stats()["preemptions"] > 0 and len(plans) < 500
    assert same(found, engine(scheduler).generate(PROMPTS, n=2, sampling=sampling, seed=1))


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_does_not_wait_for_a_verdict(request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits "ignored"
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    asked, answer = threading.Event(), threading.Event()

    def review(requests):
        asked.set()
        answer.wait(20)
        return [Keep() for _ in requests]

    def interrupt():
        asked.wait()
        time.sleep(0.5)  # by now no row can be written on, and the engine waits
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine().generate(PROMPTS, schedule=Intervene(verifier=far(review), chunk=6, steps=LINES), sampling=GREEDY)
    assert time.monotonic() - begun < 10
    answer.set()


def test_a_verifier_that_stops_the_batch_is_asked_for_many_rows_at_once(monkeypatch):
    """It was asked as soon as one row waited, 1.2 rows a call; when it is asked changes no rollout. At a high
    temperature lines differ in length, and rows come at different times."""
    sampling, found, sizes = fc.SamplingParams(temperature=2.5, max_new_tokens=60), [], {}
    for part in (reviews.PART, 1 << 30):
        monkeypatch.setattr(reviews, "PART", part)

        def review(requests, part=part):
            sizes.setdefault(part, []).append(len(requests))
            return [Revise(len(r.new) - 1) if len(r.accepted) % 3 == 1 else Keep() for r in requests]

        plan = Intervene(verifier=Own(review), chunk=8, longest_chunk=24, max_tokens=12, reserve=2, steps=LINES)
        found.append(
            engine().generate(PROMPTS, n=18, schedule=[plan] * 16 + [fc.Solo()] * 2, sampling=sampling, seed=3)
        )
    few, many = sizes.values()
    assert same(*found) and [r.reviews for r in found[0]] == [r.reviews for r in found[1]]
    assert sum(few) == sum(many) and any(r.interventions for r in found[0]) and 2 * len(few) < len(many)


def test_an_error_of_the_verifier_surfaces_and_the_engine_lives_on():
    e = engine()

    def review(prompt, accepted, new):
        raise RuntimeError("the verifier's own")

    with pytest.raises(RuntimeError, match="the verifier's own"):
        e.generate(PROMPTS, schedule=schedule(review), sampling=GREEDY)
    assert same(e.generate(PROMPTS, sampling=GREEDY), engine().generate(PROMPTS, sampling=GREEDY))


WRONG = {
    "none": (lambda requests: [None for _ in requests], r"verdict: got None, need Keep\(\)"),
    "a step of no number": (lambda requests: [Revise("1") for _ in requests], r"verdict: got Revise\(step='1'\)"),
    "half a step": (lambda requests: [Revise(0.0) for _ in requests], r"verdict: got Revise\(step=0.0\)"),
    "an outcome of ours": (lambda requests: [Keep("intervention") for _ in requests], r"verdict: got Keep\(reason="),
    "too few": (lambda requests: [Keep()], r"verdicts: got 1, need \d, one a request"),
    "no list": (lambda requests: None, r"verdicts: got None, need \d, one a request"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_answer_of_a_verifier_is_one_sentence(fault):
    review, message = WRONG[fault]
    plan = Intervene(verifier=Own(review), chunk=24, longest_chunk=24, steps=LINES)
    with pytest.raises(ValueError, match=message):
        engine().generate(PROMPTS, schedule=plan, sampling=GREEDY)
    plan = Intervene(verifier=Own(lambda requests: [Revise(0) for _ in requests], lambda requests: None), steps=LINES)
    with pytest.raises(ValueError, match=r"corrections: got None, need \d, one a request"):
        engine().generate(PROMPTS, schedule=plan, sampling=GREEDY)


def test_a_verifier_cannot_change_the_order_or_the_rows():
    """Sorted in place, requests would take each other's verdicts; a dataset's row is what the reward sees later."""
    plan = Intervene(verifier=Own(lambda requests: requests.sort()), chunk=6, steps=LINES)
    with pytest.raises(AttributeError, match="sort"):
        engine().generate(PROMPTS, schedule=plan, sampling=GREEDY)
    rows = [{"prompt": p, "answer": "4"} for p in PROMPTS]
    plan = Intervene(verifier=Own(lambda requests: [Keep() for r in requests if r.row.clear() is None]), steps=LINES)
    assert any(r.reviews for r in engine().generate(PROMPTS, schedule=plan, sampling=GREEDY, rows=rows))
    assert rows == [{"prompt": p, "answer": "4"} for p in PROMPTS]


def test_a_step_may_be_numpys():
    reviews = [
        lambda prompt, accepted, new, one=one: Revise(one) if not accepted else Keep() for one in (np.int64(0), 0)
    ]
    found = [engine().generate(PROMPTS, schedule=schedule(r, lambda p, a, n: " 2\n"), sampling=GREEDY) for r in reviews]
    assert same(*found) and any(r.interventions for r in found[0])


BAD = {
    "verifier": (dict(verifier=None), "verifier: got None, need an object with review and correct"),
    "chunk": (dict(chunk=0), "chunk: got 0, need >= 1"),
    "longest": (dict(longest_chunk=2), "longest_chunk: got 2, need >= 6, chunk"),
    "cap": (dict(cap=2.0), r"cap: got 2.0, need in \[0, 1\]"),
    "writers": (dict(writers=("a",)), "Intervene writers: got .*, need the writer's name and the verifier's"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_settings_are_one_sentence(fault):
    changes, message = BAD[fault]
    settings = dict(verifier=FunctionVerifier(keep, keep), chunk=6) | changes
    with pytest.raises(ValueError, match=message):
        Intervene(**settings)
    with pytest.raises(ValueError, match="sampling: got .*, need neither top-k"):
        engine().generate(PROMPTS, schedule=schedule(keep), sampling=fc.SamplingParams(top_k=3))
