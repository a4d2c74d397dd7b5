"""Labels: what a student is rewarded by, made from the ballots of a step. Pure functions of ballots behind one call.

``labels(step, uids, students, ballots) -> {(student, uid): Label}`` where ``ballots[voter, uid]`` is a voter's ballot.
Source: corl spec 2.4 (topologies) and 2.7 (variants).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from fastcollab.ballots import Ballot, Vote, tally
from fastcollab.config import require

Ballots = Mapping[tuple[str, str], Ballot]


@dataclass(frozen=True)
class Label:
    """``scores`` maps an answer to its reward; None: no label, the prompt is dropped for this student."""

    scores: Mapping[str, float] | None
    key: str | None = None  # the label, where it is one answer
    teachers: tuple[tuple[str, int], ...] = ()  # (voter, version of its weights)

    def reward(self, key: str | None) -> float | None:
        """The reward of a rollout with this answer: 0 without one, None where there is no label."""
        if self.scores is None:
            return None
        return 0.0 if key is None else float(self.scores.get(key, 0.0))


class Labels(Protocol):
    """A label provider. ``voters`` names those whose ballots it needs, all of them students by default."""

    def voters(self, students: Sequence[str]) -> list[str]: ...

    def __call__(
        self, step: int, uids: Sequence[str], students: Sequence[str], ballots: Ballots
    ) -> dict[tuple[str, str], Label]: ...


@dataclass(frozen=True)
class _PerQuestion:
    """A provider that looks at one question at a time; ``vote`` holds the options of :func:`tally`."""

    vote: Mapping[str, Any] = field(default_factory=dict)
    least_students = 2

    def voters(self, students: Sequence[str]) -> list[str]:
        got, name = len(students), type(self).__name__
        require(got >= self.least_students, f"models of {name}", got, f">= {self.least_students}")
        return sorted(students)

    def __call__(
        self, step: int, uids: Sequence[str], students: Sequence[str], ballots: Ballots
    ) -> dict[tuple[str, str], Label]:
        voters = self.voters(students)
        labels = {}
        for uid in uids:
            own = {voter: ballots[voter, uid] for voter in voters}
            for student in students:
                labels[student, uid] = self.label(student, own)
        return labels

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        raise NotImplementedError

    def tally(self, ballot: Ballot, others: Iterable[Ballot] = ()) -> Vote:
        """A voter's answer; only those of ``others`` who are not itself may break its tie."""
        return tally(ballot, others=[other for other in others if other is not ballot], **self.vote)


def _peers(student: str, ballots: dict[str, Ballot]) -> dict[str, Ballot]:
    """The ballots without the student's own, in any of its voices."""
    model = student.partition("@")[0]
    return {name: ballot for name, ballot in ballots.items() if name.partition("@")[0] != model}


def _hard(vote: Vote, *teachers: Ballot) -> Label:
    versions = tuple((b.voter, b.version) for b in teachers)
    return Label(None if vote.key is None else {vote.key: 1.0}, vote.key, versions)


@dataclass(frozen=True)
class Ring(_PerQuestion):
    """Each student learns from one predecessor: A from B, B from C, C from A in the order of ``order``."""

    order: tuple[str, ...] = ()  # default: the names, sorted

    def teacher(self, student: str, voters: Sequence[str]) -> str:
        order = self.order or tuple(sorted(voters))
        require(sorted(order) == sorted(voters), "order", order, f"a permutation of {sorted(voters)}")
        return order[(order.index(student) + 1) % len(order)]

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        teacher = ballots[self.teacher(student, list(ballots))]
        return _hard(self.tally(teacher, _peers(student, ballots).values()), teacher)


class Pair(Ring):
    """Two students, each the other's teacher."""

    def voters(self, students: Sequence[str]) -> list[str]:
        require(len(students) == 2, "models of Pair", len(students), "2 (Ring takes more)")
        return sorted(students)


class Soft(Ring):
    """The reward of an answer is its share of the teacher's votes."""

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        ballot = ballots[self.teacher(student, list(ballots))]
        if not ballot.counts:
            return Label(None, None, ((ballot.voter, ballot.version),))
        shares = {key: n / ballot.num_votes for key, n in ballot.counts.items()}
        return Label(shares, None, ((ballot.voter, ballot.version),))


