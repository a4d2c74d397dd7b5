"""Losses on packed tokens: the clipped policy-gradient family and the advantage regression, ``-> (loss, metrics)``.

Tokens are [T], segments (one per rollout) [S], ``segment_ids`` maps one to the other. Only tokens whose ``mask`` is
True take part: all others contribute exactly 0 to value and gradient, whatever they hold, and count in no
denominator. Without a ``denominator`` the loss is a mean over what is given; with one (the global number of tokens or
sequences) the losses of micro-batches add up to the loss of the whole batch.

Metrics are detached scalars whose prefix says how micro-batches combine: ``count/``, ``token_sum/`` (a mean is this
over ``count/tokens``), ``segment_sum/`` (over ``count/segments``, the segments with a kept token), ``min/`` and
``max/``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastcollab.config import require

LOG_RATIO_CAP = 20.0  # before exp: beyond it ratio and k3 are constant (e^20) and their gradient is 0

Metrics = dict[str, Tensor]


def kl_estimate(logprob: Tensor, ref_logprob: Tensor, kind: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) from log-probs of sampled tokens (Schulman 2020), same shape.

    With d = ref - logprob: k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1 where d is capped at ``LOG_RATIO_CAP`` first.
    """
    require(kind in ("k1", "k2", "k3"), "kl", kind, "k1, k2 or k3")
    d = ref_logprob - logprob
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(max=LOG_RATIO_CAP)
    return d.expm1() - d


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
    """Policy gradient loss; GRPO, DAPO, Dr.GRPO, GSPO, CISPO, PPO's dual clip and REINFORCE are its arguments.

    With r = exp(logprob - old) per token (``ratio="sequence"``: exp of the segment's mean difference, GSPO) and
    c = clip(r, 1 - clip_low, 1 + clip_high), a token's loss is

    - ``form="clip"``: -min(r A, c A), and at most -dual_clip A where A < 0 and ``dual_clip`` is set,
    - ``form="cispo"``: -stop_gradient(c) A logprob (clip_low >= 1: no lower bound),
    - ``form="reinforce"``: -A logprob,

    plus ``beta`` times ``kl_estimate(logprob, ref_logprob, kl)``. ``aggregation`` over the kept tokens:

    - ``"token-mean"``: sum / number of kept tokens,
    - ``"sequence-mean"``: mean of each segment's token mean over the segments that keep a token,
    - ``"constant"``: sum / (S * max_length), a run-wide constant per rollout (Dr.GRPO).

    ``denominator`` replaces the number of tokens, of segments, or S. A segment of advantage 0 has a policy term of
    exactly 0; its tokens stay in the denominator and its KL term stays in the loss.

    Args: logprob, old_logprob, ref_logprob [T] float; advantage [S] float; mask [T] bool; segment_ids [T] int64.
    Returns: loss (scalar, differentiable in logprob alone; 0 if nothing is kept) and metrics: ``count/tokens``,
    ``count/segments``, the raw ratio before clipping (``token_sum/ratio``, ``min/ratio``, ``max/ratio``),
    ``token_sum/approx_kl`` (k3 of old to new), ``token_sum/clip_ratio/{low_mean,high_mean,region_mean}`` (where the
    clip acts), ``token_sum/clip_ratio/dual_mean`` with a dual clip, and ``token_sum/kl`` with a reference.
    Raises: ValueError for a missing mask, shapes that do not fit, or a kept log-prob that is not finite.
    """
    check_policy(form, ratio, clip_low, clip_high, dual_clip, aggregation, max_length, ref_logprob, beta, kl)
    ref_logprob = None if ref_logprob is None else ref_logprob.detach()
    named = {"logprob": logprob, "old_logprob": old_logprob.detach(), "ref_logprob": ref_logprob}
    (lp, old, ref), advantage, ids = _checked(named, advantage, mask, segment_ids)
    S = len(advantage)
    segment_tokens = _segment_sum(mask.to(lp.dtype), ids, S)
    A = advantage[ids]

    diff = lp - old
    if ratio == "sequence":
        diff = (_segment_sum(diff, ids, S) / segment_tokens.clamp(min=1)).to(lp.dtype)[ids]
    r = diff.clamp(max=LOG_RATIO_CAP).exp()
    clipped = r.clamp(1 - clip_low, 1 + clip_high)
    low, high, dual = (r < 1 - clip_low) & (A < 0), (r > 1 + clip_high) & (A > 0), None
    if form == "clip":
        token = -torch.minimum(r * A, clipped * A)
        if dual_clip is not None:
            dual = (A < 0) & (token > -dual_clip * A)
            token = torch.where(dual, -dual_clip * A, token)
    elif form == "cispo":
        low, high = r < 1 - clip_low, r > 1 + clip_high
        token = -clipped.detach() * A * lp
    else:
        low = high = torch.zeros_like(mask)
        token = -A * lp
    kl_token = None if ref is None else kl_estimate(lp, ref, kl)
    if beta:
        token = token + beta * kl_token
    token = torch.where(mask, token, 0)
    if aggregation == "sequence-mean":
        token = token / segment_tokens.clamp(min=1).to(token.dtype)[ids]
    counts = segment_tokens.sum().to(token.dtype), (segment_tokens > 0).sum(), S
    loss = token.sum() / divisor(aggregation, max_length, denominator, *counts)

    with torch.no_grad():
        kept = {"ratio": r, "approx_kl": kl_estimate(old, lp), "clip_ratio/low_mean": low, "clip_ratio/high_mean": high}
        kept |= {"clip_ratio/region_mean": low | high, "clip_ratio/dual_mean": dual, "kl": kl_token}
        metrics = {f"token_sum/{k}": torch.where(mask, x.detach(), 0).sum() for k, x in kept.items() if x is not None}
        metrics["min/ratio"] = torch.where(mask, r, float("inf")).min() if len(r) else r.new_tensor(float("inf"))
        metrics["max/ratio"] = torch.where(mask, r, 0).max() if len(r) else r.new_tensor(0)
        metrics |= _counts(segment_tokens)
    return loss, metrics


