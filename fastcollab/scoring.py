"""Scoring: log-probs of rollouts under a model, from one packed forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fastcollab import ops
from fastcollab.model import Head, Model
from fastcollab.packing import Item, MicroBatch, micro_batches
from fastcollab.types import Rollout


def head_inputs(model: Model, batch: MicroBatch, vocab_size: int) -> tuple[torch.Tensor, Head]:
    """Hidden states [N, D] of the batch's targets, differentiable, and the head; the head sees these N rows only.

    ``vocab_size`` is the engine's: a padded head is sliced to it, so that both sides normalise over the same ids.
    """
    hidden = model.hidden(batch.input_ids, batch.position_ids, batch.segments)[batch.hidden_index]
    head = model.head()
    if len(head.weight) > vocab_size:
        bias = None if head.bias is None else head.bias[:vocab_size]
        head = head._replace(weight=head.weight[:vocab_size], bias=bias)
    return hidden, head


def batch_logprob(
    model: Model, batch: MicroBatch, vocab_size: int, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """logprob fp32 [N] (and entropy fp32 [N]) of the batch's targets, differentiable."""
    hidden, head = head_inputs(model, batch, vocab_size)
    return ops.linear_logprob(hidden, head.weight, head.bias, batch.target, temperature, head.softcap, entropy)


@torch.no_grad()
def rollout_logprobs(
    model: Model,
    rollouts: Sequence[Rollout],
    masks: Sequence[np.ndarray],
    vocab_size: int,
    temperature: float = 1.0,
    budget: int = 16384,
) -> list[np.ndarray]:
    """fp32 [len(ids)] per rollout: ``model``'s log-probs where the mask (bool [len(ids)]) is True, NaN elsewhere."""
    result = [np.full(len(r.ids), np.nan, np.float32) for r in rollouts]
    items = [Item(r, mask, 0.0, out) for r, mask, out in zip(rollouts, masks, result, strict=True)]
    for batch in micro_batches(items, budget, model.device):
        logprob = batch_logprob(model, batch, vocab_size, temperature)[0].float().cpu().numpy()
        owner = batch.segment_ids.cpu().numpy()
        for s, item in enumerate(batch.items):
            item.old_logprob[item.mask] = logprob[owner == s]
    return result
