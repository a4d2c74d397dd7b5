"""Voters: who answers the questions of a step. Each reads its view with its own engine and hands in ballots."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from time import perf_counter
from typing import Any

import numpy as np
import torch

from fastcollab import grading, parity
from fastcollab.ballots import Ballot
from fastcollab.config import CoRLConfig
from fastcollab.engine import Engine
from fastcollab.model import Model
from fastcollab.sampling import content_uid
from fastcollab.schedules import Solo
from fastcollab.types import Rollout

Row = Mapping[str, Any]


def make_grader(grader: str | Callable[[str], Hashable | None]) -> Callable[[str], str | None]:
    """Response text -> key of its answer as text, or None.

    By kind ("math", "choice", "number", "text"), as the published code does ("corl-ff476f0"), or by a user's function.
    """
    if grader == parity.NAME:
        return parity.answer
    if callable(grader):
        return lambda text: _user_key(grader(text))

    def grade(text: str) -> str | None:
        answer = grading.extract(text)
        key = None if answer is None else grading.key(answer, grader)
        return None if key is None else repr(key)

    return grade


def _user_key(key: Any) -> str | None:
    return None if key is None or isinstance(key, str) and key == "" else _written(key)


def _written(key: Any) -> str:
    """A key as text; equal ones have the same, as 1 and 1.0, and frozensets in whatever order."""
    if key is None:
        return "None"
    if isinstance(key, str):
        return str.__repr__(key)
    if isinstance(key, int | Fraction) or isinstance(key, float) and math.isfinite(key):
        return str(Fraction(key))
    if isinstance(key, tuple):
        return f"({', '.join(map(_written, key))})"
    if isinstance(key, frozenset):
        return f"{{{', '.join(sorted(map(_written, key)))}}}"
    need = "a str, bool, int, finite float, Fraction or None, or tuples or frozensets of these"
    raise ValueError(f"key of an answer: got {type(key).__name__} {key!r:.60}, need {need}")


def gold_key(answer: Any, grader: str | Callable[[str], Hashable | None]) -> str | None:
    """The key of a right answer as the data hold it: bare, or boxed."""
    if grader == parity.NAME:
        return parity.gold(str(answer))
    if callable(grader):
        return make_grader(grader)(str(answer)) or _user_key(answer)
    key = grading.key(grading.extract(str(answer)) or str(answer), grader)
    return None if key is None else repr(key)


@dataclass
class Voter:
    """Who answers: ``name`` is its model's, with "@ema" or "@<view>" behind it where the model has a second voice.

    After ``answer``, ``rollouts`` holds what was written, prompt-major, and ``keys`` the answer of each (None: none).
    """

    name: str
    model: Model
    engine: Engine
    view: str  # column of the dataset
    salt: str = ""  # other draws under the same seed
    version: int = 0  # of the weights: how often they were updated in this run
    rollouts: Sequence[Rollout] = ()
    keys: Sequence[str | None] = ()
    grading_s: float = 0.0

    def answer(self, rows: Sequence[Row], step: int, n: int, args: CoRLConfig) -> None:
        """Write ``n`` rollouts to each question and read their answers. The draws are this voter's own."""
        self.engine.reset_stats()
        self.rollouts = self.engine.generate(
            [row[self.view] for row in rows],
            n=n,
            schedule=Solo(self.engine.names[0]),
            sampling=args.sampling,
            seed=content_uid(f"{args.seed} {self.name} {self.salt}"),
            step=step,
            uids=[row["uid"] for row in rows],
            chat_template_kwargs=args.chat_template_kwargs,
            skip_special_tokens=args.skip_special_tokens,
        )
        started, grade = perf_counter(), make_grader(args.grader)
        self.keys = [
            None if r.finish == "length" and not args.truncated_votes else grade(self.text(r)) for r in self.rollouts
        ]
        self.grading_s = perf_counter() - started

    @staticmethod
    def text(rollout: Rollout) -> str:
        return " ".join(map(str, rollout.ids)) if rollout.text is None else rollout.text

    def ballot(self, run: str, step: int, uid: str, group: int, n: int) -> Ballot:
        own = slice(group * n, (group + 1) * n)
        rollouts = self.rollouts[own]
        logprobs = tuple(float(np.mean(r.logprob)) if len(r.logprob) else -math.inf for r in rollouts)
        return Ballot(run, step, uid, self.name, self.view, self.version, tuple(self.keys[own]), logprobs)


class EMA:
    """A copy of a model that follows it slowly: teacher <- alpha teacher + (1 - alpha) model (Co-rewarding-II, eq. 11).

    alpha rises from ``start`` to ``end`` along half a cosine over the run.
    """

    def __init__(self, model: Model, start: float, end: float) -> None:
        self.source, self.start, self.end = model, start, end
        module = copy.deepcopy(model.peft or model.module).requires_grad_(False).eval()
        self.model = Model(f"{model.name}@ema", module, tokenizer=model.tokenizer)

    def alpha(self, part: float) -> float:
        """The teacher's share at a part of the run, from 0 to 1."""
        return self.end - (self.end - self.start) * (1 + math.cos(math.pi * part)) / 2

    @torch.no_grad()
    def follow(self, part: float) -> None:
        """Move towards the model's present weights."""
        alpha = self.alpha(part)
        for own, new in zip(_weights(self.model), _weights(self.source), strict=True):
            own.lerp_(new, 1 - alpha)
        self.model.bump()


def _weights(model: Model) -> list[torch.nn.Parameter]:
    return list((model.peft or model.module).parameters())
