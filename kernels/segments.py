"""Sums over the segments of packed tokens in Triton: tokens in any order, added in a fixed one; no atomics, no sync.

Each block of tokens notes the range of segments that it keeps; a segment's program then adds up the blocks whose range
holds it. Packed batches keep a segment's tokens together, so that is one block or a few; scattered ids cost more, up to
all blocks for each segment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.kernels.offline import Case

BLOCK = 1024  # tokens of one program
NUM_WARPS = 4
_CHUNK = 128  # blocks whose ranges are looked at together


@triton.jit
def kept_tokens(mask, T, BLOCK: tl.constexpr):
    """This program's token numbers, and which of them the mask keeps."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return t, tl.load(mask + t, mask=t < T, other=0).to(tl.int1)


@triton.jit
def range_kernel(mask, ids, low, high, T, BLOCK: tl.constexpr):
    """low, high [blocks] int64: the least and greatest segment kept in each block; low > high if none is."""
    t, kept = kept_tokens(mask, T, BLOCK)
    id = tl.load(ids + t, mask=kept, other=0)
    tl.store(low + tl.program_id(0), tl.min(tl.where(kept, id, 0x7FFFFFFFFFFFFFFF), 0))
    tl.store(high + tl.program_id(0), tl.max(tl.where(kept, id, -1), 0))


@triton.jit
def segment_kernel(
    x, y, mask, ids, low, high, count, total, floored, weight, mean, T, blocks, floor,
    VALUES: tl.constexpr, MEAN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One segment: count of kept tokens, total of max(x, floor) - max(y, floor), count of x < floor; or 1 / count and
    the mean with MEAN. Without VALUES the total is 0.
    """
    s = tl.program_id(0)
    first = tl.full([], 0, tl.int32) + blocks
    last = tl.full([], -1, tl.int32)
    for chunk in range(0, blocks, CHUNK):
        b = chunk + tl.arange(0, CHUNK)
        inside = b < blocks
        hit = (tl.load(low + b, mask=inside, other=1) <= s) & (s <= tl.load(high + b, mask=inside, other=-1))
        first = tl.minimum(first, tl.min(tl.where(hit & inside, b, blocks), 0))
        last = tl.maximum(last, tl.max(tl.where(hit & inside, b, -1), 0))
    n = tl.zeros([BLOCK], tl.int32)
    below = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float64)
    for b in range(first, last + 1):
        t = (tl.zeros([BLOCK], tl.int64) + b) * BLOCK + tl.arange(0, BLOCK)
        mine = tl.load(mask + t, mask=t < T, other=0).to(tl.int1)
        mine = mine & (tl.load(ids + t, mask=mine, other=-1) == s)
        n += mine.to(tl.int32)
        if VALUES:
            a = tl.load(x + t, mask=mine, other=0.0)
            c = tl.load(y + t, mask=mine, other=0.0)
            below += (mine & (a < floor)).to(tl.int32)
            a = tl.where(a < floor, floor, a).to(tl.float64)  # NaN stays NaN
            c = tl.where(c < floor, floor, c).to(tl.float64)
            sums += tl.where(mine, a - c, 0.0)
    tokens, whole = tl.sum(n, 0), tl.sum(sums, 0)
    if MEAN:
        divisor = tl.maximum(tokens, 1).to(tl.float64)
        tl.store(weight + s, (1.0 / divisor).to(tl.float32))
        tl.store(mean + s, (whole / divisor).to(tl.float32))
    else:
        tl.store(count + s, tokens)
        tl.store(total + s, whole)
        tl.store(floored + s, tl.sum(below, 0))


def ranges(mask: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """low, high of each block, int64 [blocks]."""
    blocks = triton.cdiv(len(ids), BLOCK)
    low, high = (torch.empty(blocks, dtype=torch.int64, device=ids.device) for _ in range(2))
    if blocks:
        range_kernel[(blocks,)](mask, ids, low, high, len(ids), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return low, high


def sum_segments(
    x: Tensor | None, y: Tensor | None, mask: Tensor, ids: Tensor, S: int, low: Tensor, high: Tensor,
    floor: float = float("-inf"),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """count int32 [S], total fp64 [S], floored int32 [S]."""
    count, floored = (torch.empty(S, dtype=torch.int32, device=ids.device) for _ in range(2))
    total = torch.empty(S, dtype=torch.float64, device=ids.device)
    _launch(x, y, mask, ids, S, low, high, floor, (count, total, floored, total, total), mean=False)
    return count, total, floored


def mean_segments(
    x: Tensor | None, y: Tensor | None, mask: Tensor, ids: Tensor, S: int, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """1 / max(count, 1) and the mean of x - y, fp32 [S]."""
    weight, mean = (torch.empty(S, dtype=torch.float32, device=ids.device) for _ in range(2))
    _launch(x, y, mask, ids, S, low, high, float("-inf"), (mean, mean, mean, weight, mean), mean=True)
    return weight, mean


def _launch(x, y, mask, ids, S, low, high, floor, out, mean):
    if S:
        values = x is not None
        segment_kernel[(S,)](
            x if values else mask, y if values else mask, mask, ids, low, high, *out, len(ids), len(low), floor,
            VALUES=values, MEAN=mean, CHUNK=_CHUNK, BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip


TYPES = dict.fromkeys(("T", "S", "blocks"), "i32") | {"mask": "*i1", "low": "*i64", "high": "*i64", "floor": "fp32"}
TYPES |= {"ids": "*i64"} | dict.fromkeys(("total", "partial", "sums"), "*fp64")
TYPES |= dict.fromkeys(("count", "floored", "has_token"), "*i32")


def case(kernel, constants: dict, types: dict[str, str] | None = None) -> Case:
    """The kernel as it is launched here: what TYPES does not name is "*fp32"."""
    types = TYPES | (types or {})
    signature = {x: "constexpr" if x in constants else types.get(x, "*fp32") for x in kernel.arg_names}
    return Case(kernel, signature, constants, NUM_WARPS, 1)


def offline_cases(target: str) -> list[Case]:
    """The same blocks on every target: a kernel holds a few vectors of tokens, no tile."""
    sizes = {"CHUNK": _CHUNK, "BLOCK": BLOCK}
    return [
        case(range_kernel, {"BLOCK": BLOCK}),
        case(segment_kernel, {"VALUES": True, "MEAN": True, **sizes}),
        case(segment_kernel, {"VALUES": True, "MEAN": False, **sizes}),
    ]
