"""Evaluation: accuracy of a schedule, pass@k, and how legible one model's text is to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb
from typing import Any

import numpy as np

from fastcollab.config import SamplingParams, require
from fastcollab.engine import Engine
from fastcollab.model import Model
from fastcollab.schedules import Schedule
from fastcollab.scoring import rollout_logprobs
from fastcollab.types import Rollout


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k of one problem with ``c`` of ``n`` samples correct (Chen et al. 2021; tandem spec 3.1)."""
    require(1 <= k <= n, "k", k, f"in 1..{n}")
    return 1.0 if n - c < k else 1.0 - comb(n - c, k) / comb(n, k)


def evaluate(
    engine: Engine,
    prompts: Sequence[Any],
    score: Callable[[list[Rollout]], np.ndarray],
    schedule: Schedule,
    sampling: SamplingParams,
    n: int = 1,
    seed: int = 0,
    **generate: Any,
) -> tuple[dict[str, float], list[Rollout]]:
    """Mean reward over ``n`` samples of each prompt, pass@n (reward >= 1), and the rollouts themselves.

    ``score`` maps the rollouts to rewards [len(prompts) * n], NaN where there is none; ``generate`` holds further
    arguments of ``engine.generate``.
    """
    rollouts = engine.generate(prompts, n=n, schedule=schedule, sampling=sampling, seed=seed, **generate)
    rewards = score(rollouts)
    solved = (rewards.reshape(len(prompts), n) >= 1).sum(1)
    row = {
        "reward": float(np.nanmean(rewards)) if not np.isnan(rewards).all() else float("nan"),
        f"pass@{n}": float(np.mean([pass_at_k(n, int(c), n) for c in solved])),
        "mean_length": float(np.mean([len(r.ids) for r in rollouts])),
        "clipped_ratio": float(np.mean([r.finish == "length" for r in rollouts])),
    }
    return row, rollouts


def legibility(reader: Model, rollouts: Sequence[Rollout], vocab_size: int, budget: int = 16384) -> float:
    """Cross-entropy of ``reader`` on the responses, nats a token at temperature 1, mean over responses (spec 3.4).

    Ids cross as they are, EOS is not scored; lower is more legible. NaN if every response is empty.
    """
    masks = [np.ones(len(r.ids), bool) for r in rollouts]
    for r, mask in zip(rollouts, masks, strict=True):
        mask[-1:] = r.finish != "eos"
    scored = rollout_logprobs(reader, rollouts, masks, vocab_size, 1.0, budget)
    means = [-float(lp[mask].mean()) for lp, mask in zip(scored, masks, strict=True) if mask.any()]
    return float(np.mean(means)) if means else float("nan")
