"""The LM head's log-probs and loss, straight from hidden states: no [N, V] logits beyond a tile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcollab.config import require
from fastcollab.ops.dispatch import choose, fake, refuse_create_graph
from fastcollab.ops.losses import FORMS, KLS, POLICY_SUMS, plain
from fastcollab.reference import head as reference
from fastcollab.reference import losses
from fastcollab.reference.head import Scores
from fastcollab.reference.losses import Metrics

__all__ = ["Scores", "linear_logprob", "linear_policy_loss", "linear_scores"]


def linear_logprob(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob and entropy of each row: see :func:`fastcollab.reference.head.linear_logprob`, which also takes fp64.

    Results are fp32, and everything is multiplied and summed in fp32 or more whatever h and weight are. The backward
    pass computes the logits anew, a tile at a time, for the rows with an upstream gradient alone.
    """
    impl, run = _choose("linear_logprob", h, weight, bias)
    if impl == "reference":
        return run.linear_logprob(h, weight, bias, target, temperature, softcap, entropy)
    reference.check(h, weight, bias, target, temperature, softcap)
    logprob, ent = _LinearLogprob.apply(
        run, _rows(h), _rows(weight), _vector(bias), target, float(temperature), softcap or 0.0, entropy
    )
    return logprob, ent if entropy else None


@torch.no_grad()
def linear_scores(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    second: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> Scores:
    """What is known of each row in one pass, without gradient: see :func:`fastcollab.reference.head.linear_scores`."""
    impl, run = _choose("linear_logprob", h, weight, bias)
    if impl == "reference":
        return run.linear_scores(h, weight, bias, target, second, temperature, softcap)
    for ids in (target,) if second is None else (target, second):
        reference.check(h, weight, bias, ids, temperature, softcap)
    logprob, _, entropy, other, top1 = run.linear_logprob_forward(
        _rows(h), _rows(weight), _vector(bias), target.contiguous(), _vector(second), float(temperature),
        softcap or 0.0, True, True,
    )  # fmt: skip
    return Scores(logprob, entropy, None if second is None else other, top1)


def linear_policy_loss(
    h: Tensor,
    weight: Tensor,
    target: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    form: str = "clip",
    ratio: str = "token",
    aggregation: str = "token-mean",
    max_length: int | None = None,
    denominator: float | Tensor | None = None,
    ref_logprob: Tensor | None = None,
    beta: float = 0.0,
    kl: str = "k3",
) -> tuple[Tensor, Metrics]:
    """``policy_loss(linear_logprob(h, weight, bias, target)...)`` over the kept tokens, in one pass over the logits.

    A token's loss gradient follows from its own logits, so the forward pass turns them into the gradients of h, weight
    and bias at once: three products instead of the four of ``linear_logprob``. The backward pass only scales them.
    Tokens whose ``mask`` is False are taken away first, whatever they hold.

    Args: h [T, D], weight [V, D], bias [V] or None, target [T] int64; the others as in
    :func:`fastcollab.reference.losses.policy_loss`, of which only ``ratio="token"`` is possible: a sequence's ratio is
    known after all of its tokens.
    Returns: loss (fp32 scalar; differentiable in h, weight and bias) and the metrics of ``policy_loss``, with
    ``token_sum/entropy`` if ``entropy``.
    Raises: ValueError for what ``linear_logprob`` and ``policy_loss`` refuse.
    """
    require(ratio != "sequence", "ratio", ratio, "token; for a sequence's ratio use linear_logprob and policy_loss")
    settings = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, form=form, ratio=ratio,
                    aggregation=aggregation, max_length=max_length, ref_logprob=ref_logprob, beta=beta,
                    kl=kl)  # fmt: skip
    impl, run = _choose("linear_policy_loss", h, weight, bias)
    if impl == "reference":
        head = dict(bias=bias, temperature=temperature, softcap=softcap, entropy=entropy, denominator=denominator)
        return run.linear_policy_loss(h, weight, target, old_logprob, advantage, mask, segment_ids, **head, **settings)
    losses.check_policy(**settings)
    losses.check_shapes({"old_logprob": old_logprob, "ref_logprob": ref_logprob}, advantage, mask, segment_ids)
    reference.check(h, weight, bias, target, temperature, softcap)

    n = _divisor(aggregation, max_length, denominator, mask, segment_ids, len(advantage))
    needed = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (h, weight, bias)]
    loss, sums = _LinearPolicyLoss.apply(
        run, needed, n, _rows(h), _rows(weight), _vector(bias), target.contiguous(), float(temperature), softcap or 0.0,
        entropy, plain(old_logprob), plain(ref_logprob), plain(advantage), plain(mask, torch.bool),
        plain(segment_ids, torch.int64), clip_low, clip_high, dual_clip or 0.0, FORMS[form],
        aggregation == "sequence-mean", beta, KLS[kl],
    )  # fmt: skip
    left_out = {"loss"} | (set() if dual_clip is not None and form == "clip" else {"token_sum/clip_ratio/dual_mean"})
    left_out |= (set() if ref_logprob is not None else {"token_sum/kl"}) | (set() if entropy else {"token_sum/entropy"})
    names = (*POLICY_SUMS, "token_sum/entropy")
    return loss, {name: x for name, x in zip(names, sums.unbind(), strict=True) if name not in left_out}


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, h, weight, bias, target, temperature, softcap, entropy):
        target = target.contiguous()
        logprob, lse, ent, _, _ = run.linear_logprob_forward(
            h, weight, bias, target, None, temperature, softcap, entropy, False
        )
        ctx.save_for_backward(h, weight, bias, target, lse, ent)
        ctx.run, ctx.temperature, ctx.softcap, ctx.entropy = run, temperature, softcap, entropy
        return logprob, ent

    @staticmethod
    def backward(ctx, g_logprob, g_entropy):
        refuse_create_graph()
        h, weight, bias, target, lse, ent = ctx.saved_tensors
        upstream = g_logprob.contiguous(), g_entropy.contiguous() if ctx.entropy else None
        needed = ctx.needs_input_grad[1:4]
        grads = ctx.run.linear_logprob_backward(
            *upstream, h, weight, bias, target, lse, ent if ctx.entropy else None, ctx.temperature, ctx.softcap, *needed
        )
        return None, *[g if need else None for g, need in zip(grads, needed, strict=True)], *[None] * 4


