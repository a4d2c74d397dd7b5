"""Fault injection at the exchange: each fault is a named error, and nothing is collected on a wrong label."""

from __future__ import annotations

import dataclasses

import pytest
from test_ballots import ballot

from fastcollab.exchange import ExchangeError, LocalExchange

VIEWS = {"a": "prompt", "b": "rephrased"}


def said(voter, keys="xy", **other):
    return ballot(keys, voter=voter, **{"view": VIEWS.get(voter, "prompt")} | other)


@pytest.fixture
def exchange():
    """At step 3, question q: a's ballot is there, b's is not."""
    exchange = LocalExchange("r", VIEWS)
    exchange.publish(3, "q", said("a"))
    return exchange


def test_a_step(exchange):
    exchange.publish(3, "q", said("b", "x"))  # G may differ
    assert exchange.collect(3, "q") == {"a": said("a"), "b": said("b", "x")}
    assert list(exchange.collect(3, "q")) == ["a", "b"]
    for voter in "ba":
        exchange.publish(4, "p", said(voter, step=4, uid="p", version=4))
    assert list(exchange.collect(4, "p")) == ["a", "b"]  # by name, not by arrival
    with pytest.raises(ExchangeError, match="ballots on 'q' at step 3: got none from"):
        exchange.collect(3, "q")


FAULTS = {
    "unknown voter": (said("c"), "got an unknown voter, need one of \\['a', 'b'\\]"),
    "another run": (said("b", run="s"), "got run 's', need 'r'"),
    "wrong step": (said("b", step=2), "got step 2, need 3"),
    "wrong question": (said("b", uid="p"), "got uid 'p', need 'q'"),
    "wrong view": (said("b", view="prompt"), "got view 'prompt', need 'rephrased'"),
    "a second that differs": (said("a", "xx"), "got a second one that differs, need one ballot a voter"),
    "a second of other weights": (said("a", version=4), "got a second one that differs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_ballot_is_named_and_not_kept(exchange, fault):
    wrong, message = FAULTS[fault]
    with pytest.raises(ExchangeError, match=f"ballot of '{wrong.voter}' on 'q' at step 3: {message}"):
        exchange.publish(3, "q", wrong)
    with pytest.raises(
        ExchangeError, match="ballots on 'q' at step 3: got none from \\['b'\\], need one from each voter"
    ):
        exchange.collect(3, "q")
    exchange.publish(3, "q", said("b"))
    assert exchange.collect(3, "q") == {"a": said("a"), "b": said("b")}


def test_the_same_ballot_twice_is_one(exchange):
    exchange.publish(3, "q", said("a"))
    exchange.publish(3, "q", said("b"))
    exchange.publish(3, "q", said("a"))
    assert exchange.collect(3, "q") == {"a": said("a"), "b": said("b")}


def test_missing_is_an_error_for_questions_and_voters(exchange):
    for step, uid, who in ((3, "q", ["b"]), (3, "p", ["a", "b"]), (4, "q", ["a", "b"]), (2, "q", ["a", "b"])):
        with pytest.raises(ExchangeError, match=f"at step {step}: got none from") as error:
            exchange.collect(step, uid)
        assert str(who) in str(error.value)


def test_a_step_that_is_not_complete_is_not_left(exchange):
    ahead = said("a", step=4, version=4)
    with pytest.raises(ExchangeError, match="ballots on 'q' at step 3: got none from \\['b'\\]"):
        exchange.publish(4, "q", ahead)
    exchange.publish(3, "q", said("b"))
    assert exchange.collect(3, "q")["a"] == said("a")  # the early ballot left no trace
    exchange.publish(4, "q", ahead)


def test_a_late_ballot_is_refused(exchange):
    exchange.publish(3, "q", said("b"))
    for voter in "ab":
        exchange.publish(4, "q", said(voter, step=4, version=4))
    before = exchange.collect(4, "q")
    with pytest.raises(ExchangeError, match="on 'q' at step 3: got a late ballot, need step 4 or later"):
        exchange.publish(3, "q", said("a"))
    assert exchange.collect(4, "q") == before


def test_a_voter_has_one_version_a_step_and_none_older_later(exchange):
    with pytest.raises(ExchangeError, match="ballot of 'a' on 'p' at step 3: got version 4, need 3"):
        exchange.publish(3, "p", said("a", uid="p", version=4))
    exchange.publish(3, "q", said("b"))
    with pytest.raises(ExchangeError, match="on 'q' at step 4: got version 2, need 3 or later"):
        exchange.publish(4, "q", said("a", step=4, version=2))
    exchange.publish(4, "q", said("a", step=4, version=3))  # a voter that isn't trained keeps its version


def test_a_ballot_cannot_be_changed_after_it_is_handed_in():
    with pytest.raises(dataclasses.FrozenInstanceError):
        said("a").keys = ("y",)
