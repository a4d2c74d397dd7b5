"""Reviews: what a verifier is asked about the rows of a batch, and what its answers make of them (mintrl 2.2, 5, 6).

At the end of a chunk a row takes it that the verdict will be Keep and writes on (5.6), until it has another chunk to
show, or a step's end finds it known to be wrong; verdicts are asked for many rows at once. Keep: all stands. Revise:
what came behind the reviewed text is forgotten, text and KV are cut at the step, the correction is appended, and the
row goes on with fresh random numbers, so that it reads as if it had stopped for the verdict, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fastcollab.config import require
from fastcollab.corrections import Correction, CorrectionRules
from fastcollab.schedules import Intervene
from fastcollab.steps import Steps
from fastcollab.types import Intervention, Review
from fastcollab.verifiers import Request, Revise, settle

POLICY, VERIFIER = 0, 1  # authors
PART = 3  # a verifier that is not remote stops the batch: it is asked when one in PART of the open rows waits


@dataclass
class Draft:
    """One row: what was settled, and how often it was reviewed and corrected."""

    prompt: str
    row: Mapping[str, Any]
    accepted: tuple[str, ...] = ()  # texts of settled steps, as they were first shown
    starts: tuple[int, ...] = ()  # the response position of each
    floor: int = 0  # of these, up to the last correction: never reopened
    settled: int = 0  # response ids that they write
    external: int = 0  # ids that the verifier wrote
    unread: int = 0  # ids written behind a text under review, and taken away with its cut
    fixed: bool = False  # the last settled step is a correction
    reviews: list[Review] = field(default_factory=list)
    interventions: list[Intervention] = field(default_factory=list)


@dataclass(frozen=True)
class Due:
    """A review of the first ``position`` response ids."""

    request: Request
    starts: tuple[int, ...]  # the response position of each step, accepted and new
    position: int


@dataclass(frozen=True)
class Wrong:
    """A review that found ``step``, an index into the request's new ones, to be the first wrong one."""

    due: Due
    step: int


