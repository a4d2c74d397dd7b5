"""Ballots: what one voter's rollouts answered to one question, and the vote that they come to.

A ballot is all that crosses between models: some strings per question, with the run, the step, the question, the view
and the policy version that they belong to (corl spec 2.3, 5.4 item 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isnan

from fastcollab.config import require

TIES = ("abstain", "first", "peer_assist", "logprob")
DENOMINATORS = ("votes", "parsed")


@dataclass(frozen=True)
class Ballot:
    """The answers of V rollouts; ``keys`` in rollout order, None (never an empty string) where there is no answer."""

    run: str
    step: int
    uid: str
    voter: str
    view: str  # the column that the question was read from
    version: int  # of the voter's weights
    keys: tuple[str | None, ...]
    logprobs: tuple[float, ...] = ()  # mean log-prob of each rollout, for ties by "logprob"

    def __post_init__(self) -> None:
        require("" not in self.keys, "keys", self.keys, "None for an answer that is absent or empty")
        V, L = len(self.keys), len(self.logprobs)
        require(L in (0, V), "logprobs", f"{L} values", f"none or one for each of {V} rollouts")
        require(not any(map(isnan, self.logprobs)), "logprobs", self.logprobs, "no NaN")

    @property
    def num_votes(self) -> int:
        """V, rollouts without an answer included."""
        return len(self.keys)

    @property
    def counts(self) -> dict[str, int]:
        """Votes of each answer, sorted by key: rollout order leaves no trace."""
        return dict(sorted(Counter(k for k in self.keys if k is not None).items()))

    @property
    def num_parsed(self) -> int:
        return sum(k is not None for k in self.keys)


@dataclass(frozen=True)
class Vote:
    """What a ballot comes to: an answer, or None and the reason."""

    key: str | None
    share: float  # of the top answer, by the denominator
    margin: float  # share of the top answer minus that of the second
    reason: str  # label | no answer | tie | too few | below threshold


def tally(
    ballot: Ballot,
    *,
    tie: str = "abstain",
    min_votes: int = 2,
    threshold: float = 0.0,
    denominator: str = "votes",
    others: Sequence[Ballot] = (),
) -> Vote:
    """The plurality answer, if it has ``min_votes`` votes and at least the share ``threshold``.

    The share is of all votes, or with ``denominator`` "parsed" of those that have an answer. A tie at the top abstains;
    "peer_assist" takes the tied answer with more votes among ``others`` and "logprob" the one whose rollouts have the
    higher mean log-prob, and both abstain where that ties too; "first" takes the one that came first in rollout order,
    for parity with published code only. Source: corl spec 2.3 and section 6.
    """
    require(tie in TIES, "tie", tie, " or ".join(TIES))
    require(denominator in DENOMINATORS, "denominator", denominator, " or ".join(DENOMINATORS))
    require(min_votes >= 1, "min_votes", min_votes, ">= 1")
    require(0 <= threshold <= 1, "threshold", threshold, "in [0, 1]")
    counts = ballot.counts
    if not counts:
        return Vote(None, 0.0, 0.0, "no answer")
    total = ballot.num_votes if denominator == "votes" else ballot.num_parsed
    ranked = sorted(counts.values(), reverse=True)
    share, margin = ranked[0] / total, (ranked[0] - (ranked[1] if len(ranked) > 1 else 0)) / total
    if ranked[0] < min_votes:
        return Vote(None, share, margin, "too few")
    if share < threshold:
        return Vote(None, share, margin, "below threshold")
    top = [key for key, n in counts.items() if n == ranked[0]]
    key = top[0] if len(top) == 1 else _break(ballot, top, tie, others)
    return Vote(key, share, margin, "tie" if key is None else "label")


def _break(ballot: Ballot, tied: list[str], tie: str, others: Sequence[Ballot]) -> str | None:
    if tie == "abstain":
        return None
    if tie == "first":
        return next(key for key in ballot.keys if key in tied)
    if tie == "peer_assist":
        score = {key: sum(other.counts.get(key, 0) for other in others) for key in tied}
    else:
        require(len(ballot.logprobs) > 0, "logprobs", "none", "one per rollout to break a tie by 'logprob'")
        pairs = list(zip(ballot.keys, ballot.logprobs, strict=True))
        score = {key: fsum(lp for k, lp in pairs if k == key) / ballot.counts[key] for key in tied}  # exact: order-free
    best = max(score.values())
    first, *more = [key for key in tied if score[key] == best]
    return None if more else first
