"""``policy_loss`` in Triton: value, gradient and metrics of packed tokens in one pass.

A program computes one block of tokens and writes its sums to a table, which a second kernel adds up in order: no
atomics, so every run gives the same bits. What a CPU would raise is not looked for, since that would make the host
wait: a kept value that is not finite, or a segment that does not exist, makes the loss NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.kernels import segments
from fastcollab.kernels.offline import Case
from fastcollab.kernels.segments import BLOCK, NUM_WARPS, case, kept_tokens

NUM_SUMS = 12


@triton.jit
def exponential(x):
    """e^x, e^x - 1 and e^x - 1 - x for x <= 20, each to its own last digits: the C++ version's polynomial."""
    bounded = tl.maximum(x, -87.0)
    n = tl.floor(bounded * 1.44269504088896341 + 0.5)
    r = (bounded - n * 0.693359375) + n * 2.12194440e-4
    r2 = r * r
    c4 = 1.9875691500e-4 * r + 1.3981999507e-3
    c2 = 8.3334519073e-3 * r + 4.1665795894e-2
    c0 = 1.6666665459e-1 * r + 5.0000001201e-1
    tail = ((c4 * r2 + c2) * r2 + c0) * r2
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    minus_1 = power * (tail + r) + (power - 1.0)
    return power * ((tail + r) + 1.0), minus_1, tl.where(n == 0.0, tail, minus_1 - x)


@triton.jit
def put(partial, k: tl.constexpr, x):
    """Row k of the table of sums, in this program's column."""
    tl.store(partial + k * tl.num_programs(0) + tl.program_id(0), tl.sum(x.to(tl.float64), 0))


