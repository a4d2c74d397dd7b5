"""``packed_attention`` in Triton: causal attention over packed segments that may share a prefix, with its gradients.

As FlashAttention: scores stay in registers, the forward keeps the log-sum-exp of each row, the backward computes the
probabilities again from it. A prefix is read where it lies, once per tile of queries; its gradient is summed by the one
program that owns the key, over all segments that see it in a fixed order: no atomics, the same bits in every run.
What a segment's rows give depends on its own tiles alone, not on the pack.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.kernels.logits import tanh, target_of
from fastcollab.kernels.offline import Case
from fastcollab.kernels.packed_plan import Blocks, blocks, covers, key_tiles, query_tiles
from fastcollab.kernels.paged_plan import padded
from fastcollab.reference.packed import Segments

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # which takes bfloat16 for integers, and cuts it off


@triton.jit
def _dot(a, b, total):
    """total + a @ b in fp32, from operands of one dtype."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _round(x, dtype: tl.constexpr):
    """fp32 to dtype, to the nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _tile(x, tokens, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, first=0):
    """[tokens, PADDED] of one head from its column ``first``; 0 beyond its last one.

    Rows beyond a span are its last one again, and what comes of them is masked: an address costs less than a mask.
    """
    columns = first + tl.arange(0, PADDED)
    at = x + tokens[:, None] * stride + columns[None, :]
    if WIDTH % PADDED != 0:
        return tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def _product(
    a, tile_a, rows_a, stride_a, b, tile_b, rows_b, stride_b,
    WIDTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Two tiles' rows multiplied, fp32 [a, b]. With PART, by as many columns at a time, which are read once more: the
    fp32 units take whole rows into registers, more than there are."""
    total = tl.zeros([tile_a.shape[0], tile_b.shape[0]], tl.float32)
    if PART:
        for first in range(0, WIDTH, PART):  # not the padding: ``_tile`` masks a last part that is cut, no other
            part_a = _tile(a, rows_a, stride_a, WIDTH, PART, first)
            part_b = _tile(b, rows_b, stride_b, WIDTH, PART, first)
            total = _dot(part_a, tl.trans(part_b), total)
    else:
        total = _dot(tile_a, tl.trans(tile_b), total)
    return total


