"""Voters: who answers the questions of a step. Each reads its view with its own engine and hands in ballots."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastcollab import grading
from fastcollab.ballots import Ballot
from fastcollab.config import CoRLConfig
from fastcollab.engine import Engine
from fastcollab.model import Model
from fastcollab.sampling import content_uid
from fastcollab.schedules import Solo
from fastcollab.types import Rollout

Row = Mapping[str, Any]


def make_grader(grader: str | Callable[[str], Hashable | None]) -> Callable[[str], str | None]:
    """Response text -> key of its answer as text, or None: by kind ("math", "choice", …) or by a user's function."""

    def by_kind(text: str) -> Hashable | None:
        answer = grading.extract(text)
        return None if answer is None else grading.key(answer, grader)

    read = grader if callable(grader) else by_kind

    def grade(text: str) -> str | None:
        key = read(text)
        return None if key is None or key == "" else repr(key)

    return grade


@dataclass
class Voter:
    """``name`` is the model's, with "@ema" or "@<view>" behind it where the model has a second voice."""

    name: str
    model: Model
    engine: Engine
    view: str  # column of the dataset
    rollouts: Sequence[Rollout] = ()
    keys: Sequence[str | None] = ()

    def answer(self, rows: Sequence[Row], uids: Sequence[str], step: int, n: int, args: CoRLConfig) -> None:
        """Write ``n`` rollouts to each question and read their answers. The draws are this voter's own."""
        grade = make_grader(args.grader)
        self.engine.reset_stats()
        self.rollouts = self.engine.generate(
            [row[self.view] for row in rows],
            n=n,
            schedule=Solo(self.engine.names[0]),
            sampling=args.sampling,
            seed=content_uid(f"{args.seed} {self.name}"),
            step=step,
            uids=list(uids),
            chat_template_kwargs=args.chat_template_kwargs,
            skip_special_tokens=args.skip_special_tokens,
        )
        self.keys = [
            None if r.finish == "length" and not args.truncated_votes else grade(self.text(r)) for r in self.rollouts
        ]

    @staticmethod
    def text(rollout: Rollout) -> str:
        return " ".join(map(str, rollout.ids)) if rollout.text is None else rollout.text

    def ballot(self, run: str, step: int, uid: str, group: int, n: int) -> Ballot:
        own = slice(group * n, (group + 1) * n)
        rollouts = self.rollouts[own]
        logprobs = tuple(float(np.mean(r.logprob)) if len(r.logprob) else -math.inf for r in rollouts)
        keys, version = tuple(self.keys[own]), rollouts[0].policy_version
        return Ballot(run, step, uid, self.name, self.view, version, keys, logprobs)


class EMA:
    """A copy of a model that follows it slowly: teacher <- alpha teacher + (1 - alpha) model (Co-rewarding-II, eq. 11).

    alpha rises from ``start`` to ``end`` along half a cosine over ``total_steps``.
    """

    def __init__(self, model: Model, start: float, end: float, total_steps: int) -> None:
        self.source, self.start, self.end, self.total_steps = model, start, end, total_steps
        module = copy.deepcopy(model.peft or model.module).requires_grad_(False).eval()
        self.model = Model(f"{model.name}@ema", module, tokenizer=model.tokenizer)

    def alpha(self, step: int) -> float:
        return self.end - (self.end - self.start) * (1 + math.cos(math.pi * step / self.total_steps)) / 2

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move towards the model as it is after optimiser step ``step`` (from 1)."""
        alpha = self.alpha(step)
        for own, new in zip(_weights(self.model), _weights(self.source), strict=True):
            own.lerp_(new, 1 - alpha)
        self.model.bump()


def _weights(model: Model) -> list[torch.nn.Parameter]:
    return list((model.peft or model.module).parameters())
