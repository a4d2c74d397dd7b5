"""The objective of one micro-batch: from hidden states to the loss, in one pass where the loss is per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcollab.config import TrainConfig
from fastcollab.losses import advantage_regression, linear_policy_loss, policy_loss
from fastcollab.model import Model
from fastcollab.packing import MicroBatch
from fastcollab.scoring import batch_logprob, head_inputs

AGGREGATION = {"dapo": "token-mean", "cispo": "token-mean", "bnpo": "token-mean", "grpo": "sequence-mean",
               "dr_grpo": "constant"}  # fmt: skip


def settings(args: TrainConfig) -> dict[str, Any]:
    """The arguments of ``policy_loss`` that the config decides."""
    return {
        "clip_low": args.clip[0],
        "clip_high": args.clip[1],
        "dual_clip": args.delta,
        "form": "cispo" if args.loss_type == "cispo" else "clip",
        "ratio": args.importance_sampling_level,
        "aggregation": AGGREGATION[args.loss_type],
        "max_length": args.max_completion_length,
        "beta": args.beta,
    }


def batch_loss(
    model: Model, batch: MicroBatch, vocab_size: int, args: TrainConfig, denominator: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of the batch, differentiable in the model; losses of micro-batches add up under one denominator.

    A token's loss needs its own log-prob only, so its gradient is known as soon as the head has seen the row and the
    logits are computed once. A sequence's ratio is known after its last token: then the backward pass recomputes them.
    """
    mask = torch.ones_like(batch.target, dtype=torch.bool)
    if args.loss_type == "regression":
        logprob, entropy = batch_logprob(model, batch, vocab_size, args.temperature, entropy=True)
        loss, metrics = advantage_regression(
            logprob, batch.old_logprob, batch.advantage, mask, batch.segment_ids, args.beta,
            length_norm=args.length_norm or False, max_length=args.max_completion_length,
            floor=args.logprob_floor if args.anchor == "proxy" else None, denominator=denominator,
        )  # fmt: skip
        return loss, metrics | {"token_sum/entropy": entropy.detach().sum()}
    rest = (batch.old_logprob, batch.advantage, mask, batch.segment_ids)
    options = settings(args) | {"denominator": denominator, "ref_logprob": batch.ref_logprob}
    if args.importance_sampling_level == "sequence":
        logprob, entropy = batch_logprob(model, batch, vocab_size, args.temperature, entropy=True)
        loss, metrics = policy_loss(logprob, *rest, **options)
        return loss, metrics | {"token_sum/entropy": entropy.detach().sum()}
    hidden, (weight, bias, softcap) = head_inputs(model, batch, vocab_size)
    options |= {"bias": bias, "temperature": args.temperature, "softcap": softcap, "entropy": True}
    return linear_policy_loss(hidden, weight, batch.target, *rest, **options)