class StrictMajority(_PerQuestion):
    """The answer that more peers chose than any other; a tie among them, or fewer than two labels, is no label."""

    least_students = 3

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        peers = _peers(student, ballots).values()
        votes = [self.tally(peer, peers).key for peer in peers]
        teachers = tuple((p.voter, p.version) for p in peers)
        chosen = sorted({v for v in votes if v is not None}, key=lambda k: (-votes.count(k), k))
        labelled = sum(v is not None for v in votes)
        tied = len(chosen) > 1 and votes.count(chosen[0]) == votes.count(chosen[1])
        if labelled < 2 or tied:
            return Label(None, None, teachers)
        return Label({chosen[0]: 1.0}, chosen[0], teachers)


class Union(_PerQuestion):
    """An answer that any peer's vote names is right."""

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        peers = _peers(student, ballots).values()
        keys = sorted({key for p in peers if (key := self.tally(p, peers).key) is not None})
        teachers = tuple((p.voter, p.version) for p in peers)
        only = keys[0] if len(keys) == 1 else None
        return Label({key: 1.0 for key in keys} if keys else None, only, teachers)


@dataclass(frozen=True)
class Weighted(_PerQuestion):
    """All voters' answers, each voter weighted by its self-consistency to the power gamma (after RLCCF, 2508.12338).

    S(c) = sum over j of s_j^gamma n_j(c) / V_j with s_j the share of j's top answer; the label is the c of the largest
    S, of none if two have it. A collapsed voter has s = 1, so ``guard`` "cap" holds every s_j at the cohort's 90th
    percentile, and "agreement" takes for s_j the chance that one of j's votes and one of another's on this question
    agree. A student's own ballot enters neither S nor the guard; with ``include_self`` it does, and all have one label.
    """

    gamma: float = 1.0
    margin: float = 0.0  # of S, below which there is no label
    include_self: bool = False
    guard: str | None = "cap"

    @property
    def least_students(self) -> int:
        return 3 if self.guard == "agreement" and not self.include_self else 2  # a lone peer agrees with nobody

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        require(self.guard in (None, "cap", "agreement"), "guard", self.guard, "None, 'cap' or 'agreement'")
        ballots = ballots if self.include_self else _peers(student, ballots)
        names = sorted(ballots)
        weight = self.weights(ballots)
        scores: dict[str, float] = {}
        for name in names:
            for key, n in ballots[name].counts.items():
                scores[key] = scores.get(key, 0.0) + weight[name] ** self.gamma * n / ballots[name].num_votes
        teachers = tuple((name, ballots[name].version) for name in names)
        ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
        if not ranked or ranked[0][1] <= 0:
            return Label(None, None, teachers)
        lead = ranked[0][1] - (ranked[1][1] if len(ranked) > 1 else 0.0)
        few = sum(ballots[name].counts.get(ranked[0][0], 0) for name in names) < self.vote.get("min_votes", 2)
        if few or lead < self.margin or lead <= 1e-12:
            return Label(None, None, teachers)
        return Label({ranked[0][0]: 1.0}, ranked[0][0], teachers)

    def weights(self, ballots: dict[str, Ballot]) -> dict[str, float]:
        """Each voter's weight on this question."""
        share = {name: {k: n / b.num_votes for k, n in b.counts.items()} for name, b in ballots.items()}
        if self.guard == "agreement":
            return {
                j: sum(p * share[k].get(c, 0.0) for k in share if k != j for c, p in share[j].items())
                / max(1, len(share) - 1)
                for j in share
            }
        own = {name: max(s.values(), default=0.0) for name, s in share.items()}
        if self.guard == "cap":
            limit = float(np.percentile(list(own.values()), 90))
            own = {name: min(s, limit) for name, s in own.items()}
        return own


class SelfVote(_PerQuestion):
    """A student's own majority (TTRL, arXiv 2504.16084): the baseline that reinforces what it already says."""

    least_students = 1

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        return _hard(self.tally(ballots[student]), ballots[student])


class EMATeacher(_PerQuestion):
    """The majority of a slowly following copy of the student, voter "<student>@ema" (Co-rewarding-II, 2508.00410)."""

    least_students = 1

    def voters(self, students: Sequence[str]) -> list[str]:
        return sorted([*students, *(f"{name}@ema" for name in students)])

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        teacher = f"{student}@ema"
        return _hard(self.tally(ballots[teacher]), ballots[teacher])