class _LinearPolicyLoss(torch.autograd.Function):
    """(loss / n, sums); the gradients are known in the forward pass."""

    @staticmethod
    def forward(ctx, run, needed, n, h, weight, bias, *tokens_and_settings):
        sums, *grads = run.linear_policy_loss_forward(h, weight, bias, *tokens_and_settings, 1 / n, *needed)
        ctx.save_for_backward(*[g if need else None for g, need in zip(grads, needed, strict=True)])
        ctx.inputs = 3 + 3 + len(tokens_and_settings)
        ctx.mark_non_differentiable(sums)
        return (sums[0] / n).float(), sums

    @staticmethod
    def backward(ctx, upstream, _):
        refuse_create_graph()
        grads = ctx.saved_tensors
        if float(upstream) != 1:
            grads = [None if g is None else g * upstream for g in grads]
        return None, None, None, *grads, *[None] * (ctx.inputs - 6)


def _choose(op: str, h: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[str, Any]:
    return choose(op, h.device, *[x.dtype for x in (h, weight, bias) if x is not None])


def _rows(x: Tensor) -> Tensor:
    """x with unit stride in its last dimension, as the operators want it."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _divisor(
    aggregation: str,
    max_length: int | None,
    denominator: float | Tensor | None,
    mask: Tensor,
    segment_ids: Tensor,
    S: int,
) -> float:
    """What the summed loss is divided by."""
    counted = denominator is None
    tokens = int(mask.sum()) if counted and aggregation == "token-mean" else 0
    segments = len(segment_ids[mask].unique()) if counted and aggregation == "sequence-mean" else 0
    return float(losses.divisor(aggregation, max_length, denominator, tokens, segments, S))


@fake("linear_logprob_forward")
def _(h, weight, bias, target, second, temperature, softcap, entropy, top1):
    N = h.shape[0]
    logprob, ent, other = (
        h.new_empty(n, dtype=torch.float32) for n in (N, N if entropy else 0, 0 if second is None else N)
    )
    return logprob, h.new_empty(N, dtype=torch.float64), ent, other, target.new_empty(N if top1 else 0)


@fake("linear_logprob_backward")
def _(g, g_entropy, h, weight, bias, target, lse, entropy, temperature, softcap, need_h, need_w, need_b):
    return _gradients(h, weight, bias, need_h, need_w, need_b)


@fake("linear_policy_loss_forward")
def _(h, weight, bias, *tokens_and_settings):
    sums = h.new_empty(len(POLICY_SUMS) + 1, dtype=torch.float64)
    return sums, *_gradients(h, weight, bias, *tokens_and_settings[-3:])


def _gradients(h: Tensor, weight: Tensor, bias: Tensor | None, *needed: bool) -> tuple[Tensor, ...]:
    asked = [(x, need and x is not None) for x, need in zip((h, weight, bias), needed, strict=True)]
    return tuple((weight if x is None else x).new_empty(x.shape if need else 0) for x, need in asked)