@triton.jit
def policy_kernel(
    logprob, old, ref, advantage, mask, ids, weight, mean, grad, partial, has_token, T, S, low, high, dual, beta,
    FORM: tl.constexpr, SEQUENCE: tl.constexpr, WEIGHTED: tl.constexpr, DUAL: tl.constexpr, KL: tl.constexpr,
    PENALTY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    CAP: tl.constexpr = 20.0
    t, kept = kept_tokens(mask, T, BLOCK)
    lp = tl.load(logprob + t, mask=kept, other=0.0)
    was = tl.load(old + t, mask=kept, other=0.0)
    id = tl.load(ids + t, mask=kept, other=0)
    known = kept & (id >= 0) & (id < S)
    A = tl.where(kept, tl.load(advantage + id, mask=known, other=float("nan")), 0.0)
    tl.store(has_token + id, 1, mask=known)

    d = lp - was
    value, _, drift = exponential(tl.minimum(d, CAP))
    log_ratio = d
    r = value
    if SEQUENCE:
        log_ratio = tl.load(mean + id, mask=known, other=0.0)
        r, _, _ = exponential(tl.minimum(log_ratio, CAP))
    clipped = tl.minimum(tl.maximum(r, low), high)
    below = r < low
    above = r > high
    is_dual = kept & False
    if FORM == 0:
        below = below & (A < 0)
        above = above & (A > 0)
        loss = -tl.minimum(r * A, clipped * A)
        flat = below | above | (log_ratio > CAP)
        if DUAL:
            is_dual = (A < 0) & (loss > -dual * A)
            loss = tl.where(is_dual, -dual * A, loss)
            flat = flat | is_dual
        slope = tl.where(flat, 0.0, -(r * A))
    elif FORM == 1:
        slope = -clipped * A
        loss = slope * lp
    else:
        below = is_dual
        above = is_dual
        slope = -A
        loss = slope * lp
    odd = d - d  # NaN where the cap would hide an infinity
    if KL > 0:
        e = tl.load(ref + t, mask=kept, other=0.0) - lp
        odd += e - e
        if KL == 1:
            kl = -e
            kl_slope = e * 0.0 + 1.0
        elif KL == 2:
            kl = e * e * 0.5
            kl_slope = -e
        else:
            _, minus_1, kl = exponential(tl.minimum(e, CAP))
            kl_slope = tl.where(e > CAP, 0.0, -minus_1)
        if PENALTY:
            loss += beta * kl
            slope += beta * kl_slope
        put(partial, 11, tl.where(kept, kl, 0.0))
    else:
        put(partial, 11, d * 0.0)
    loss += odd
    if WEIGHTED:
        w = tl.load(weight + id, mask=known, other=0.0)
        loss *= w
        slope *= w
    tl.store(grad + t, tl.where(kept, slope, 0.0), mask=t < T)

    column = partial + tl.program_id(0)
    blocks = tl.num_programs(0)
    put(partial, 0, tl.where(kept, loss, 0.0))
    put(partial, 1, kept.to(tl.float32))
    put(partial, 3, tl.where(kept, r, 0.0))
    tl.store(column + 4 * blocks, tl.min(tl.where(kept, r, float("inf")), 0).to(tl.float64))
    tl.store(column + 5 * blocks, tl.max(tl.where(kept, r, 0.0), 0).to(tl.float64))
    put(partial, 6, tl.where(kept, drift, 0.0))
    put(partial, 7, (kept & below).to(tl.float32))
    put(partial, 8, (kept & above).to(tl.float32))
    put(partial, 9, (kept & (below | above)).to(tl.float32))
    put(partial, 10, (kept & is_dual).to(tl.float32))


@triton.jit
def merge_kernel(partial, has_token, sums, blocks, S, BLOCK: tl.constexpr):
    """Program k: sums[k], its row of the table (the fifth's minimum, the sixth's maximum) or the number of segments."""
    k = tl.program_id(0)
    b = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    if k == 2:
        for start in range(0, S, BLOCK):
            total += tl.load(has_token + start + b, mask=start + b < S, other=0).to(tl.float64)
        tl.store(sums + k, tl.sum(total, 0))
    elif k == 4:
        total += float("inf")
        for start in range(0, blocks, BLOCK):
            row = partial + k.to(tl.int64) * blocks + start
            total = tl.minimum(total, tl.load(row + b, mask=start + b < blocks, other=float("inf")))
        tl.store(sums + k, tl.min(total, 0))
    elif k == 5:
        for start in range(0, blocks, BLOCK):
            row = partial + k.to(tl.int64) * blocks + start
            total = tl.maximum(total, tl.load(row + b, mask=start + b < blocks, other=0.0))
        tl.store(sums + k, tl.max(total, 0))
    else:
        for start in range(0, blocks, BLOCK):
            row = partial + k.to(tl.int64) * blocks + start
            total += tl.load(row + b, mask=start + b < blocks, other=0.0)
        tl.store(sums + k, tl.sum(total, 0))


def policy_loss_forward(
    logprob: Tensor,
    old_logprob: Tensor,
    ref_logprob: Tensor | None,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    form: int,
    ratio: int,
    per_sequence: bool,
    beta: float,
    kl: int,
) -> tuple[Tensor, Tensor]:
    """sums fp64 [12] and grad fp32 [T], as the native ``policy_loss_forward``; contiguous tensors."""
    T, S, device = len(logprob), len(advantage), logprob.device
    blocks = triton.cdiv(T, BLOCK)
    grad = torch.empty_like(logprob)
    partial = torch.empty(NUM_SUMS, blocks, dtype=torch.float64, device=device)
    has_token = torch.zeros(S, dtype=torch.int32, device=device)
    sums = torch.empty(NUM_SUMS, dtype=torch.float64, device=device)
    with torch.cuda.device_of(logprob):
        weight = mean = logprob
        if per_sequence or ratio == 1:
            x, y = (logprob, old_logprob) if ratio == 1 else (None, None)
            reach = segments.ranges(mask, segment_ids)
            weight, mean = segments.mean_segments(x, y, mask, segment_ids, S, *reach)
        if blocks:
            policy_kernel[(blocks,)](
                logprob, old_logprob, logprob if ref_logprob is None else ref_logprob, advantage, mask, segment_ids,
                weight, mean, grad, partial, has_token, T, S, 1.0 - clip_low, 1.0 + clip_high, dual_clip, beta,
                FORM=form, SEQUENCE=ratio == 1, WEIGHTED=per_sequence, DUAL=dual_clip > 0 and form == 0,
                KL=0 if ref_logprob is None else kl, PENALTY=beta != 0, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
        merge_kernel[(NUM_SUMS,)](partial, has_token, sums, blocks, S, BLOCK=BLOCK // 2, num_warps=NUM_WARPS)
    return sums, grad


def offline_cases(target: str) -> list[Case]:
    """GRPO with its KL and a dual clip, GSPO, CISPO, and what they share."""
    types = {"low": "fp32", "high": "fp32", "dual": "fp32", "beta": "fp32"}
    options = [
        {"FORM": 0, "SEQUENCE": False, "WEIGHTED": False, "DUAL": True, "KL": 3, "PENALTY": True},
        {"FORM": 0, "SEQUENCE": True, "WEIGHTED": True, "DUAL": False, "KL": 2, "PENALTY": True},
        {"FORM": 1, "SEQUENCE": False, "WEIGHTED": False, "DUAL": False, "KL": 0, "PENALTY": False},
    ]
    return [
        *segments.offline_cases(target),
        case(merge_kernel, {"BLOCK": BLOCK // 2}),
        *(case(policy_kernel, one | {"BLOCK": BLOCK}, types) for one in options),
    ]