class OtherView(_PerQuestion):
    """A student's majority on another wording of the question (Co-rewarding-I): "a" and "a@<view>" teach each other."""

    least_students = 2

    def label(self, student: str, ballots: dict[str, Ballot]) -> Label:
        model = student.partition("@")[0]
        twins = [name for name in ballots if name != student and name.partition("@")[0] == model]
        require(len(twins) == 1, f"views of {model!r}", len(twins) + 1, "2")
        return _hard(self.tally(ballots[twins[0]]), ballots[twins[0]])


@dataclass(frozen=True)
class Gold:
    """The right answer, as a control and ceiling: ``answers`` maps a uid to its key."""

    answers: Mapping[str, str]

    def voters(self, students: Sequence[str]) -> list[str]:
        return sorted(students)

    def __call__(
        self, step: int, uids: Sequence[str], students: Sequence[str], ballots: Ballots
    ) -> dict[tuple[str, str], Label]:
        absent = sorted(set(uids) - set(self.answers))
        require(not absent, "answers", f"none for {absent}", "the right one for every question")
        return {(s, uid): Label({self.answers[uid]: 1.0}, self.answers[uid]) for s in students for uid in uids}


@dataclass(frozen=True)
class RandomLabel:
    """A control that carries no information on a question: an answer drawn from all that the step's ballots hold."""

    seed: int = 0

    def voters(self, students: Sequence[str]) -> list[str]:
        return sorted(students)

    def __call__(
        self, step: int, uids: Sequence[str], students: Sequence[str], ballots: Ballots
    ) -> dict[tuple[str, str], Label]:
        pool = sorted({key for ballot in ballots.values() for key in ballot.counts})
        labels = {}
        for student in students:
            for uid in uids:
                key = pool[_draw(self.seed, step, student, uid) % len(pool)] if pool else None
                labels[student, uid] = Label({key: 1.0} if key is not None else None, key)
        return labels


@dataclass(frozen=True)
class ShuffledUid:
    """A control: the labels of ``inner``, each given to another question of the step (the fault of corl spec 5.3)."""

    inner: Labels
    seed: int = 0

    def voters(self, students: Sequence[str]) -> list[str]:
        return self.inner.voters(students)

    def __call__(
        self, step: int, uids: Sequence[str], students: Sequence[str], ballots: Ballots
    ) -> dict[tuple[str, str], Label]:
        labels, distinct = self.inner(step, uids, students, ballots), set(uids)
        require(len(distinct) >= 2, "questions of a step", len(distinct), ">= 2 to shuffle")
        order = sorted(distinct, key=lambda uid: (_draw(self.seed, step, uid), uid))
        moved = dict(zip(order, order[1:] + order[:1], strict=True))  # a cycle: nobody keeps its own
        return {(student, uid): labels[student, moved[uid]] for student in students for uid in uids}


def _draw(*name: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), "little")


TOPOLOGIES = {"pair": Pair, "ring": Ring, "majority": StrictMajority, "union": Union, "weighted": Weighted,
              "soft": Soft, "self": SelfVote, "ema": EMATeacher, "views": OtherView}  # fmt: skip


def make_labels(name: str, vote: Mapping[str, Any], seed: int = 0, /, **options: Any) -> Labels:
    """A provider by name; ``vote`` are the options of :func:`tally`, ``options`` those of the provider itself.

    "random" and "shuffled" are the controls; "shuffled" permutes the labels of ``options["inner"]`` (default "ring").
    """
    kinds = TOPOLOGIES | {"random": RandomLabel, "shuffled": ShuffledUid, "gold": Gold}
    require(name in kinds, "labels", name, ", ".join(kinds))
    if name == "shuffled":
        inner, known = options.pop("inner", "ring"), [kind for kind in TOPOLOGIES if kind != "views"]
        require(inner in known, "inner", inner, f"{', '.join(known[:-1])} or {known[-1]}")
        return ShuffledUid(make_labels(inner, vote, seed, **options), seed)
    given = {"vote": dict(vote)} if name in TOPOLOGIES else {"seed": seed} if name == "random" else {}
    takes = [f.name for f in fields(kinds[name]) if f.name not in given]
    unknown = [option for option in options if option not in takes]
    require(not unknown, "label_options", unknown, f"{', '.join(takes) or 'none'} with labels {name!r}")
    require(name != "gold" or "answers" in options, "answers", None, "the right one by uid for labels 'gold'")
    return kinds[name](**given, **options)
