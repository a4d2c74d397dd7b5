"""Reviews: which rows of a batch wait for a verifier, and what its verdicts make of them (mintrl 2.2, 5, 6).

A row stops at the end of a chunk and holds its place in the batch; the others go on. Verdicts, and apart from them
corrections, are asked for many rows at once: when those that wait are a part of those that may, or nothing else can be
written. Keep: the row goes on. Revise: both its text and its KV are cut at the step, the correction is appended, and
the row goes on with fresh random numbers.
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
PART = 8  # a verifier that is not remote stops the batch: it is asked when one in PART of the open rows waits
ROUNDS = 2  # and for corrections at the latest after so many verdicts more


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
    fixed: bool = False  # the last settled step is a correction
    reviews: list[Review] = field(default_factory=list)
    interventions: list[Intervention] = field(default_factory=list)


class Reviews:
    """The reviews of one call of ``generate``. ``drafts``: scheduler row -> its draft."""

    def __init__(self, schedule: Intervene, scheduler: Any, steps: Steps, stop_ids: Sequence[int],
                 drafts: dict[int, Draft], limits: Mapping[int, int]) -> None:  # fmt: skip
        self.schedule, self.scheduler, self.steps, self.drafts, self.limits = schedule, scheduler, steps, drafts, limits
        self.rules = CorrectionRules(steps, schedule.max_tokens, schedule.reserve, schedule.leaks, tuple(stop_ids))
        self.stop_ids = set(stop_ids)
        self.open = set(drafts)  # rows that may be reviewed yet
        self.waiting: dict[int, Request] = {}  # for a verdict
        self.wrong: dict[int, tuple[Request, int]] = {}  # for the correction from a step on
        self.rounds = 0  # of verdicts since the first of these
        self.asked: dict[int, Any] = {}  # what is with the verifier, of either kind
        self.worker = ThreadPoolExecutor(1) if getattr(schedule.verifier, "remote", False) else None
        self.future: Future | None = None

    # -- from the engine's loop

    def look(self) -> None:
        """Decide for each row that asks: go on writing, or wait for a verdict."""
        for i in self.scheduler.asking():
            if i in self.drafts and not any(i in rows for rows in (self.waiting, self.wrong, self.asked)):
                request = self._due(i)
                if request is None:
                    self.scheduler.set_author(i, POLICY)
                else:
                    self.waiting[i] = request

    def ended(self, rows: Sequence[int], ignore_eos: bool = False) -> None:
        """Rows that their own EOS ended are reviewed too, while they may be (6.11); others are done."""
        for i in rows:
            ids = self.scheduler.view(i)[1] if i in self.drafts and not ignore_eos else ()
            if len(ids) and int(ids[-1]) in self.stop_ids and (request := self._due(i, ended=True)) is not None:
                self.waiting[i] = request
            else:
                self.open.discard(i)

    def move(self, idle: bool) -> bool:
        """Ask the verifier, apply what it answered; ``idle``: no row can be written on. True while any row waits."""
        if self.future is not None and (idle or self.future.done()):
            answers, self.future = self.future.result(), None
            self._apply(answers)
        for queue, ask in ((self.waiting, self._verdicts), (self.wrong, self._corrections)):
            enough = idle or self.worker is not None or PART * len(queue) >= len(self.open)
            late = queue is self.wrong and self.rounds >= ROUNDS
            if queue and (enough or late) and not self.asked:
                self.asked, idle = dict(queue), False  # what a verdict keeps can be written on
                self.rounds = self.rounds + 1 if self.wrong and queue is self.waiting else 0
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

    def _due(self, i: int, ended: bool = False) -> Request | None:
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
        return Request(draft.prompt, draft.accepted, texts, draft.row, ended, first, left)

    def _verdicts(self, requests: Sequence[Request]) -> list[Any]:
        requests = tuple(requests)  # a tuple: nobody sorts it in place
        verdicts = _one_each("verdicts", self.schedule.verifier.review(requests), requests)
        return [settle(v, r) for v, r in zip(verdicts, requests, strict=True)]

    def _corrections(self, wrong: Sequence[tuple[Request, int]]) -> Sequence[Any]:
        cuts = tuple(request.cut(step) for request, step in wrong)
        return _one_each("corrections", self.schedule.verifier.correct(cuts), cuts)

    def _apply(self, answers: Sequence[Any]) -> None:
        """``answers`` to what was asked: verdicts, or what the verifier wrote in place of wrong steps."""
        asked, self.asked = self.asked, {}
        for (i, about), answer in zip(asked.items(), answers, strict=True):
            draft, position = self.drafts[i], len(self.scheduler.view(i)[1])
            if not isinstance(about, Request):
                request, step = about
                outcome = self._revise(i, draft, request, step, answer) or "intervention"
            elif isinstance(answer, Revise):
                self.wrong[i] = (about, answer.step)
                continue
            else:
                request, outcome = about, answer.reason or "keep"
            draft.reviews.append(Review(position, outcome))
            if outcome != "intervention":
                self._keep(i, draft, request)

    def _keep(self, i: int, draft: Draft, request: Request) -> None:
        ids = self.scheduler.view(i)[1].tolist()
        draft.starts += tuple(step.start for step in self.steps.split(ids, draft.settled))
        draft.accepted, draft.fixed, draft.settled = draft.accepted + request.new, False, len(ids)
        if request.ended:
            self.open.discard(i)
        else:
            self.scheduler.set_author(i, POLICY)

    def _revise(self, i: int, draft: Draft, request: Request, step: int, raw: Any) -> str | None:
        """Cut the row at the step and append the correction; or why the rules reject it."""
        prompt, response, _ = self.scheduler.view(i)
        ids = response.tolist()
        starts = draft.starts + tuple(s.start for s in self.steps.split(ids, draft.settled))
        step += len(draft.accepted)
        at = starts[step]
        correction: Correction = self.rules(raw, ids[:at], ids[at:], self.limits[i] - at, request.row)
        most = self.schedule.cap * self.limits[i]
        reason = correction.reason or ("cap" if draft.external + len(correction.ids) > most else None)
        if reason:
            return reason
        self.scheduler.truncate(i, len(prompt) + at)
        self.scheduler.append_forced(i, correction.ids, VERIFIER)
        draft.interventions.append(Intervention(at, tuple(ids[at:]), correction.ids))
        draft.accepted = (*request.cut(step - len(draft.accepted)).accepted, correction.text)
        draft.starts, draft.floor = (*starts[:step], at), step + 1
        draft.settled, draft.fixed = at + len(correction.ids), True
        draft.external += len(correction.ids)
        return None


def _one_each(name: str, answers: Any, requests: Sequence[Request]) -> Sequence[Any]:
    got = len(answers) if isinstance(answers, Sequence) else answers
    require(got == len(requests), name, got, f"{len(requests)}, one a request")
    return answers
