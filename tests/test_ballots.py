"""Ballots and the vote: plurality, ties, thresholds, and that rollout order leaves no trace."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

from fastcollab.ballots import TIES, Ballot, Vote, tally
from fastcollab.grading import key
from fastcollab.labels import SelfVote

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}


def ballot(keys, logprobs=(), voter="a", uid="q", **other) -> Ballot:
    keys = tuple(None if k == "." else k for k in keys)
    return Ballot(
        **{"run": "r", "step": 3, "view": "prompt", "version": 3} | other,
        uid=uid,
        voter=voter,
        keys=keys,
        logprobs=tuple(logprobs),
    )


def test_counts():
    b = ballot("bab.")
    assert list(b.counts.items()) == [("a", 1), ("b", 2)]
    assert (b.num_votes, b.num_parsed) == (4, 3)


@pytest.mark.parametrize(
    "keys, options, want",
    [
        ("aab.", {}, Vote("a", 2 / 4, 1 / 4, "label")),
        ("aab.", {"denominator": "parsed"}, Vote("a", 2 / 3, 1 / 3, "label")),
        ("aaaa", {}, Vote("a", 1.0, 1.0, "label")),
        ("....", {}, Vote(None, 0.0, 0.0, "no answer")),
        ("", {}, Vote(None, 0.0, 0.0, "no answer")),
        ("abcd", {}, Vote(None, 1 / 4, 0.0, "too few")),
        ("abcd", {"min_votes": 1}, Vote(None, 1 / 4, 0.0, "tie")),
        ("a...", {}, Vote(None, 1 / 4, 1 / 4, "too few")),
        ("a...", {"min_votes": 1}, Vote("a", 1 / 4, 1 / 4, "label")),
        ("a...", {"min_votes": 1, "threshold": 0.5}, Vote(None, 1 / 4, 1 / 4, "below threshold")),
        ("a...", {"min_votes": 1, "threshold": 0.5, "denominator": "parsed"}, Vote("a", 1.0, 1.0, "label")),
        ("aab.", {"threshold": 0.5}, Vote("a", 2 / 4, 1 / 4, "label")),  # at least, not above
        ("aab.", {"threshold": 0.51}, Vote(None, 2 / 4, 1 / 4, "below threshold")),
        ("aabb", {}, Vote(None, 2 / 4, 0.0, "tie")),
        ("abba", {"tie": "first"}, Vote("a", 2 / 4, 0.0, "label")),
        ("baab", {"tie": "first"}, Vote("b", 2 / 4, 0.0, "label")),
    ],
)
def test_tally(keys, options, want):
    assert tally(ballot(keys), **options) == want


def test_a_tie_broken_by_the_other_voters():
    tied = ballot("aabbc")
    peers = [ballot("bcc", voter="b"), ballot("c..", voter="c")]
    assert tally(tied, tie="peer_assist", others=peers).key == "b"  # c has more votes and isn't tied
    assert tally(tied, tie="peer_assist", others=peers + [ballot("a", voter="d")]) == Vote(None, 2 / 5, 0.0, "tie")
    assert tally(tied, tie="peer_assist").reason == "tie"


def test_a_tie_broken_by_the_mean_logprob():
    """The mean over the tied answer's rollouts: what else they hold, and rollouts of others, don't enter."""
    assert tally(ballot("abab.", (-0.5, -0.4, -0.1, -0.4, -9)), tie="logprob").key == "a"  # -0.3 against -0.4
    assert tally(ballot("abab.", (-0.5, -0.4, -0.3, -0.4, 0)), tie="logprob").reason == "tie"
    assert tally(ballot("aab", (-9, -9, -1)), tie="logprob").key == "a"  # no tie
    assert tally(ballot("ab", (-math.inf, -5)), tie="logprob", min_votes=1).key == "b"
    with pytest.raises(ValueError, match="logprobs: got 'none', need one per rollout to break a tie by 'logprob'"):
        tally(ballot("aabb"), tie="logprob")


@pytest.mark.parametrize("tie", TIES)
def test_rollout_order_leaves_no_trace(tie):
    """But for "first", which is there for parity and must show it."""
    rng = random.Random(0)
    moved = 0
    for _ in range(200):
        rollouts = [(rng.choice(["a", "b", "c", None]), rng.choice([-0.1, -0.2, -0.3, -0.7])) for _ in range(6)]
        others = [ballot([rng.choice("abc") for _ in range(3)], voter=v) for v in "bc"]
        votes = set()
        for order in itertools.islice(itertools.permutations(rollouts), 0, 720, 37):
            keys, logprobs = zip(*order, strict=True)
            votes.add(tally(ballot(keys, logprobs), tie=tie, others=rng.sample(others, 2)))
        moved += len(votes) > 1
    assert (moved > 0) is (tie == "first")


def test_c48_an_empty_answer_never_wins():
    case, want = CASES["C48"]["input"], CASES["C48"]["expected"]

    def cast(answers):
        return ballot([None if a is None or (k := key(a)) is None else repr(k) for a in answers])

    b = cast(case["answers"])
    assert tally(b, min_votes=1) == Vote(repr(key("5")), 1 / 4, 1 / 4, "label")  # the non-answers count in the share
    assert tally(b).reason == "too few"
    label = SelfVote({"min_votes": 1}).label("a", {"a": b})
    assert [label.reward(k) for k in b.keys] == [want["reward_of_empty"]] * 3 + [1.0]
    label = SelfVote().label("a", {"a": cast(case["all_empty"])})
    assert [label.reward(k) for k in (None, repr(key("5")))] == [None, None]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tally(ballot("a"), tie="coin"), "tie: got 'coin', need abstain or first or peer_assist or logprob"),
        (lambda: tally(ballot("a"), denominator="all"), "denominator: got 'all', need votes or parsed"),
        (lambda: tally(ballot("a"), min_votes=0), "min_votes: got 0, need >= 1"),
        (lambda: tally(ballot("a"), threshold=8), r"threshold: got 8, need in \[0, 1\]"),
        (lambda: ballot(("a", "")), "keys: got .*, need None for an answer that is absent or empty"),
        (lambda: ballot("ab", (-1,)), "logprobs: got '1 values', need none or one for each of 2 rollouts"),
        (lambda: ballot("a", (math.nan,)), "logprobs: got .*nan.*, need no NaN"),
    ],
)
def test_errors_say_what_is_needed(call, message):
    with pytest.raises(ValueError, match=message):
        call()
