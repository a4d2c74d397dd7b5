"""The exchange: where models publish their ballots and collect those of the others. Nothing else crosses.

``LocalExchange`` serves the models of one process. Several processes or machines replace this class alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fastcollab.ballots import Ballot


class ExchangeError(ValueError):
    """A ballot that does not belong where it came, or one that is missing."""


class Exchange(Protocol):
    def publish(self, step: int, uid: str, ballot: Ballot) -> None:
        """Hand in a ballot; the same one twice is one."""
        ...

    def collect(self, step: int, uid: str) -> dict[str, Ballot]:
        """The ballots of all voters on a question, complete; by voter, in the order of their names."""
        ...


class LocalExchange:
    """``views`` maps each voter of the run to the view that it reads.

    A ballot must name the run, step, question and view that are expected of its voter, and the version of the weights
    that the voter's other ballots of the step have, no older than the last step's. A step's ballots go when a later
    step begins, which none may before every question is answered by every voter.
    """

    def __init__(self, run: str, views: Mapping[str, str]) -> None:
        self.run, self.views = run, dict(views)
        self.step = -1
        self._ballots: dict[str, dict[str, Ballot]] = {}  # uid -> voter -> ballot, of this step
        self._versions: dict[str, tuple[int, int]] = {}  # voter -> (step, version)

    def publish(self, step: int, uid: str, ballot: Ballot) -> None:
        where = f"ballot of {ballot.voter!r} on {uid!r} at step {step}"
        if ballot.voter not in self.views:
            raise ExchangeError(f"{where}: got an unknown voter, need one of {sorted(self.views)}")
        for name, want in {"run": self.run, "step": step, "uid": uid, "view": self.views[ballot.voter]}.items():
            if (got := getattr(ballot, name)) != want:
                raise ExchangeError(f"{where}: got {name} {got!r}, need {want!r}")
        if step < self.step:
            raise ExchangeError(f"{where}: got a late ballot, need step {self.step} or later")
        if step > self.step:
            for other in self._ballots:
                self.collect(self.step, other)  # complete, or an error
        known = self._ballots.get(uid, {}).get(ballot.voter) if step == self.step else None
        if known is not None and known != ballot:
            raise ExchangeError(f"{where}: got a second one that differs, need one ballot a voter")
        last, version = self._versions.get(ballot.voter, (step, ballot.version))
        if ballot.version < version or last == step and ballot.version != version:
            raise ExchangeError(f"{where}: got version {ballot.version}, need {version}{' or later' * (last < step)}")
        if step > self.step:
            self.step, self._ballots = step, {}
        self._versions[ballot.voter] = step, ballot.version
        self._ballots.setdefault(uid, {})[ballot.voter] = ballot

    def collect(self, step: int, uid: str) -> dict[str, Ballot]:
        found = self._ballots.get(uid, {}) if step == self.step else {}
        missing = sorted(set(self.views) - set(found))
        if missing:
            raise ExchangeError(f"ballots on {uid!r} at step {step}: got none from {missing}, need one from each voter")
        return {voter: found[voter] for voter in sorted(found)}
