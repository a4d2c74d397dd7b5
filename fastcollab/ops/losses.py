"""The losses on packed log-probs: value, gradient and metrics from one pass, in C++ or Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastcollab.config import require
from fastcollab.ops.dispatch import choose, fake
from fastcollab.reference import losses as reference
from fastcollab.reference.losses import Metrics

__all__ = ["advantage_regression", "policy_loss"]

FORMS = {"clip": 0, "cispo": 1, "reinforce": 2}
RATIOS = {"token": 0, "sequence": 1}
KLS = {"k1": 1, "k2": 2, "k3": 3}
NORMS = {None: 0, "seq": 1, "max": 2}
POLICY_SUMS = ("loss", "count/tokens", "count/segments", "token_sum/ratio", "min/ratio", "max/ratio",
               "token_sum/approx_kl", "token_sum/clip_ratio/low_mean", "token_sum/clip_ratio/high_mean",
               "token_sum/clip_ratio/region_mean", "token_sum/clip_ratio/dual_mean", "token_sum/kl")  # fmt: skip
REGRESSION_SUMS = ("loss", "count/tokens", "count/segments", "count/floored", "segment_sum/residual_sq",
                   "segment_sum/log_ratio", "segment_sum/log_ratio_sq", "segment_sum/abs_fit",
                   "segment_sum/abs_advantage")  # fmt: skip


class KnownGradient(torch.autograd.Function):
    """total / n in fp32, a scalar whose gradient in logprob is grad / n; ``grad`` is the operator's own and is divided
    where it lies: a second buffer costs more than the loss itself."""

    @staticmethod
    def forward(ctx: Any, logprob: Tensor, total: Tensor, grad: Tensor, n: float | Tensor) -> Tensor:
        ctx.save_for_backward(grad.div_(n))
        return (total / n).float()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        need = "False: the gradient's own gradient is not known; FASTCOLLAB_IMPL=reference has it"
        require(not torch.is_grad_enabled(), "create_graph", True, need)
        (grad,) = ctx.saved_tensors
        asked = upstream.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere to ask is to wait
        return grad if asked and float(upstream) == 1 else grad * upstream, None, None, None


def _run(op: str, *log_probs: Tensor | None) -> Any:
    """The operator's module for these log-probs, or None for the reference; half precision is widened."""
    wide = any(x is not None and x.dtype == torch.float64 for x in log_probs)
    impl, where = choose(op, log_probs[0].device, torch.float64 if wide else torch.float32)
    return None if impl == "reference" else where


def plain(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """x detached, contiguous and of this dtype; mostly it is, and asking is cheaper than converting."""
    if x is None:
        return None
    x = x.detach() if x.requires_grad else x
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
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
    """See :func:`fastcollab.reference.losses.policy_loss`, which also takes fp64.

    Computed in fp32, summed in fp64, metrics in fp64. A GPU is not waited for: there a kept value that is not finite,
    or a segment that does not exist, makes the loss NaN instead of raising.
    """
    run = _run("policy_loss", logprob, old_logprob, ref_logprob)
    if run is None:
        return reference.policy_loss(
            logprob, old_logprob, advantage, mask, segment_ids, clip_low=clip_low, clip_high=clip_high,
            dual_clip=dual_clip, form=form, ratio=ratio, aggregation=aggregation, max_length=max_length,
            denominator=denominator, ref_logprob=ref_logprob, beta=beta, kl=kl,
        )  # fmt: skip
    reference.check_policy(form, ratio, clip_low, clip_high, dual_clip, aggregation, max_length, ref_logprob, beta, kl)
    named = {"logprob": logprob, "old_logprob": old_logprob, "ref_logprob": ref_logprob}
    reference.check_shapes(named, advantage, mask, segment_ids)
    sums, grad = run.policy_loss_forward(
        plain(logprob), plain(old_logprob), plain(ref_logprob), plain(advantage), plain(mask, torch.bool),
        plain(segment_ids, torch.int64), clip_low, clip_high, dual_clip or 0.0, FORMS[form], RATIOS[ratio],
        aggregation == "sequence-mean", beta, KLS[kl],
    )  # fmt: skip
    metrics = dict(zip(POLICY_SUMS, sums.unbind(), strict=True))
    total = metrics.pop("loss")
    if dual_clip is None or form != "clip":
        del metrics["token_sum/clip_ratio/dual_mean"]
    if ref_logprob is None:
        del metrics["token_sum/kl"]
    counts = metrics["count/tokens"], metrics["count/segments"], len(advantage)
    n = reference.divisor(aggregation, max_length, denominator, *counts)
    return KnownGradient.apply(logprob, total, grad, n), metrics


def advantage_regression(
    logprob: Tensor,
    anchor: Tensor,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    beta: float,
    *,
    length_norm: str | bool = False,
    max_length: int | None = None,
    floor: float | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """See :func:`fastcollab.reference.losses.advantage_regression`, which also takes fp64; on a GPU see policy_loss."""
    run = _run("advantage_regression", logprob, anchor)
    if run is None:
        return reference.advantage_regression(
            logprob, anchor, advantage, mask, segment_ids, beta, length_norm=length_norm, max_length=max_length,
            floor=floor, denominator=denominator,
        )  # fmt: skip
    norm = reference.check_regression(beta, length_norm, max_length)
    reference.check_shapes({"logprob": logprob, "anchor": anchor}, advantage, mask, segment_ids)
    sums, grad = run.advantage_regression_forward(
        plain(logprob), plain(anchor), plain(advantage), plain(mask, torch.bool), plain(segment_ids, torch.int64),
        beta, NORMS[norm], max_length or 0, float("-inf") if floor is None else floor,
    )  # fmt: skip
    metrics = dict(zip(REGRESSION_SUMS, sums.unbind(), strict=True))
    total = metrics.pop("loss")
    if floor is None:
        del metrics["count/floored"]
    n = reference.at_least_one(denominator, metrics["count/segments"])
    return KnownGradient.apply(logprob, total, grad, n), metrics


@fake("policy_loss_forward")
def _(logprob, *inputs_and_settings):
    return logprob.new_empty(len(POLICY_SUMS), dtype=torch.float64), torch.empty_like(logprob)


@fake("advantage_regression_forward")
def _(logprob, *inputs_and_settings):
    return logprob.new_empty(len(REGRESSION_SUMS), dtype=torch.float64), torch.empty_like(logprob)
