"""The loop that reviewed rollouts are compared with: nothing is kept between two calls, each reads its whole prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import fastcollab as fc
from fastcollab.corrections import CorrectionRules
from fastcollab.schedules import Intervene
from fastcollab.tokens import decode
from fastcollab.verifiers import Request, Revise, next_ids, settle


@dataclass
class Text:
    """One row of the loop."""

    index: int
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    accepted: tuple[str, ...] = ()
    settled: int = 0  # ids that the accepted steps write
    reviews: int = 0
    fixes: int = 0
    fixed: bool = False  # the last accepted step is a correction


class Reprefill:
    """``loop(prompts, rows, new_tokens) -> ids``: decode a chunk, ask for verdicts, for corrections, cut, go on.

    ``engine`` and the verifier's keep no prefix cache, so that each of the three calls reads every row anew. Where a
    chunk ends depends on its text: without ``learn`` the first run finds out by writing on and cutting.
    """

    def __init__(self, engine: fc.Engine, schedule: Intervene) -> None:
        self.engine, self.schedule, self.verifier = engine, schedule, schedule.verifier
        self.steps = schedule.made_steps(engine.tokenizer)
        self.rules = CorrectionRules(self.steps, schedule.max_tokens, schedule.reserve, schedule.leaks)
        self.lengths: dict[tuple[int, ...], int] = {}
        limit = engine._limit

        def chunk_limit(ids, index, writers, new):  # rows of one call write their own numbers of tokens
            return min(limit(ids, index, writers, new), self.lengths.get(tuple(ids), new))

        engine._limit = chunk_limit

    def __call__(self, prompts: Sequence[list[int]], rows: Sequence[dict], new_tokens: int) -> list[list[int]]:
        texts = [Text(i, prompt) for i, prompt in enumerate(prompts)]
        while live := [text for text in texts if len(text.ids) < new_tokens]:
            self._write(live, new_tokens)
            due = [text for text in live if len(text.ids) < new_tokens and self._may(text)]
            if due:
                self._review(due, rows, new_tokens)
        return [text.ids for text in texts]

    def learn(self, rollouts: Sequence[fc.Rollout]) -> None:
        """Take the lengths of the chunks from what the engine wrote; the loop should write the same."""
        for r in rollouts:
            cuts, settled, end = iter(r.interventions), 0, len(r.ids)
            for review in [*r.reviews, None]:
                here = tuple(r.prompt_ids + r.ids[:settled])
                self.lengths[here] = (review.position if review else end) - settled
                if review and review.outcome == "intervention":
                    cut = next(cuts)
                    settled = cut.position + len(cut.inserted)
                elif review:
                    settled = review.position

    def _may(self, text: Text) -> bool:
        return text.reviews < self.schedule.max_reviews and text.fixes < self.schedule.max_interventions

    def _write(self, live: list[Text], new_tokens: int) -> None:
        starts = [text.prompt + text.ids for text in live]
        sampling = fc.SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
        for text, start, made in zip(live, starts, self.engine.generate(starts, sampling=sampling), strict=True):
            if tuple(start) not in self.lengths:
                self.lengths[tuple(start)] = self._chunk(text, made.ids[: new_tokens - len(text.ids)])
            text.ids += made.ids[: self.lengths[tuple(start)]]

    def _chunk(self, text: Text, new: list[int]) -> int:
        """How many of ``new`` the row writes before its next review."""
        for n in range(1, len(new) + 1 if self._may(text) else 0):
            ids = text.ids + new[:n]
            enough = len(ids) - text.settled >= self.schedule.chunk
            if enough and self.steps.may_end[ids[-1]] and self.steps.ends_step(ids):
                if not (text.fixed and len(self.steps.split(ids, text.settled)) == 1):
                    return n
        return len(new)

    def _review(self, due: list[Text], rows: Sequence[dict], new_tokens: int) -> None:
        split = {text.index: self.steps.split(text.ids, text.settled) for text in due}
        requests = [
            Request(decode(self.engine.tokenizer, text.prompt), text.accepted, tuple(s.text for s in split[text.index]),
                    rows[text.index], False, int(text.fixed))
            for text in due
        ]  # fmt: skip
        verdicts = self._verdicts(requests)
        cuts = [(t, q, v.step) for t, q, v in zip(due, requests, verdicts, strict=True) if isinstance(v, Revise)]
        raw = self.verifier.correct([q.cut(step) for _, q, step in cuts]) if cuts else []
        fixes = {}
        for (text, request, step), written in zip(cuts, raw, strict=True):
            at = split[text.index][step].start
            fix = self.rules(written, text.ids[:at], text.ids[at:], new_tokens - at, request.row)
            if fix.reason is None:
                fixes[text.index] = (at, step, fix)
        for text, request in zip(due, requests, strict=True):
            text.reviews += 1
            text.fixed = text.index in fixes
            if text.fixed:
                at, step, fix = fixes[text.index]
                text.ids[at:] = fix.ids
                text.accepted += (*request.new[:step], fix.text)
                text.fixes += 1
            else:
                text.accepted += request.new
            text.settled = len(text.ids)

    def _verdicts(self, requests: list[Request]) -> list[Any]:
        """One constrained, greedy answer each, written to its end."""
        choices = [self.verifier.choices(request) for request in requests]
        prompts = [self.verifier.prompt(self.verifier.template.verdict_messages(request)) for request in requests]
        said = self.verifier.engine.generate(
            prompts,
            sampling=fc.SamplingParams(temperature=0.0, max_new_tokens=max(len(ids) for c in choices for ids in c)),
            allowed=lambda group, ids: next_ids(choices[group], ids),
        )
        return [settle(c[tuple(r.ids)], q) for c, r, q in zip(choices, said, requests, strict=True)]