def anchors(old_logprob: Tensor, foreign: Tensor, kappa: float | None = None, *, at_least_old: bool = False) -> Tensor:
    """The regression's anchor [T] per token (mintrl spec 2.4), detached.

    MInTRL-Proxy (``kappa`` None): the frozen policy's own log-prob everywhere. MInTRL-Const: the constant ``kappa``
    <= 0 on ``foreign`` [T] bool tokens; ``at_least_old`` makes it max(kappa, old log-prob), so that no foreign token
    is held down.
    """
    old = old_logprob.detach()
    if kappa is None:
        return old
    require(kappa <= 0, "kappa", kappa, "<= 0, a log-prob")
    constant = old.clamp(min=kappa) if at_least_old else torch.full_like(old, kappa)
    return torch.where(foreign, constant, old)


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
    """Squared-error regression of each rollout's log-ratio on its advantage: mean over segments of e^2 / (2 beta).

    e = beta * Lambda - A and Lambda = sum over the segment's kept tokens of (logprob - anchor), summed in fp64 before
    it is squared (mintrl spec 2.4, with its scaling decision: at logprob == anchor the gradient is REINFORCE's).
    ``length_norm`` divides e^2 by the segment's kept tokens ("seq" or True) or by ``max_length`` ("max"), never
    Lambda. ``floor`` clamps logprob and anchor from below, with gradient 0 there. The mean is over the segments that
    keep a token, or over ``denominator`` (the global number of sequences).

    Args: logprob, anchor [T] float (anchor is taken as constant, see ``anchors``); advantage [S] float; mask [T]
    bool; segment_ids [T] int64; beta > 0.
    Returns: loss (scalar; 0 if nothing is kept) and metrics ``count/tokens``, ``count/segments``, ``count/floored``
    with a floor, and segment sums of ``residual_sq`` (e^2), ``log_ratio`` (Lambda), ``log_ratio_sq``, ``abs_fit``
    (|beta Lambda|) and ``abs_advantage``.
    Raises: ValueError for a missing mask, shapes that do not fit, or a kept log-prob or anchor that is not finite.
    """
    norm = check_regression(beta, length_norm, max_length)
    named = {"logprob": logprob, "anchor": anchor.detach()}
    (lp, a), advantage, ids = _checked(named, advantage, mask, segment_ids, floor)
    S = len(advantage)
    segment_tokens = _segment_sum(mask.to(lp.dtype), ids, S)
    log_ratio = _segment_sum(lp - a, ids, S)
    e = beta * log_ratio - advantage
    per_segment = e.square() / (2 * beta)
    if norm is not None:
        per_segment = per_segment / (segment_tokens.clamp(min=1) if norm == "seq" else max_length)
    kept = segment_tokens > 0
    loss = (torch.where(kept, per_segment, 0).sum() / at_least_one(denominator, kept.sum())).to(lp.dtype)

    with torch.no_grad():
        sums = {"residual_sq": e.square(), "log_ratio": log_ratio, "log_ratio_sq": log_ratio.square()}
        sums |= {"abs_fit": (beta * log_ratio).abs(), "abs_advantage": advantage.abs()}
        metrics = {f"segment_sum/{k}": torch.where(kept, x.detach(), 0).sum() for k, x in sums.items()}
        metrics |= _counts(segment_tokens)
        if floor is not None:
            metrics["count/floored"] = (mask & (logprob < floor)).sum()
    return loss, metrics