class Reviews:
    """The reviews of one call of ``generate``. ``drafts``: scheduler row -> its draft."""

    def __init__(self, schedule: Intervene, scheduler: Any, steps: Steps, stop_ids: Sequence[int],
                 drafts: dict[int, Draft], limits: Mapping[int, int], ignore_eos: bool = False) -> None:  # fmt: skip
        self.schedule, self.scheduler, self.steps, self.drafts, self.limits = schedule, scheduler, steps, drafts, limits
        self.rules = CorrectionRules(steps, schedule.max_tokens, schedule.reserve, schedule.leaks, tuple(stop_ids))
        self.ends = frozenset(() if ignore_eos else stop_ids)
        self.open = set(drafts)  # rows that may be reviewed yet
        self.waiting: dict[int, Due] = {}  # for a verdict
        self.wrong: dict[int, Wrong] = {}  # for a correction
        self.asked: dict[int, Any] = {}  # what is with the verifier, of either kind
        self.held: set[int] = set()  # rows that stop where they next ask, until their answer is there
        self.ended: set[int] = set()  # rows that wrote EOS or are full
        self.worker = ThreadPoolExecutor(1) if getattr(schedule.verifier, "remote", False) else None
        self.future: Future | None = None

    # -- from the engine's loop

    def look(self) -> None:
        """Decide for each row that asks: go on writing, be reviewed, or wait for the review before."""
        for i in self.scheduler.asking():
            if i not in self.drafts or i in self.held:
                continue
            due, out = self._due(i), self._out(i)
            if due is not None and not out:
                self._enter(i, due)
            if due is None or self.schedule.optimistic and not out:
                self.scheduler.set_author(i, POLICY)
            else:
                self.held.add(i)

    def end(self, rows: Sequence[int]) -> None:
        """Rows that their own EOS ended are reviewed too, while they may be (6.11); others are done."""
        for i in rows:
            if i in self.drafts:
                self.ended.add(i)
                self._last(i)

    def move(self, idle: bool) -> bool:
        """Ask the verifier, apply what it answered; ``idle``: no row can be written on. True while an answer is to
        come. Corrections go first, for their rows cannot go on; what a verdict on the spot finds wrong is asked too."""
        if self.future is not None and (idle or self.future.done()):
            answers, self.future = self.future.result(), None
            self._apply(answers)
        wrong = (self.wrong, self._corrections)
        for queue, ask in (wrong, (self.waiting, self._verdicts), wrong):
            enough = idle or self.worker is not None or queue is self.wrong or PART * len(queue) >= len(self.open)
            if queue and enough and not self.asked:
                self.asked, idle = dict(queue), False  # what a verdict keeps can be written on
                queue.clear()
                if self.worker is not None:
                    self.future = self.worker.submit(ask, list(self.asked.values()))
                else:
                    self._apply(ask(list(self.asked.values())))
        return bool(self.waiting or self.wrong or self.asked)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown(wait=False, cancel_futures=True)  # a verdict is out only where an error ends the call

    # -- parts

    def _out(self, i: int) -> bool:
        """Whether an answer about row ``i`` is still to come."""
        return any(i in rows for rows in (self.waiting, self.wrong, self.asked))

    def _due(self, i: int, ended: bool = False) -> Due | None:
        """The review of row ``i`` if its chunk is complete and reviews are left."""
        draft, s = self.drafts[i], self.schedule
        if len(draft.reviews) >= s.max_reviews or len(draft.interventions) >= s.max_interventions:
            self.open.discard(i)
            return None
        ids = self.scheduler.view(i)[1]
        new = len(ids) - draft.settled
        if new == 0 or new < s.chunk and not ended:
            return None
        ids = ids.tolist()
        if not (ended or new >= s.longest_chunk or self.steps.ends_step(ids)):
            return None
        found = self.steps.split(ids, draft.settled)
        texts, starts = tuple(step.text for step in found), draft.starts + tuple(step.start for step in found)
        if draft.fixed and len(texts) == 1:  # 6.16: after a correction something new must stand before the next
            return None
        first = draft.floor - len(draft.accepted) if s.rollback == "deep" and not draft.fixed else int(draft.fixed)
        left = tuple(self.steps.text(ids[a:b]) for a, b in pairwise(starts))
        request = Request(draft.prompt, draft.accepted, texts, draft.row, ended, first, left)
        return Due(request, starts, len(ids))

    def _enter(self, i: int, due: Due) -> None:
        """Wait for the verdict; until it is there, what is shown counts as kept."""
        draft = self.drafts[i]
        self.waiting[i] = due
        draft.reviews.append(Review(due.position, "keep"))
        draft.accepted, draft.starts = draft.accepted + due.request.new, due.starts
        draft.fixed, draft.settled = False, due.position

    def _last(self, i: int) -> None:
        """A row that ended, with no answer still to come, has its last review or none."""
        if self._out(i):
            return
        ids = self.scheduler.view(i)[1]
        if len(ids) and int(ids[-1]) in self.ends and (due := self._due(i, ended=True)) is not None:
            self._enter(i, due)
        else:
            self.open.discard(i)

    def _verdicts(self, asked: Sequence[Due]) -> list[Any]:
        requests = tuple(due.request for due in asked)  # a tuple: nobody sorts it in place
        verdicts = _one_each("verdicts", self.schedule.verifier.review(requests), requests)
        return [settle(v, r) for v, r in zip(verdicts, requests, strict=True)]

    def _corrections(self, asked: Sequence[Wrong]) -> Sequence[Any]:
        cuts = tuple(wrong.due.request.cut(wrong.step) for wrong in asked)
        return _one_each("corrections", self.schedule.verifier.correct(cuts), cuts)

    def _apply(self, answers: Sequence[Any]) -> None:
        """``answers`` to what was asked: verdicts, or what the verifier wrote in place of wrong steps."""
        asked, self.asked = self.asked, {}
        for (i, about), answer in zip(asked.items(), answers, strict=True):
            if isinstance(about, Wrong):
                self._conclude(i, about.due, self._revise(i, about.due, about.step, answer) or "intervention")
            elif isinstance(answer, Revise):
                self.wrong[i] = Wrong(about, answer.step)
                self.held.add(i)
            else:
                self._conclude(i, about, answer.reason or "keep")
        self.look()  # rows that were held, or ask behind a correction: they hold blocks, and nothing may be out

    def _conclude(self, i: int, due: Due, outcome: str) -> None:
        self.drafts[i].reviews[-1] = Review(due.position, outcome)
        self.held.discard(i)
        if i in self.ended:
            self._last(i)

    def _revise(self, i: int, due: Due, step: int, raw: Any) -> str | None:
        """Cut the row at the step and append the correction; or why the rules reject it."""
        prompt, response, _ = self.scheduler.view(i)
        draft, ids = self.drafts[i], response[: due.position].tolist()
        at = due.starts[len(due.request.accepted) + step]
        correction: Correction = self.rules(raw, ids[:at], ids[at:], self.limits[i] - at, due.request.row)
        most = self.schedule.cap * self.limits[i]
        reason = correction.reason or ("cap" if draft.external + len(correction.ids) > most else None)
        if reason:
            return reason
        self.scheduler.truncate(i, len(prompt) + at)
        self.scheduler.append_forced(i, correction.ids, VERIFIER)
        self.ended.discard(i)
        if at + len(correction.ids) == self.limits[i]:
            self.open.discard(i)  # it is full
        draft.interventions.append(Intervention(at, tuple(ids[at:]), correction.ids))
        draft.accepted = (*due.request.cut(step).accepted, correction.text)
        draft.floor = len(draft.accepted)
        draft.starts = (*due.starts[: draft.floor - 1], at)
        draft.settled, draft.fixed = at + len(correction.ids), True
        draft.external += len(correction.ids)
        draft.unread += len(response) - due.position
        return None


def _one_each(name: str, answers: Any, requests: Sequence[Request]) -> Sequence[Any]:
    got = len(answers) if isinstance(answers, Sequence) else answers
    require(got == len(requests), name, got, f"{len(requests)}, one a request")
    return answers
