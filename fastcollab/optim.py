"""The optimiser of one trained model: AdamW, its learning-rate schedule, and gradient clipping that refuses NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fastcollab.config import TrainConfig, require

Named = tuple[str, Tensor]


def make_optimizer(params: Iterable[Tensor | Named], cfg: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the trainable of ``params`` (parameters, or (name, parameter) pairs); no weight decay on 1-D ones.

    Raises: ValueError where nothing is trainable.
    """
    trainable = [p for _, p in _named(params) if p.requires_grad]
    require(len(trainable) > 0, "trainable parameters", 0, ">= 1")
    decay, plain = [p for p in trainable if p.ndim > 1], [p for p in trainable if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=cfg.learning_rate,
        betas=(cfg.adam_beta1, cfg.adam_beta2),
        eps=cfg.adam_epsilon,
        fused=all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in trainable),
    )


def make_schedule(optimizer: torch.optim.Optimizer, cfg: TrainConfig, total_steps: int) -> LambdaLR:
    """The learning rate over ``total_steps`` optimiser steps: warm-up, then constant, or linear or cosine down.

    Step i (from 0) of W warm-up steps takes (i + 1) / W of the rate: unlike in transformers the first step is not
    spent at 0. After it linear takes 1 - x and cosine (1 + cos(pi x)) / 2 with x = (i - W) / (total_steps - W): the
    first step after the warm-up has the full rate and the last one is above 0. W is
    ``warmup_steps``, or else ``warmup_ratio`` of the total; with ``min_lr_rate`` m the factor falls to m instead of 0.
    """
    require(total_steps >= 1, "total_steps", total_steps, ">= 1")
    kind, low = cfg.lr_scheduler_type, cfg.min_lr_rate
    warmup = cfg.warmup_steps or math.ceil(cfg.warmup_ratio * total_steps)
    require(kind in ("constant", "linear", "cosine"), "lr_scheduler_type", kind, "constant, linear or cosine")
    require(warmup >= 0, "warmup_steps", warmup, ">= 0")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        x = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if kind == "constant":
            return 1.0
        return low + (1 - low) * (1 - x if kind == "linear" else (1 + math.cos(math.pi * x)) / 2)

    return LambdaLR(optimizer, factor)


def clip_grad_norm(params: Iterable[Tensor | Named], max_norm: float, step: int) -> float:
    """Scale the gradients to a global 2-norm of at most ``max_norm`` (0: leave them); returns the norm before.

    Raises: FloatingPointError, gradients untouched, where that norm is NaN or inf: names the step, and the first
    parameter at fault if names were given.
    """
    require(max_norm >= 0, "max_grad_norm", max_norm, ">= 0 (0 does not clip)")
    graded = [(name, p) for name, p in _named(params) if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for _, p in graded])
    norm = float(total)
    if not math.isfinite(norm):
        at_fault = next((name for name, p in graded if name and not p.grad.isfinite().all()), "")
        where = f" (first in {at_fault})" if at_fault else ""
        raise FloatingPointError(f"step {step}: got gradient norm {norm}{where}, need a finite one")
    if max_norm > 0 and graded:
        torch.nn.utils.clip_grads_with_norm_([p for _, p in graded], max_norm, total)
    return norm


def _named(params: Iterable[Tensor | Named]) -> list[Named]:
    return [p if isinstance(p, tuple) else ("", p) for p in params]