@triton.jit
def _store(x, tokens, real, stride, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    columns = tl.arange(0, PADDED)
    mask = real[:, None]
    if WIDTH < PADDED:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(x + tokens[:, None] * stride + columns[None, :], _round(value, x.dtype.element_ty), mask=mask)


@triton.jit
def _row(tile):
    """A row of the table of query tiles: packed indices as int64, for they get multiplied, and lengths as int32."""
    start, length = tl.load(tile), tl.load(tile + 1).to(tl.int32)
    return start, length, tl.load(tile + 2), tl.load(tile + 3).to(tl.int32), tl.load(tile + 4).to(tl.int32)


@triton.jit
def _steps(length, depth, first, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The steps of KEYS keys that a tile of queries needs: (first, number) of the prefix, then of its own segment."""
    skip, own_skip = 0, 0
    if WINDOW:
        oldest = tl.maximum(depth + first - WINDOW + 1, 0)
        skip = tl.minimum(oldest, depth) // KEYS
        own_skip = tl.maximum(oldest - depth, 0) // KEYS
    of_prefix = tl.cdiv(depth, KEYS) - skip
    own = tl.cdiv(tl.minimum(first + QUERIES, length), KEYS) - own_skip
    return skip, of_prefix, own_skip, own


@triton.jit
def _keys(step, start, length, prefix, depth, skip, of_prefix, own_skip, KEYS: tl.constexpr):
    """(packed index, position, whether it exists) of the keys of a step: those of the prefix come first."""
    is_own = step >= of_prefix
    index = tl.where(is_own, step - of_prefix + own_skip, step + skip) * KEYS + tl.arange(0, KEYS)
    number = tl.where(is_own, length, depth)
    keys = tl.where(is_own, start, prefix) + tl.minimum(index, number - 1)
    return keys, tl.where(is_own, depth, 0) + index, index < number


@triton.jit
def _forward_kernel(
    q, k, v, sinks, out, lse, tiles, stride_q, head_q, stride_k, head_k, stride_v, head_v,
    SINKS: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program: one tile of queries of one head. out [T, H, DV] contiguous, lse fp32 [T, H]."""
    tile, head = tiles + (tl.program_id(0) // H) * 5, (tl.program_id(0) % H).to(tl.int64)
    start, length, prefix, depth, first = _row(tile)
    q, k, v = q + head * head_q, k + head // GROUP * head_k, v + head // GROUP * head_v
    index = first + tl.arange(0, QUERIES)
    tokens, real, at = start + tl.minimum(index, length - 1), index < length, depth + index
    qs = _tile(q, tokens, stride_q, DK, KP)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        top = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head).to(tl.float32)
        mass += 1
    total = tl.zeros([QUERIES, VP], tl.float32)
    skip, of_prefix, own_skip, own = _steps(length, depth, first, QUERIES, KEYS, WINDOW)
    for step in tl.range(0, of_prefix + own, num_stages=STAGES):
        keys, position, exists = _keys(step, start, length, prefix, depth, skip, of_prefix, own_skip, KEYS)
        ks, vs = _tile(k, keys, stride_k, DK, KP), _tile(v, keys, stride_v, DV, VP)
        score = _product(q, qs, tokens, stride_q, k, ks, keys, stride_k, DK, PART) * SCALE
        if SOFTCAP > 0:
            score = SOFTCAP * tanh(score / SOFTCAP)
        seen = exists[None, :] & (position[None, :] <= at[:, None])
        if WINDOW:
            seen &= position[None, :] > at[:, None] - WINDOW
        score = tl.where(seen, score, -float("inf"))
        now = tl.maximum(top, tl.max(score, 1))
        base = tl.where(now == -float("inf"), 0.0, now)  # no key was seen yet
        p, shrink = tl.exp(score - base[:, None]), tl.exp(top - base)
        mass = mass * shrink + tl.sum(p, 1)
        total = total * shrink[:, None]
        total = _dot(_round(p, vs.dtype), vs, total)
        top = now
    mass = tl.where(real, mass, 1.0)  # a window may hide all from a row beyond the segment
    _store(out + head * DV, tokens, real, H * DV, total / mass[:, None], DV, VP)
    tl.store(lse + tokens * H + head, top + tl.log(mass), mask=real)


@triton.jit
def _slopes(score, product, lse, delta, seen, SOFTCAP: tl.constexpr):
    """(probabilities, gradient of the raw scores) from scaled scores, grad @ v, the rows' lse and sum(grad * out)."""
    slope = 1.0
    if SOFTCAP > 0:
        bent = tanh(score / SOFTCAP)
        score = SOFTCAP * bent
        slope = 1 - bent * bent
    p = tl.where(seen, tl.exp(score - lse), 0.0)
    return p, p * (product - delta) * slope


@triton.jit
def _dq_kernel(
    grad, q, k, v, out, lse, delta, dq, tiles, stride_g, head_g, stride_q, head_q, stride_k, head_k, stride_v, head_v,
    H: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program: one tile of queries of one head. Writes dq [T, H, DK] and delta = sum(grad * out), fp32 [T, H]."""
    tile, head = tiles + (tl.program_id(0) // H) * 5, (tl.program_id(0) % H).to(tl.int64)
    start, length, prefix, depth, first = _row(tile)
    q, k, v = q + head * head_q, k + head // GROUP * head_k, v + head // GROUP * head_v
    index = first + tl.arange(0, QUERIES)
    tokens, real, at = start + tl.minimum(index, length - 1), index < length, depth + index
    grad += head * head_g
    gs = _tile(grad, tokens, stride_g, DV, VP)
    os = _tile(out + head * DV, tokens, H * DV, DV, VP)
    deltas = tl.sum(gs.to(tl.float32) * os.to(tl.float32), 1)
    tl.store(delta + tokens * H + head, deltas, mask=real)
    qs = _tile(q, tokens, stride_q, DK, KP)
    lses = tl.load(lse + tokens * H + head)
    total = tl.zeros([QUERIES, KP], tl.float32)
    skip, of_prefix, own_skip, own = _steps(length, depth, first, QUERIES, KEYS, WINDOW)
    for step in tl.range(0, of_prefix + own, num_stages=STAGES):
        keys, position, exists = _keys(step, start, length, prefix, depth, skip, of_prefix, own_skip, KEYS)
        ks, vs = _tile(k, keys, stride_k, DK, KP), _tile(v, keys, stride_v, DV, VP)
        score = _product(q, qs, tokens, stride_q, k, ks, keys, stride_k, DK, PART) * SCALE
        product = _product(grad, gs, tokens, stride_g, v, vs, keys, stride_v, DV, PART)
        seen = real[:, None] & exists[None, :] & (position[None, :] <= at[:, None])
        if WINDOW:
            seen &= position[None, :] > at[:, None] - WINDOW
        p, slopes = _slopes(score, product, lses[:, None], deltas[:, None], seen, SOFTCAP)
        total = _dot(_round(slopes, ks.dtype), ks, total)
    _store(dq + head * DK, tokens, real, H * DK, total * SCALE, DK, KP)


@triton.jit
def _dkv_kernel(
    grad, q, k, v, lse, delta, dk, dv, tiles, visits, stride_g, head_g, stride_q, head_q, stride_k, head_k, stride_v,
    head_v,
    H: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program: one tile of keys of one kv head, over all that see it. Writes dk [T, HKV, DK] and dv [T, HKV, DV]."""
    HKV: tl.constexpr = H // GROUP
    tile, head = tiles + (tl.program_id(0) // HKV) * 4, (tl.program_id(0) % HKV).to(tl.int64)
    begin, end = tl.load(tile + 2).to(tl.int32), tl.load(tile + 3).to(tl.int32)
    index = tl.arange(0, KEYS)
    count = tl.load(tile + 1).to(tl.int32)
    keys, exists = tl.load(tile) + tl.minimum(index, count - 1), index < count
    k, v = k + head * head_k, v + head * head_v
    ks, vs = _tile(k, keys, stride_k, DK, KP), _tile(v, keys, stride_v, DV, VP)
    dks, dvs = tl.zeros([KEYS, KP], tl.float32), tl.zeros([KEYS, VP], tl.float32)
    for visit in range(begin, end):
        start, length = tl.load(visits + visit * 4), tl.load(visits + visit * 4 + 1).to(tl.int32)
        depth, position = tl.load(visits + visit * 4 + 2).to(tl.int32), tl.load(visits + visit * 4 + 3).to(tl.int32)
        low = tl.maximum(position - depth, 0) // QUERIES * QUERIES  # tiles begin where those of the segment do
        high = length
        if WINDOW:
            high = tl.minimum(length, position + KEYS - 1 + WINDOW - depth)
        at_key = position + index
        for member in range(GROUP):
            h = head * GROUP + member
            q_h, grad_h = q + h * head_q, grad + h * head_g
            for first in tl.range(low, high, QUERIES, num_stages=STAGES):
                rows = first + tl.arange(0, QUERIES)
                tokens, real, at = start + tl.minimum(rows, length - 1), rows < length, depth + rows
                qs = _tile(q_h, tokens, stride_q, DK, KP)
                gs = _tile(grad_h, tokens, stride_g, DV, VP)
                lses = tl.load(lse + tokens * H + h)
                deltas = tl.load(delta + tokens * H + h)
                score = _product(k, ks, keys, stride_k, q_h, qs, tokens, stride_q, DK, PART) * SCALE
                product = _product(v, vs, keys, stride_v, grad_h, gs, tokens, stride_g, DV, PART)
                seen = exists[:, None] & real[None, :] & (at_key[:, None] <= at[None, :])
                if WINDOW:
                    seen &= at_key[:, None] > at[None, :] - WINDOW
                p, slopes = _slopes(score, product, lses[None, :], deltas[None, :], seen, SOFTCAP)
                dvs = _dot(_round(p, gs.dtype), gs, dvs)
                dks = _dot(_round(slopes, qs.dtype), qs, dks)
    _store(dk + head * DK, keys, exists, HKV * DK, dks * SCALE, DK, KP)
    _store(dv + head * DV, keys, exists, HKV * DV, dvs, DV, VP)


def packed_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(out [T, H, Dv] in q's dtype, lse fp32 [T, H]); 0 for a token in no segment. Shapes as in reference/packed.py."""
    T, H, Hkv, dk, dv = *q.shape[:2], k.shape[1], k.shape[2], v.shape[2]
    q, k, v = map(_rows, (q, k, v))
    new = torch.empty if covers(segments, T) else torch.zeros
    out = new(T, H, dv, dtype=q.dtype, device=q.device)
    lse = new(T, H, dtype=torch.float32, device=q.device)
    b = blocks("forward", dk, dv, q.dtype, target_of(q.device))
    tiles = query_tiles(segments, b.queries, q.device)
    if len(tiles):
        with torch.cuda.device_of(q):
            _forward_kernel[(len(tiles) * H,)](
                q, k, v, sinks, out, lse, tiles, *_strides(q, k, v), SINKS=sinks is not None,
                **_constants(H, Hkv, dk, dv, b, scale, window, softcap), num_warps=b.warps, num_stages=b.stages,
            )  # fmt: skip
    return out, lse


def packed_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dsinks), each in the dtype of what it is the gradient of; dsinks [0] without sinks."""
    T, H, Hkv, dk, dv = *q.shape[:2], k.shape[1], k.shape[2], v.shape[2]
    grad, q, k, v = map(_rows, (grad, q, k, v))
    new = torch.empty if covers(segments, T) else torch.zeros
    d_q, delta = new(T, H, dk, dtype=q.dtype, device=q.device), new(T, H, dtype=torch.float32, device=q.device)
    d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    strides, target = _strides(grad, q, k, v), target_of(q.device)
    b = blocks("dq", dk, dv, q.dtype, target)
    tiles = query_tiles(segments, b.queries, q.device)
    if len(tiles):
        with torch.cuda.device_of(q):
            _dq_kernel[(len(tiles) * H,)](
                grad, q, k, v, out, lse, delta, d_q, tiles, *strides,
                **_constants(H, Hkv, dk, dv, b, scale, window, softcap), num_warps=b.warps, num_stages=b.stages,
            )  # fmt: skip
    b = blocks("dkv", dk, dv, q.dtype, target)
    tiles, visits = key_tiles(segments, T, b.keys, q.device)
    if len(tiles):
        with torch.cuda.device_of(q):
            _dkv_kernel[(len(tiles) * Hkv,)](
                grad, q, k, v, lse, delta, d_k, d_v, tiles, visits, *strides,
                **_constants(H, Hkv, dk, dv, b, scale, window, softcap), num_warps=b.warps, num_stages=b.stages,
            )  # fmt: skip
    if sinks is None:
        return d_q, d_k, d_v, q.new_empty(0)
    return d_q, d_k, d_v, -((sinks.float() - lse).exp() * delta).sum(0).to(sinks.dtype)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _constants(
    heads: int, kv_heads: int, dk: int, dv: int, b: Blocks, scale: float, window: int, softcap: float
) -> dict[str, Any]:
    """What a model fixes, none of it different from batch to batch."""
    return dict(
        H=heads, GROUP=heads // kv_heads, SCALE=scale, WINDOW=window, SOFTCAP=softcap, DK=dk, DV=dv, KP=padded(dk),
        VP=padded(dv), QUERIES=b.queries, KEYS=b.keys, PART=b.part, STAGES=b.stages,
    )  # fmt: skip


OFFLINE = [  # dtype, query heads per kv head, Dk, Dv, window, softcap, sinks
    (torch.bfloat16, 2, 64, 64, 0, 0.0, False),
    (torch.bfloat16, 2, 128, 128, 0, 0.0, False),
    (torch.bfloat16, 8, 128, 128, 512, 30.0, True),
    (torch.float32, 2, 128, 128, 0, 0.0, False),
    (torch.float32, 2, 128, 128, 512, 30.0, True),
    (torch.float32, 1, 96, 96, 0, 0.0, False),  # no power of two
]


def offline_cases(target: str) -> list[Case]:
    """All three kernels, as launched."""
    cases = []
    for dtype, group, dk, dv, window, softcap, sinks in OFFLINE:
        data = "*fp32" if dtype == torch.float32 else "*bf16"
        for kernel, name in ((_forward_kernel, "forward"), (_dq_kernel, "dq"), (_dkv_kernel, "dkv")):
            b = blocks(name, dk, dv, dtype, target)
            constants = _constants(16, 16 // group, dk, dv, b, dk**-0.5, window, softcap)
            if kernel is _forward_kernel:
                constants["SINKS"] = sinks
            types = dict.fromkeys(("q", "k", "v", "sinks", "grad", "out", "dq", "dk", "dv"), data)
            types |= dict(lse="*fp32", delta="*fp32", tiles="*i64", visits="*i64")
            signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
            cases.append(Case(kernel, signature, constants, b.warps, b.stages))
    return cases
