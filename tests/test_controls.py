"""T17: a rollout that no review touches is the control of its random key, token for token, alone and beside others."""

from __future__ import annotations

import numpy as np
import pytest
from test_interventions import PROMPTS as ALL
from test_interventions import both, engine, keep, once, same, schedule

import fastcollab as fc

PROMPTS, SEEDS = ALL[:3], [0, 7, 2**31 + 5, 2**62]
SAMPLING = fc.SamplingParams(temperature=2.0, max_new_tokens=32)
SOLO = fc.Solo("policy")


def corrected():
    return schedule(once(0), lambda prompt, accepted, new: " 2 + 2 = 4\n")


@both
@pytest.mark.parametrize("changes", [{"max_reviews": 0}, {"max_interventions": 0}, {}], ids=["R=0", "N=0", "keep"])
def test_t17_without_a_correction_the_arms_are_equal(scheduler, changes):
    """Several seeds and steps on one engine; the logs say how often it was looked at."""
    e, plan, seen = engine(scheduler), schedule(keep, **changes), set()
    for step, seed in enumerate(SEEDS):
        control, arm = (e.generate(PROMPTS, 2, s, SAMPLING, seed, step) for s in (SOLO, plan))
        assert same(control, arm)
        assert [r.finish for r in control] == [r.finish for r in arm]
        assert all(bool(r.reviews) == (not changes) and not r.interventions for r in arm)
        seen |= {tuple(r.ids) for r in control}
    assert len(seen) > 0.8 * len(SEEDS) * len(PROMPTS) * 2  # the seeds differ


@both
@pytest.mark.parametrize("seed", SEEDS[1:3])
def test_t17_beside_controls_and_corrected_rollouts(scheduler, seed):
    """In one batch of all three, in little memory: what is not corrected is what the control writes with its key."""
    idle, cut = schedule(keep, max_reviews=0), corrected()
    alone = engine(scheduler).generate(PROMPTS, 6, SOLO, SAMPLING, seed)
    arms = [SOLO, idle, cut, idle, SOLO, schedule(keep)]
    e = engine(scheduler, kv_memory="384KiB", token_budget=48)
    mixed = e.generate(PROMPTS, 6, arms, SAMPLING, seed)
    untouched = [(a, b) for a, b in zip(alone, mixed, strict=True) if not b.interventions]
    assert same(*map(list, zip(*untouched, strict=True))) and len(untouched) < len(mixed)
    assert len(untouched) >= 5 * len(PROMPTS)
    for a, b in zip(alone, mixed, strict=True):
        for log in b.interventions:  # and what stands before the first correction is the control's too
            assert b.ids[: log.position] == a.ids[: log.position]
            assert list(log.dropped) == a.ids[log.position :][: len(log.dropped)]
            np.testing.assert_allclose(b.logprob[: log.position], a.logprob[: log.position], atol=1e-5)
    assert e.stats()["preemptions"] > 0


@both
def test_each_schedule_of_a_batch_and_of_an_engine_is_its_own(scheduler):
    """Schedules that differ in their verifier or chunk alone are different ones, beside and after each other."""
    far = schedule(once(0), lambda prompt, accepted, new: " 3 + 3 = 6\n", chunk=12)
    plans, e = [corrected(), far, schedule(keep)], engine(scheduler)
    alone = [engine(scheduler).generate(PROMPTS, 3, plan, SAMPLING, seed=5) for plan in plans]
    after = [e.generate(PROMPTS, 3, plan, SAMPLING, seed=5) for plan in plans]
    mixed = e.generate(PROMPTS, 3, plans, SAMPLING, seed=5)
    for i, r in enumerate(mixed):
        for other in (alone[i % 3][i], after[i % 3][i]):
            assert (r.ids, r.interventions, r.reviews) == (other.ids, other.interventions, other.reviews)
    assert len({tuple(log.inserted for log in r.interventions) for r in mixed}) == 3
