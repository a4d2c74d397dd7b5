"""``linear_logprob`` in Triton: log-prob of the target, entropy, a second target and top-1 without logits in memory.

Forward: a program multiplies one block of rows with one chunk of the vocabulary, tile by tile, and keeps a running
maximum, sum of exponentials and entropy sum; a second kernel merges the chunks of a row in their order. A chunk's
bounds depend on the block sizes alone and no program waits for another, so a row's bits depend neither on its
neighbours nor on the number of rows. Backward: see ``linear_logprob_backward``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.kernels.logits import (
    GROUP,
    SLICES,
    Tile,
    accumulate,
    block_of,
    case,
    compute_dtype,
    logit_gradient,
    merge,
    outside,
    product,
    product_tile,
    require_finite,
    require_ids,
    scaled,
    slices,
    softmax_part,
    target_of,
    tile_of,
    widens,
)
from fastcollab.kernels.offline import Case

_TILES_OF_CHUNK = 4  # vocabulary tiles of one forward program
_MERGED_ROWS, _MERGED_CHUNKS = 32, 32  # of one step of the merge
_DZ_BYTES = 64 << 20  # the backward's buffer of logit gradients


@triton.jit
def _store_chosen(out, chosen, rows, real, ids, x):
    """out[row] = x at the row's chosen id, by the one program whose tile x [rows, ids] holds that id."""
    id = tl.load(chosen + rows).to(tl.int32)
    here = real & (id >= tl.min(ids, 0)) & (id <= tl.max(ids, 0))
    if tl.max(here.to(tl.int32), 0) > 0:
        tl.store(out + rows, tl.sum(tl.where(ids[None, :] == id[:, None], x, 0.0), 1), mask=here)