def effective_advantage(
    anchor: Tensor, old_logprob: Tensor, advantage: Tensor, mask: Tensor, segment_ids: Tensor, beta: float
) -> Tensor:
    """[S] A + beta * sum of kept (anchor - old log-prob): what the first regression step pushes by (mintrl 2.5).

    Where its sign differs from a failed rollout's advantage, constant anchors reward the failure: lower beta or
    kappa.
    """
    (a, old), advantage, ids = _checked({"anchor": anchor, "old_logprob": old_logprob}, advantage, mask, segment_ids)
    return (advantage + beta * _segment_sum(a - old, ids, len(advantage))).to(advantage.dtype)


def value_estimate(rewards: Tensor, beta: float, mask: Tensor | None = None) -> Tensor:
    """Soft value beta * log(mean(exp(rewards / beta))) over the last axis, no overflow; ``beta`` 0: the plain mean.

    rewards [..., K] float; ``mask`` [..., K] bool leaves padding out (NaN where nothing is left). Computed in fp64,
    returned in the dtype of ``rewards``. The A*-PO baseline (arXiv 2505.20686).
    """
    require(beta >= 0, "beta", beta, ">= 0")
    r = rewards.double()
    mask = torch.ones_like(r, dtype=torch.bool) if mask is None else mask
    n = mask.sum(-1)
    if beta == 0:
        return (torch.where(mask, r, 0).sum(-1) / n).to(rewards.dtype)
    soft = torch.where(mask, r / beta, float("-inf")).logsumexp(-1)
    return torch.where(n > 0, beta * (soft - n.double().log()), float("nan")).to(rewards.dtype)


def check_policy(
    form: str,
    ratio: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: str,
    max_length: int | None,
    ref_logprob: Tensor | None,
    beta: float,
    kl: str,
) -> None:
    """The settings of ``policy_loss``."""
    require(form in ("clip", "cispo", "reinforce"), "form", form, "clip, cispo or reinforce")
    require(ratio in ("token", "sequence"), "ratio", ratio, "token or sequence")
    require(clip_low >= 0 and clip_high >= 0, "clip_low, clip_high", (clip_low, clip_high), ">= 0")
    require(dual_clip is None or dual_clip > 1, "dual_clip", dual_clip, "None or > 1")
    modes = ("token-mean", "sequence-mean", "constant")
    require(aggregation in modes, "aggregation", aggregation, "token-mean, sequence-mean or constant")
    constant = aggregation == "constant"
    require(not constant or (max_length or 0) >= 1, "max_length", max_length, ">= 1 with aggregation 'constant'")
    require(beta == 0 or ref_logprob is not None, "ref_logprob", None, f"a tensor [T], since beta = {beta}")
    require(kl in ("k1", "k2", "k3"), "kl", kl, "k1, k2 or k3")


