"""``advantage_regression`` in Triton: segments are summed in fp64, scored by one program, and their gradient spread.

As in ``policy_loss`` nothing waits for the host: a kept value that is not finite, or a segment that does not exist,
makes the loss NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.kernels import segments
from fastcollab.kernels.offline import Case
from fastcollab.kernels.segments import BLOCK, NUM_WARPS, case, kept_tokens

NUM_SUMS = 9
_SCORED = 256  # segments at a time: their nine fp64 sums stay in registers


@triton.jit
def score_kernel(
    count, total, floored, advantage, low, high, slope, sums, S, blocks, max_length,
    BETA: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """slope [S]: the gradient of a segment's loss in each of its log-probs; sums [9]."""
    i = tl.arange(0, BLOCK)
    loss = tl.zeros([BLOCK], tl.float64)
    tokens, kept_segments, below, square, ratios, ratio_square, fits, advantages = (
        loss, loss, loss, loss, loss, loss, loss, loss,
    )  # fmt: skip
    for start in range(0, blocks, BLOCK):
        b = start + i
        least = tl.load(low + b, mask=b < blocks, other=0)
        most = tl.load(high + b, mask=b < blocks, other=-1)
        loss += tl.where((least < 0) | (most >= S), float("nan"), 0.0)
    for start in range(0, S, BLOCK):
        s = start + i
        inside = s < S
        n = tl.load(count + s, mask=inside, other=0).to(tl.float64)
        kept = n > 0
        A = tl.load(advantage + s, mask=inside, other=0.0).to(tl.float64)
        ratio = tl.load(total + s, mask=inside, other=0.0)
        fit = BETA * ratio  # a constant, since an argument would be rounded to fp32
        e = fit - A
        norm = tl.where(kept, n, 1.0) * 0.0 + 1.0
        if NORM == 1:
            norm = tl.where(kept, n, 1.0)
        elif NORM == 2:
            norm = norm * max_length
        tl.store(slope + s, (e / norm).to(tl.float32), mask=inside)
        loss += tl.where(kept, e * e / (2.0 * BETA * norm), 0.0)
        tokens += n
        kept_segments += kept.to(tl.float64)
        below += tl.load(floored + s, mask=inside, other=0).to(tl.float64)
        square += tl.where(kept, e * e, 0.0)
        ratios += tl.where(kept, ratio, 0.0)
        ratio_square += tl.where(kept, ratio * ratio, 0.0)
        fits += tl.where(kept, tl.abs(fit), 0.0)
        advantages += tl.where(kept, tl.abs(A), 0.0)
    tl.store(sums, tl.sum(loss, 0))
    tl.store(sums + 1, tl.sum(tokens, 0))
    tl.store(sums + 2, tl.sum(kept_segments, 0))
    tl.store(sums + 3, tl.sum(below, 0))
    tl.store(sums + 4, tl.sum(square, 0))
    tl.store(sums + 5, tl.sum(ratios, 0))
    tl.store(sums + 6, tl.sum(ratio_square, 0))
    tl.store(sums + 7, tl.sum(fits, 0))
    tl.store(sums + 8, tl.sum(advantages, 0))


@triton.jit
def spread_kernel(logprob, mask, ids, slope, grad, T, S, floor, FLOORED: tl.constexpr, BLOCK: tl.constexpr):
    t, kept = kept_tokens(mask, T, BLOCK)
    id = tl.load(ids + t, mask=kept, other=0)
    g = tl.load(slope + id, mask=kept & (id >= 0) & (id < S), other=0.0)
    if FLOORED:
        g = tl.where(tl.load(logprob + t, mask=kept, other=0.0) >= floor, g, 0.0)
    tl.store(grad + t, tl.where(kept, g, 0.0), mask=t < T)


def advantage_regression_forward(
    logprob: Tensor,
    anchor: Tensor,
    advantage: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    beta: float,
    length_norm: int,
    max_length: int,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """sums fp64 [9], grad fp32 [T], as the native ``advantage_regression_forward``; contiguous tensors."""
    T, S, device = len(logprob), len(advantage), logprob.device
    grad = torch.empty_like(logprob)
    slope = torch.empty(S, dtype=torch.float32, device=device)
    sums = torch.empty(NUM_SUMS, dtype=torch.float64, device=device)
    with torch.cuda.device_of(logprob):
        low, high = segments.ranges(mask, segment_ids)
        parts = segments.sum_segments(logprob, anchor, mask, segment_ids, S, low, high, floor)
        score_kernel[(1,)](
            *parts, advantage, low, high, slope, sums, S, len(low), max_length,
            BETA=beta, NORM=length_norm, BLOCK=_SCORED, num_warps=NUM_WARPS,
        )  # fmt: skip
        if T:
            spread_kernel[(len(low),)](
                logprob, mask, segment_ids, slope, grad, T, S, floor,
                FLOORED=floor > float("-inf"), BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
    return sums, grad


def offline_cases(target: str) -> list[Case]:
    types = {"max_length": "i32"}
    return [
        *(case(score_kernel, {"BETA": 0.1, "NORM": norm, "BLOCK": _SCORED}, types) for norm in (0, 1, 2)),
        case(spread_kernel, {"FLOORED": True, "BLOCK": BLOCK}),
    ]