@triton.jit
def _forward_kernel(
    h, w, bias, target, second, x_target, x_second, peaks, masses, spreads, tops, N, V, stride_h, stride_w,
    softcap, scale, D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
    SECOND: tl.constexpr, TOP1: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr, TILES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Row block x vocabulary chunk: peaks, masses, spreads, tops [chunks, N]; x_target, x_second [N] by their owner."""
    chunks = tl.cdiv(V, TILES * BLOCK_V)
    row_block, chunk = block_of(tl.program_id(0), tl.cdiv(N, BLOCK_N), chunks, GROUP)
    row = row_block * BLOCK_N
    at = row + tl.arange(0, BLOCK_N)
    real = at < N
    rows = tl.minimum(at, N - 1).to(tl.int64)
    SLICE: tl.constexpr = BLOCK_V // SLICES
    peak = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_N,), tl.float32)
    spread = tl.zeros((BLOCK_N,), tl.float32)
    top = tl.zeros((BLOCK_N,), tl.int32)
    first = chunk * (TILES * BLOCK_V)
    for t in range(0, tl.minimum(TILES, tl.cdiv(V - first, BLOCK_V))):
        v0 = first + t * BLOCK_V
        z = slices(product_tile(h, w, row, v0, N, V, stride_h, stride_w, D, WIDEN, BLOCK_N, BLOCK_V, BLOCK_D))
        for i in tl.static_range(SLICES):
            ids = v0 + i * SLICE + tl.arange(0, SLICE)
            x = scaled(z[i], bias, ids, ids < V, softcap, scale, HAS_BIAS, SOFTCAP)
            x = tl.where((ids < V)[None, :], x, float("-inf"))
            _store_chosen(x_target, target, rows, real, ids, x)
            if SECOND:
                _store_chosen(x_second, second, rows, real, ids, x)
            x_peak, x_mass, x_spread = softmax_part(x, ENTROPY)
            if TOP1:
                x_top = tl.min(tl.where(x == x_peak[:, None], ids[None, :], V - 1), 1)
                top = tl.where((x_peak > peak) | (t + i == 0), x_top, top)
            peak, mass, spread = merge(peak, mass, spread, x_peak, x_mass, x_spread)
    out = chunk.to(tl.int64) * N + rows
    tl.store(peaks + out, peak, mask=real)
    tl.store(masses + out, mass, mask=real)
    if ENTROPY:
        tl.store(spreads + out, spread, mask=real)
    if TOP1:
        tl.store(tops + out, top, mask=real)


@triton.jit
def _merge_kernel(
    x_target, x_second, peaks, masses, spreads, tops, logprob, lse, entropy, second_logprob, top1, N, chunks,
    ENTROPY: tl.constexpr, SECOND: tl.constexpr, TOP1: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The chunks of a block of rows, in order: the five results [N]."""
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = at < N
    rows = at.to(tl.int64)
    peak = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_N,), tl.float32)
    spread = tl.zeros((BLOCK_N,), tl.float32)
    top = tl.zeros((BLOCK_N,), tl.int32)
    for c0 in range(0, chunks, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        there = (c < chunks)[:, None] & real[None, :]
        part = c.to(tl.int64)[:, None] * N + rows[None, :]
        x_peak = tl.load(peaks + part, mask=there, other=float("-inf"))
        x_mass = tl.load(masses + part, mask=there, other=0.0)
        joint = tl.max(x_peak, 0)
        down = x_peak - tl.where(joint == float("-inf"), 0.0, joint)[None, :]
        e = tl.exp(down)
        if TOP1:
            x_top = tl.load(tops + part, mask=there, other=0)
            x_top = tl.min(tl.where(x_peak == joint[None, :], x_top, 2147483647), 0)
            top = tl.where((joint > peak) | (c0 == 0), x_top, top)
        x_spread = tl.zeros((BLOCK_N,), tl.float32)
        if ENTROPY:
            own = tl.load(spreads + part, mask=there, other=0.0)
            x_spread = tl.sum(e * (own + tl.where(e > 0, down * x_mass, 0.0)), 0)
        peak, mass, spread = merge(peak, mass, spread, joint, tl.sum(e * x_mass, 0), x_spread)
    log_mass = tl.log(mass)
    tl.store(lse + rows, tl.where(peak == float("inf"), peak, peak + log_mass), mask=real)
    tl.store(logprob + rows, tl.load(x_target + rows, mask=real, other=0.0) - peak - log_mass, mask=real)
    if SECOND:
        tl.store(second_logprob + rows, tl.load(x_second + rows, mask=real, other=0.0) - peak - log_mass, mask=real)
    if ENTROPY:
        tl.store(entropy + rows, log_mass - spread / mass, mask=real)
    if TOP1:
        tl.store(top1 + rows, top.to(tl.int64), mask=real)


@triton.jit
def _gradient_kernel(
    h, w, bias, target, lse, entropy, g_logprob, g_entropy, dz, db, N, first, V, stride_h, stride_w, stride_dz,
    softcap, scale, D: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
    NEED_B: tl.constexpr, WIDEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Row block x tile of the ids first..first+V (w and bias begin there): dz [N, V], db [row blocks, V] sums."""
    row_blocks = tl.cdiv(N, BLOCK_N)
    row_block, column = block_of(tl.program_id(0), row_blocks, tl.cdiv(V, BLOCK_V), GROUP)
    row, id = row_block * BLOCK_N, column * BLOCK_V
    at = row + tl.arange(0, BLOCK_N)
    rows = tl.minimum(at, N - 1).to(tl.int64)
    SLICE: tl.constexpr = BLOCK_V // SLICES
    z = slices(product_tile(h, w, row, id, N, V, stride_h, stride_w, D, WIDEN, BLOCK_N, BLOCK_V, BLOCK_D))
    aim = (tl.load(target + rows).to(tl.int32) - first)[:, None]
    normal = tl.load(lse + rows)
    g = tl.where(at < N, tl.load(g_logprob + rows), 0.0)
    g_ent, ent = g, g
    if ENTROPY:
        g_ent = tl.where(at < N, tl.load(g_entropy + rows), 0.0)
        ent = tl.load(entropy + rows)
    for i in tl.static_range(SLICES):
        ids = id + i * SLICE + tl.arange(0, SLICE)
        x = scaled(z[i], bias, ids, ids < V, softcap, scale, HAS_BIAS, SOFTCAP)
        d = logit_gradient(x, normal, ids[None, :] == aim, g, g_ent, ent, softcap, scale, ENTROPY, SOFTCAP)
        there = (at < N)[:, None] & (ids < V)[None, :]
        tl.store(dz + rows[:, None] * stride_dz + ids[None, :], d.to(dz.dtype.element_ty), mask=there)
        if NEED_B:
            tl.store(db + row_block.to(tl.int64) * V + ids, tl.sum(d, 0), mask=ids < V)


def _options(D: int, bias: Any, softcap: float, entropy: bool, widen: bool, tile: Tile) -> dict[str, Any]:
    """The constants that both GEMM kernels take."""
    return {
        "D": D, "HAS_BIAS": bias is not None, "SOFTCAP": softcap > 0, "ENTROPY": entropy, "WIDEN": widen,
        "BLOCK_N": tile.rows, "BLOCK_V": tile.ids, "BLOCK_D": tile.width, "GROUP": GROUP,
    }  # fmt: skip


def linear_logprob_forward(
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    second: Tensor | None,
    temperature: float,
    softcap: float,
    entropy: bool,
    top1: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """logprob, lse [N] fp32; entropy, second_logprob [N] fp32 and top1 [N] int64, or [0] each where not asked for.

    h [N, D] with unit stride in D, weight [V, D], bias [V] float; target, second [N] int64 in [0, V); softcap 0: none.
    top1 is the lowest of the ids with the largest logit. Raises: ValueError for an id outside [0, V), and for a row
    whose lse is not finite.
    """
    (N, D), V = h.shape, weight.shape[0]
    tile = tile_of(target_of(h.device), compute_dtype(h, weight), widens(h, weight))
    chunks = triton.cdiv(V, _TILES_OF_CHUNK * tile.ids)
    floats = lambda *shape: torch.empty(shape, device=h.device)  # noqa: E731
    logprob, lse, ent, other = floats(N), floats(N), floats(N * entropy), floats(0 if second is None else N)
    top = torch.empty(N * top1, dtype=torch.int64, device=h.device)
    if N == 0:
        return logprob, lse, ent, other, top
    x_target, x_second, peaks, masses = floats(N), torch.empty_like(other), floats(chunks, N), floats(chunks, N)
    spreads = floats(chunks, N) if entropy else peaks
    tops = torch.empty((chunks, N) if top1 else 0, dtype=torch.int32, device=h.device)
    wanted = {"ENTROPY": entropy, "SECOND": second is not None, "TOP1": top1}
    options = _options(D, bias, softcap, entropy, widens(h, weight), tile) | wanted
    with torch.cuda.device_of(h):
        _forward_kernel[(triton.cdiv(N, tile.rows) * chunks,)](
            h, weight, bias, target, second, x_target, x_second, peaks, masses, spreads, tops, N, V, h.stride(0),
            weight.stride(0), softcap, 1 / temperature, **options, TILES=_TILES_OF_CHUNK, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )  # fmt: skip
        _merge_kernel[(triton.cdiv(N, _MERGED_ROWS),)](
            x_target, x_second, peaks, masses, spreads, tops, logprob, lse, ent, other, top, N, chunks, **wanted,
            BLOCK_N=_MERGED_ROWS, BLOCK_C=_MERGED_CHUNKS, num_warps=4,
        )  # fmt: skip
    bad = ~lse.isfinite() | outside(target, V)
    if second is not None:
        bad |= outside(second, V)
    if bad.any():  # one wait for the device, not one for each
        require_ids("target", target, V)
        if second is not None:
            require_ids("second", second, V)
        require_finite(lse)
    return logprob, lse, ent, other, top


def linear_logprob_backward(
    g_logprob: Tensor,
    g_entropy: Tensor | None,
    h: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    temperature: float,
    softcap: float,
    need_h: bool,
    need_w: bool,
    need_b: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh [N, D], dw [V, D], db [V] in the dtypes of h, weight, bias, summed in fp32; [0] where not needed.

    Rows whose upstream gradients are all 0 are left out by index. Their number goes to the host, one wait of
    microseconds: it makes each of the four GEMMs exactly as tall as the rows that count, which programs that leave
    early can't do for a library GEMM. A kernel recomputes the logits of all rows for a chunk of the vocabulary and
    writes their gradients in the GEMM dtype; two library GEMMs take them to dh, summed over chunks in fp32, and dw,
    rounded once. Beyond the results: 64 MiB, fp32 sums for dh and the kept rows of h, 256 MiB at 8192 rows of 4096.
    """
    (N, D), V, dtype = h.shape, weight.shape[0], compute_dtype(h, weight)
    tile = tile_of(target_of(h.device), dtype, widens(h, weight))
    dh = torch.zeros_like(h) if need_h else h.new_empty(0)
    dw = torch.zeros_like(weight) if need_w else weight.new_empty(0)
    db = h.new_zeros(V if need_b else 0, dtype=bias.dtype if need_b else h.dtype)
    active = g_logprob != 0 if g_entropy is None else (g_logprob != 0) | (g_entropy != 0)
    rows = active.nonzero()[:, 0]
    n = len(rows)
    if n == 0:
        return dh, dw, db
    given = (h, target, g_logprob, lse, g_entropy, entropy)
    if n < N:
        given = tuple(None if x is None else x[rows] for x in given)
    x, target, g_logprob, lse, g_entropy, entropy = given
    x_wide = x.to(dtype)
    row_blocks = triton.cdiv(n, tile.rows)
    width = max(tile.ids, min(_DZ_BYTES // (n * dtype.itemsize), V + tile.ids - 1) // tile.ids * tile.ids)
    dz = torch.empty(n, width, dtype=dtype, device=h.device)
    db_part = torch.empty(row_blocks if need_b else 0, width, device=h.device)
    acc = torch.zeros(n if need_h else 0, D, device=h.device)
    options = _options(D, bias, softcap, g_entropy is not None, widens(h, weight), tile)
    for v in range(0, V, width):
        w, b = weight[v : v + width], None if bias is None else bias[v : v + width]
        size = len(w)
        with torch.cuda.device_of(h):
            _gradient_kernel[(row_blocks * triton.cdiv(size, tile.ids),)](
                x, w, b, target, lse, entropy, g_logprob, g_entropy, dz, db_part, n, v, size, x.stride(0), w.stride(0),
                width, softcap, 1 / temperature, **options, NEED_B=need_b, num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )  # fmt: skip
        if need_b:
            db[v : v + size] = db_part.view(-1)[: row_blocks * size].view(row_blocks, size).sum(0)
        if need_h:
            accumulate(acc, dz[:, :size], w.to(dtype))
        if need_w:
            product(dz[:, :size].T, x_wide, dw[v : v + size])
    if need_h:
        dh[rows] = acc.to(h.dtype)
    return dh, dw, db


def offline_cases(target: str) -> list[Case]:
    """bf16, fp32, and fp32 rows with a bf16 weight, of width 1024 and 4096: all options, and none."""
    cases = []
    for name, narrow in (("*bf16", "*bf16"), ("*fp32", "*fp32"), ("*fp32", "*bf16")):
        tile = tile_of(target, torch.bfloat16 if name == "*bf16" else torch.float32, name != narrow)
        types = dict.fromkeys(("h", "dz"), name) | dict.fromkeys(("w", "bias"), narrow)
        types |= dict.fromkeys(("target", "second", "top1"), "*i64") | {"tops": "*i32"}
        types |= dict.fromkeys(("x_target", "x_second", "peaks", "masses", "spreads", "logprob", "lse"), "*fp32")
        types |= dict.fromkeys(("entropy", "second_logprob", "g_logprob", "g_entropy", "db"), "*fp32")
        types |= dict.fromkeys(("N", "V", "first", "chunks", "stride_h", "stride_w", "stride_dz"), "i32")
        types |= {"softcap": "fp32", "scale": "fp32"}
        for D, on in ((1024, True), (4096, False)):
            gemm = _options(D, name if on else None, float(on), on, name != narrow, tile)
            wanted = {"ENTROPY": on, "SECOND": on, "TOP1": on}
            launch = tile.num_warps, tile.num_stages
            cases += [
                case(_forward_kernel, types, gemm | wanted | {"TILES": _TILES_OF_CHUNK}, *launch),
                case(_gradient_kernel, types, gemm | {"NEED_B": on}, *launch),
            ]
            if narrow == "*fp32":
                blocks = {"BLOCK_N": _MERGED_ROWS, "BLOCK_C": _MERGED_CHUNKS}
                cases.append(case(_merge_kernel, types, wanted | blocks, 4, 1))
    return cases