def check_regression(beta: float, length_norm: str | bool, max_length: int | None) -> str | None:
    """The settings of ``advantage_regression``; returns the norm: None, "seq" or "max"."""
    require(beta > 0, "beta", beta, "> 0")
    norms = {False: None, True: "seq", "seq": "seq", "max": "max"}
    require(length_norm in norms, "length_norm", length_norm, "False, 'seq' or 'max'")
    norm = norms[length_norm]
    require(norm != "max" or (max_length or 0) >= 1, "max_length", max_length, ">= 1 with length_norm 'max'")
    return norm


def check_shapes(
    named: dict[str, Tensor | None], advantage: Tensor, mask: Tensor | None, segment_ids: Tensor
) -> dict[str, Tensor]:
    """The named tensors that are given, once all shapes fit."""
    T = len(segment_ids)
    given = {name: x for name, x in named.items() if x is not None}
    if mask is None or mask.dtype != torch.bool or mask.shape != (T,):
        got = "no mask" if mask is None else f"{mask.dtype} {list(mask.shape)}"
        need = f"bool [{T}], True where the trained model wrote: else foreign tokens would be trained"
        require(False, "mask", got, need)
    if any(x.shape != (T,) for x in given.values()):
        require(False, ", ".join(given), [list(x.shape) for x in given.values()], f"[{T}] each, as segment_ids")
    require(advantage.ndim == 1, "advantage", list(advantage.shape), "[S], one per segment")
    return given


def _checked(
    named: dict[str, Tensor | None],
    advantage: Tensor,
    mask: Tensor | None,
    segment_ids: Tensor,
    floor: float | None = None,
) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Token tensors (fp32 or more) and segment ids, both 0 where the mask is False, and the advantage."""
    given, S = check_shapes(named, advantage, mask, segment_ids), len(advantage)
    ids = torch.where(mask, segment_ids, 0)
    if mask.any():
        low, high = ids.aminmax()
        require(0 <= int(low) and int(high) < S, "segment_ids", (int(low), int(high)), f"in [0, {S})")
        bad = ~torch.where(mask, advantage[ids], 0).isfinite()
        require(not bad.any(), f"advantage of segment {int(ids[bad.int().argmax()])}", "NaN or inf", "a finite value")
    tokens: list[Tensor | None] = []
    for x in named.values():
        if x is not None:
            # before any arithmetic: 0 * inf is NaN, in the backward pass as well
            x = torch.where(mask, x, 0).to(torch.promote_types(x.dtype, torch.float32))
            x = x if floor is None else torch.where(mask, x.clamp(min=floor), 0)
        tokens.append(x)
    bad = ~torch.stack([x.detach() for x in tokens if x is not None]).isfinite().all(0)
    if bad.any():
        t = int(bad.int().argmax())
        values = {name: x[t].item() for name, x in given.items()}
        raise ValueError(f"token {t} of segment {int(ids[t])}: got {values}, need finite values under the mask")
    return tokens, advantage.detach().to(tokens[0].dtype), ids


def _segment_sum(x: Tensor, ids: Tensor, S: int) -> Tensor:
    """fp64 [S] sums of x [T] by segment."""
    return x.new_zeros(S, dtype=torch.float64).index_add(0, ids, x.double())


def divisor(
    aggregation: str,
    max_length: int | None,
    denominator: float | Tensor | None,
    tokens: float | Tensor,
    segments: float | Tensor,
    S: int,
) -> float | Tensor:
    """What an aggregation divides the summed loss by, at least 1."""
    default = {"token-mean": tokens, "sequence-mean": segments, "constant": S}[aggregation]
    return at_least_one(denominator, default) * (max_length if aggregation == "constant" else 1)


def at_least_one(denominator: float | Tensor | None, default: float | Tensor) -> float | Tensor:
    n = default if denominator is None else denominator
    return n.clamp(min=1) if isinstance(n, Tensor) else max(n, 1)


def _counts(segment_tokens: Tensor) -> Metrics:
    return {"count/tokens": segment_tokens.sum(), "count/segments": (segment_tokens > 0).sum()}
