"""What each label provider does to learners, on toy policies whose errors are systematic (corl spec 5.5, item 10).

A student holds a logit for each question and answer. On eight questions of ten it has a bias: a wrong answer that it
gives more often than the right one. With correlation rho a bias is shared by all, both where it is and what it says;
else each has its own. Rewards, advantages and updates are those of the trainer. A peer's bias is an answer that a
student hardly ever gives, so it earns it nothing; the right answer is the one that all of them give now and then.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fastcollab.advantages import group_advantages
from fastcollab.ballots import Ballot
from fastcollab.labels import make_labels

QUESTIONS, ANSWERS, G, STEPS, RATE = 50, 10, 8, 32, 1.0
SEEDS = range(2)
UIDS = [f"q{i}" for i in range(QUESTIONS)]


def students(names, rho, rng):
    """The right answers [questions], by name logits [questions, answers] and biases [questions] (-1: none)."""
    right = rng.integers(0, ANSWERS, QUESTIONS)

    def wrong():
        return (right + rng.integers(1, ANSWERS, QUESTIONS)) % ANSWERS

    def biases():
        return np.where(rng.random(QUESTIONS) < 0.8, wrong(), -1)

    common, is_common = biases(), rng.random(QUESTIONS) < rho
    bias = {name: np.where(is_common, common, biases()) for name in names}
    logits, every = {}, np.arange(QUESTIONS)
    for name in names:
        biased, p = bias[name] >= 0, np.full((QUESTIONS, ANSWERS), 0.02)
        p[every, right] = np.where(biased, 0.3, 0.6)
        p[every, np.where(biased, bias[name], wrong())] += np.where(biased, 0.4, 0.1)
        logits[name] = np.log(p / p.sum(1, keepdims=True))
    return right, logits, bias


def softmax(logits):
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


@cache
def train(labels, names="ab", rho=0.0, seed=0):
    """(gain in accuracy, gain in the probability of the own bias where there is one): means over students."""
    rng = np.random.default_rng(seed)
    right, logits, bias = students(names, rho, rng)
    provider = make_labels(labels, {}, seed)

    def measure():
        every = np.arange(QUESTIONS)
        accuracy = np.mean([softmax(x)[every, right].mean() for x in logits.values()])
        return accuracy, np.mean([softmax(logits[n])[every, bias[n]][bias[n] >= 0].mean() for n in names])

    before = measure()
    for step in range(STEPS):
        said, ballots = {}, {}
        for n in names:
            p = softmax(logits[n]).cumsum(1)
            said[n] = (rng.random((QUESTIONS, G, 1)) > p[:, None, :-1]).sum(-1)
            for uid, answers in zip(UIDS, said[n], strict=True):
                ballots[n, uid] = Ballot("toy", step, uid, n, "prompt", step, tuple(map(str, answers)))
        found = provider(step, UIDS, list(names), ballots)
        for n in names:
            rewards = [[found[n, uid].reward(key) for key in ballots[n, uid].keys] for uid in UIDS]
            advantage = group_advantages(rewards, eps=1e-4)[0].double().numpy().reshape(QUESTIONS, G)
            chosen = np.eye(ANSWERS)[said[n]] - softmax(logits[n])[:, None]
            logits[n] = logits[n] + RATE * (advantage[..., None] * chosen).mean(1)
    after = measure()
    return after[0] - before[0], after[1] - before[1]


def gains(*args):
    return np.mean([train(*args, seed) for seed in SEEDS], axis=0)


def test_self_vote_amplifies_its_own_bias():
    accuracy, bias = gains("self", "ab", 0.0)
    assert bias > 0.12 and accuracy < 0.15


def test_a_pair_of_independent_errors_unlearns_them():
    """Were the labels a student's own, this would be the test above."""
    accuracy, bias = gains("pair", "ab", 0.0)
    assert accuracy > 0.4 and bias < -0.35


def test_a_pair_of_shared_errors_is_no_better_than_one():
    """And between the two the gain falls as the correlation grows."""
    shared, half, none = (gains("pair", "ab", rho) for rho in (1.0, 0.5, 0.0))
    assert shared[0] < 0.15 and shared[1] > 0.12
    assert shared[0] + 0.1 < half[0] < none[0] - 0.1


@pytest.mark.parametrize("labels", ["ring", "majority"])
def test_three_are_at_least_as_good_as_two(labels):
    """Three independent students seldom have no right vote among them."""
    three, two = gains(labels, "abc", 0.0), gains("pair", "ab", 0.0)
    assert three[0] > two[0] and three[1] < two[1] - 0.02


@pytest.mark.parametrize("labels", ["random", "shuffled"])
def test_labels_without_information_teach_nothing(labels):
    """The controls: whatever a method gains beyond these comes from what its labels say about the question."""
    assert np.abs(gains(labels, "ab", 0.0)).max() < 0.12


def test_the_same_seed_gives_the_same_run():
    assert train.__wrapped__("ring", "abc", 0.0, 0) == train("ring", "abc", 0.0, 0)
