"""Paged attention in Triton: append, then attend, one launch for decode, hand-off and prefill rows together.

A program takes up to ``tile`` queries of one row and one kv head (tokens x the query heads that share it, so K and V are
read once per group) and walks over the keys in steps aligned to absolute position. Rows with few queries are cut every
``split`` positions, and a second kernel merges the pieces. Rows whose block tables are equal over one piece share a
prompt: where each has one new token, one program reads that piece for all of them.

The keys and values of new tokens are read from k and v and stored by programs of their own, so no program reads from
the pool what another one of the launch writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastcollab.config import require
from fastcollab.kernels import paged_plan
from fastcollab.kernels.offline import Case
from fastcollab.kernels.paged_plan import APPEND, LOG2E, padded

POOL, BOTH, NEW = (tl.constexpr(i) for i in range(3))  # where a step finds its keys
CHUNK = tl.constexpr(8)  # pieces merged at once, aligned to absolute position


@triton.jit
def _slot(begin, row, GROUP: tl.constexpr, LIMIT: tl.constexpr):
    """First workspace slot of a row: min(all queries before it, LIMIT per row) leaves room for min(own, LIMIT)."""
    return tl.minimum(begin * GROUP, row * LIMIT)


@triton.jit
def _row_of(number, q_indptr, rows, SLOTS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, LIMIT: tl.constexpr):
    """The row that owns a tile (or, with SLOTS, a workspace slot): the last one that starts at or before it."""
    low = number * 0
    high = rows + low
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(q_indptr + middle)
        start = _slot(begin, middle, GROUP, LIMIT) if SLOTS else begin * GROUP // TILE + middle
        low = tl.where(start <= number, middle, low)
        high = tl.where(start <= number, high, middle)
    return low


@triton.jit
def _tanh(x):
    """tanh to fp32 rounding: a polynomial near 0, where 1 - exp(-2 |x|) cancels (Cephes' tanhf)."""
    z = x * x
    near = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
    near = x + x * z * (near - 3.33332819422e-1)
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _load(page, fresh, in_pool, is_new, column, WIDTH: tl.constexpr, SOURCE: tl.constexpr, like):
    """[keys, width] from addresses per key, 0 where there is no key; new ones are rounded as the pool rounds them."""
    column_ok = column[None, :] < WIDTH
    if SOURCE != NEW:
        old = tl.load(page[:, None] + column[None, :], mask=in_pool[:, None] & column_ok, other=0.0)
    if SOURCE != POOL:
        new = tl.load(fresh[:, None] + column[None, :], mask=is_new[:, None] & column_ok, other=0.0)
        new = new.to(page.dtype.element_ty)
        old = tl.where(in_pool[:, None], old, new) if SOURCE == BOTH else new
    return old.to(like.dtype)


@triton.jit
def _walk(
    query, top, mass, acc, at, first, end, low, stop, old, begin, table, k, v, k_pool, v_pool,
    k_token, v_token, k_block, k_slot, v_block, v_slot, scale, softcap, window,
    DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SOURCE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over key steps first .. end. Queries are at positions ``at``; base-2 logits. -> top, mass, acc."""
    dk, dv = tl.arange(0, query.shape[1]), tl.arange(0, acc.shape[1])
    for step in tl.range(first, end, num_stages=STAGES):
        position = step * KEYS + tl.arange(0, KEYS)
        in_pool = (position >= low) & (position < old)
        is_new = (position >= old) & (position < stop)
        if SOURCE == NEW:
            k_page, v_page = k_pool + position, v_pool + position  # only their type is used
        else:
            page = tl.load(table + position // PAGE, mask=in_pool, other=0).to(tl.int64)
            k_page = k_pool + page * k_block + (position % PAGE) * k_slot
            v_page = v_pool + page * v_block + (position % PAGE) * v_slot
        token = (begin + position - old).to(tl.int64)
        key = _load(k_page, k + token * k_token, in_pool, is_new, dk, DK, SOURCE, query)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * _tanh(score)
        if WINDOW:
            score = tl.where(position[None, :] > at[:, None] - window, score, -float("inf"))
        if SOURCE != POOL:
            score = tl.where(position[None, :] <= at[:, None], score, -float("inf"))
        now = tl.maximum(top, tl.max(score, 1))
        base = tl.where(now == -float("inf"), 0.0, now)  # no key was visible yet
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weight, 1)
        value = _load(v_page, v + token * v_token, in_pool, is_new, dv, DV, SOURCE, query)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        top = now
    return top, mass, acc


@triton.jit
def _attend(
    q, k, v, k_pool, v_pool, sinks, out, partial, stats, table,
    q_token, q_head, k_token, v_token, k_block, k_slot, v_block, v_slot,
    token, head, at, valid, slot, direct, piece, start, stop, old, begin, kv_head, splits, scale, softcap, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    MERGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries (token, head, at, valid, slot: [M]) over positions start .. stop of one row's table."""
    M: tl.constexpr = token.shape[0]
    dk, dv = tl.arange(0, KP), tl.arange(0, VP)
    address = q + token.to(tl.int64) * q_token + head * q_head
    query = tl.load(address[:, None] + dk[None, :], mask=valid[:, None] & (dk[None, :] < DK), other=0.0)
    top = tl.full([M], -float("inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VP], tl.float32)
    whole = tl.minimum(old, stop) // KEYS  # steps before this one find all their keys in the pool
    both = tl.where((old > start) & (old < stop), (old + KEYS - 1) // KEYS, whole)
    end = (stop + KEYS - 1) // KEYS
    for source in tl.static_range(3):
        first = start // KEYS if source == 0 else tl.maximum(start // KEYS, whole if source == 1 else both)
        last = whole if source == 0 else both if source == 1 else end
        top, mass, acc = _walk(
            query, top, mass, acc, at, first, last, start, stop, old, begin, table, k, v, k_pool, v_pool,
            k_token, v_token, k_block, k_slot, v_block, v_slot, scale, softcap, window,
            DK, DV, PAGE, KEYS, source, WINDOW, SOFTCAP, 1 if source == 1 else STAGES,
        )  # fmt: skip
    if SINKS:  # one more key of the piece that holds the query's own position
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        sink = tl.where((at >= start) & (at < stop), sink, -float("inf"))
        now = tl.maximum(top, sink)
        base = tl.where(now == -float("inf"), 0.0, now)
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.exp2(sink - base)
        acc = acc * shrink[:, None]
        top = now
    keep = valid[:, None] & (dv[None, :] < DV)
    if direct:
        to = out + (token.to(tl.int64) * HEADS * GROUP + head)[:, None] * DV + dv[None, :]
        tl.store(to, (acc / mass[:, None]).to(out.dtype.element_ty), mask=keep)
    elif MERGE:
        to = (slot.to(tl.int64) * HEADS + kv_head) * splits + piece
        tl.store(partial + to[:, None] * DV + dv[None, :], acc, mask=keep)
        tl.store(stats + to * 2, top, mask=valid)
        tl.store(stats + to * 2 + 1, mass, mask=valid)


@triton.jit
def _append(
    source, pool, slot_mapping, token, ok, head, s_token, s_head, p_block, p_slot, p_head,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED)
    keep = ok[:, None] & (column[None, :] < WIDTH)
    slot = tl.load(slot_mapping + token, mask=ok, other=0).to(tl.int64)
    x = tl.load((source + token * s_token + head * s_head)[:, None] + column[None, :], mask=keep)
    to = pool + (slot // PAGE) * p_block + (slot % PAGE) * p_slot + head * p_head
    tl.store(to[:, None] + column[None, :], x.to(pool.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["tokens", "rows", "tiles", "splits", "window"])
def append_and_attend(
    q, k, v, k_pool, v_pool, slot_mapping, block_table, q_indptr, kv_len, sinks, out, partial, stats,
    q_token, q_head, k_token, k_head, v_token, v_head, k_block, k_slot, k_pool_head, v_block, v_slot, v_pool_head,
    table_row, tokens, rows, tiles, splits, window, scale, softcap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    PAGE: tl.constexpr, SHORT: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    LIMIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, MERGE: tl.constexpr,
    COUNT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A 1-D grid: first (piece, tile, kv head), kv heads fastest, then (16 tokens to append, kv head)."""
    pid = tl.program_id(0)
    kv_head = (pid % HEADS).to(tl.int64)
    pid = pid // HEADS
    if pid >= tiles * splits:
        token = ((pid - tiles * splits) * COUNT + tl.arange(0, COUNT)).to(tl.int64)
        _append(k, k_pool, slot_mapping, token, token < tokens, kv_head, k_token, k_head, k_block, k_slot, k_pool_head,
                DK, KP, PAGE)  # fmt: skip
        _append(v, v_pool, slot_mapping, token, token < tokens, kv_head, v_token, v_head, v_block, v_slot, v_pool_head,
                DV, VP, PAGE)  # fmt: skip
        return
    tile, piece = pid % tiles, pid // tiles
    row = _row_of(tile, q_indptr, rows, False, GROUP, TILE, LIMIT)
    begin = tl.load(q_indptr + row)
    n = tl.load(q_indptr + row + 1) - begin
    base = (tile - begin * GROUP // TILE - row) * TILE  # the tile's first query, counted in its row
    if base >= n * GROUP:
        return
    length = tl.load(kv_len + row)
    old = length - n
    high = tl.minimum(old + (base + TILE - 1) // GROUP + 1, length)
    start, stop = 0 * old, high
    if WINDOW:
        start = tl.maximum(old + base // GROUP - window + 1, 0)
    direct = True
    if MERGE & (n * GROUP <= LIMIT):
        first = start // SPLIT
        direct = (high - 1) // SPLIT == first
        start = tl.maximum(start, (first + piece) * SPLIT)
        stop = tl.minimum(high, (first + piece + 1) * SPLIT)
    elif piece > 0:
        return
    if start >= stop:
        return

    k += kv_head * k_head
    v += kv_head * v_head
    k_pool += kv_head * k_pool_head
    v_pool += kv_head * v_pool_head
    table = block_table + row.to(tl.int64) * table_row
    if n * GROUP <= SHORT:
        i = tl.arange(0, SHORT)
        token, at, valid = begin + i // GROUP, old + i // GROUP, i < n * GROUP
        slot = _slot(begin, row, GROUP, LIMIT) + i
        if MERGE and not WINDOW and SHORT >= 2 * GROUP:
            if (n == 1) & (stop <= old):  # queries are those of SHORT // GROUP rows, where they share this piece
                other = row // (SHORT // GROUP) * (SHORT // GROUP) + i // GROUP
                valid = (i // GROUP < SHORT // GROUP) & (other < rows)
                token = tl.load(q_indptr + other, mask=valid, other=0)
                valid &= tl.load(q_indptr + other + 1, mask=valid, other=0) == token + 1
                at = tl.load(kv_len + other, mask=valid, other=0) - 1
                valid &= at >= stop
                entry = start // PAGE + tl.arange(0, triton.next_power_of_2((SPLIT + PAGE - 2) // PAGE + 1))
                inside = entry <= (stop - 1) // PAGE
                mine = tl.load(table + entry, mask=inside, other=0)
                theirs = block_table + other.to(tl.int64) * table_row
                theirs = tl.load(theirs[:, None] + entry[None, :], mask=valid[:, None] & inside[None, :], other=0)
                valid &= tl.max((theirs != mine[None, :]).to(tl.int32), 1) == 0
                if tl.min(tl.where(valid, other, rows), 0) < row:
                    return  # the first of them reads for all
                slot = _slot(token, other, GROUP, LIMIT) + i % GROUP
        _attend(
            q, k, v, k_pool, v_pool, sinks, out, partial, stats, table,
            q_token, q_head, k_token, v_token, k_block, k_slot, v_block, v_slot,
            token, kv_head * GROUP + i % GROUP, at, valid, slot, direct, piece, start, stop, old, begin, kv_head,
            splits, scale, softcap, window,
            GROUP, HEADS, DK, DV, KP, VP, PAGE, KEYS, WINDOW, SOFTCAP, SINKS, MERGE, STAGES,
        )  # fmt: skip
    else:
        i = base + tl.arange(0, TILE)
        _attend(
            q, k, v, k_pool, v_pool, sinks, out, partial, stats, table,
            q_token, q_head, k_token, v_token, k_block, k_slot, v_block, v_slot,
            begin + i // GROUP, kv_head * GROUP + i % GROUP, old + i // GROUP, i < n * GROUP,
            _slot(begin, row, GROUP, LIMIT) + i, direct, piece, start, stop, old, begin, kv_head,
            splits, scale, softcap, window,
            GROUP, HEADS, DK, DV, KP, VP, PAGE, KEYS, WINDOW, SOFTCAP, SINKS, MERGE, STAGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits", "window"])
def merge_pieces(
    partial, stats, out, q_indptr, kv_len, rows, splits, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, SPLIT: tl.constexpr,
    LIMIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A 1-D grid over (workspace slot, kv head): the output of one query of a row that was read in pieces."""
    slot, kv_head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row = _row_of(slot, q_indptr, rows, True, GROUP, 1, LIMIT)
    begin = tl.load(q_indptr + row)
    n = tl.load(q_indptr + row + 1) - begin
    i = slot - _slot(begin, row, GROUP, LIMIT)
    if (i >= n * GROUP) | (n * GROUP > LIMIT):
        return
    length = tl.load(kv_len + row)
    first, last = 0 * length, (length - 1) // SPLIT
    if WINDOW:
        first = tl.maximum(length - n - window + 1, 0) // SPLIT
    if first == last:
        return  # written by the attention itself
    at, dv = tl.arange(0, CHUNK), tl.arange(0, VP)
    source = (slot.to(tl.int64) * HEADS + kv_head) * splits - first
    top = -float("inf") + tl.zeros([CHUNK], tl.float32)
    for chunk in range(first // CHUNK, last // CHUNK + 1):
        piece = chunk * CHUNK + at
        there = (piece >= first) & (piece <= last)
        top = tl.maximum(top, tl.load(stats + (source + piece) * 2, mask=there, other=-float("inf")))
    best = tl.max(top, 0)
    mass = best * 0
    acc = tl.zeros([VP], tl.float32)
    for chunk in range(first // CHUNK, last // CHUNK + 1):
        piece = chunk * CHUNK + at
        there = (piece >= first) & (piece <= last)
        weight = tl.exp2(tl.load(stats + (source + piece) * 2, mask=there, other=-float("inf")) - best)
        mass += tl.sum(weight * tl.load(stats + (source + piece) * 2 + 1, mask=there, other=0.0), 0)
        keep = there[:, None] & (dv[None, :] < DV)
        x = tl.load(partial + (source + piece)[:, None] * DV + dv[None, :], mask=keep, other=0.0)
        acc += tl.sum(weight[:, None] * x, 0)
    token, head = (begin + i // GROUP).to(tl.int64), kv_head * GROUP + i % GROUP
    to = out + (token * HEADS * GROUP + head) * DV + dv
    tl.store(to, (acc / mass).to(out.dtype.element_ty), mask=dv < DV)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    q_indptr: Tensor,
    kv_len: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`fastcollab.reference.attention.paged_attention`, with any strides but unit stride in the last dimension.

    ``ValueError`` where shapes, dtypes or strides disagree. The values of slot_mapping, block_table, q_indptr and kv_len
    lie on the device and are not checked, that would wait for it: wrong ones read and write outside the tensors. No row
    may read, through its block table, a slot that this call writes for another row. Sizes depend on shapes alone, so a
    call can be captured in a CUDA graph.

    A query's bits depend on its own row, not on others. They are the same however the row's tokens are split over
    calls as long as each call, or none, gives the row at most ``Blocks.short`` queries (tokens x H / Hkv), and each or
    none at most ``Blocks.limit``.
    """
    _check(q, k, v, k_pool, v_pool, slot_mapping, block_table, q_indptr, kv_len, window, sinks)
    (tokens, heads, dk), (page, kv_heads, dv) = q.shape, v_pool.shape[1:]
    rows, width = block_table.shape
    out = q.new_empty(tokens, heads, dv)
    if not tokens:
        return out
    group, device = heads // kv_heads, q.device
    b = paged_plan.blocks(group, dk, dv, q.dtype, paged_plan.target_of(device))
    p = paged_plan.plan(b, tokens, rows, width * page, window, group, kv_heads)
    partial = stats = out
    if p.merge:
        partial = torch.empty(p.slots, kv_heads, p.splits, dv, dtype=torch.float32, device=device)
        stats = torch.empty(p.slots, kv_heads, p.splits, 2, dtype=torch.float32, device=device)
    capped = softcap > 0
    with torch.cuda.device_of(q):
        append_and_attend[(p.attend,)](
            q, k, v, k_pool, v_pool, slot_mapping, block_table, q_indptr, kv_len, out if sinks is None else sinks,
            out, partial, stats, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *k_pool.stride()[:3],
            *v_pool.stride()[:3], block_table.stride(0), tokens, rows, p.tiles, p.splits, window,
            scale / softcap if capped else scale * LOG2E, softcap * LOG2E,
            group, kv_heads, dk, dv, padded(dk), padded(dv), page, b.short, b.tile, b.keys, b.split, b.limit,
            window > 0, capped, sinks is not None, p.merge > 0, APPEND, b.stages, num_warps=b.warps,
        )  # fmt: skip
        if p.merge:
            merge_pieces[(p.merge,)](
                partial, stats, out, q_indptr, kv_len, rows, p.splits, window,
                group, kv_heads, dv, padded(dv), b.split, b.limit, window > 0, num_warps=2,
            )  # fmt: skip
    return out


def _check(q, k, v, k_pool, v_pool, slot_mapping, block_table, q_indptr, kv_len, window, sinks) -> None:
    tokens, heads, dk = q.shape
    rows, kv_heads = block_table.shape[0], k_pool.shape[2]
    require(heads % kv_heads == 0, "q", heads, f"heads in a multiple of {kv_heads}")
    require(dk == k_pool.shape[3], "q", list(q.shape), f"width {k_pool.shape[3]}, that of k_pool")
    require(v_pool.shape[:3] == k_pool.shape[:3], "v_pool", list(v_pool.shape), f"shape {[*k_pool.shape[:3], 'any']}")
    require(k.shape == (tokens, *k_pool.shape[2:]), "k", list(k.shape), f"shape {[tokens, *k_pool.shape[2:]]}")
    require(v.shape == (tokens, *v_pool.shape[2:]), "v", list(v.shape), f"shape {[tokens, *v_pool.shape[2:]]}")
    sizes = {"slot_mapping": (slot_mapping, tokens), "q_indptr": (q_indptr, rows + 1), "kv_len": (kv_len, rows)}
    for name, (x, size) in sizes.items():
        require(x.shape == (size,) and x.is_contiguous(), name, list(x.shape), f"shape {[size]}, contiguous")
    for name, x in {"block_table": block_table, **{name: x for name, (x, _) in sizes.items()}}.items():
        require(x.dtype == torch.int32, name, x.dtype, "torch.int32")
    require(rows > 0 or not tokens, "block_table", rows, f"rows for {tokens} tokens")
    for name, x in {"k": k, "v": v}.items():
        require(x.dtype == q.dtype, name, x.dtype, f"{q.dtype}, as q")
    require(v_pool.dtype == k_pool.dtype, "v_pool", v_pool.dtype, f"{k_pool.dtype}, as k_pool")
    for name, x in {"q": q, "k": k, "v": v, "k_pool": k_pool, "v_pool": v_pool, "block_table": block_table}.items():
        require(x.stride(-1) == 1 or x.shape[-1] <= 1, name, x.stride(-1), "stride 1 in the last dimension")
    require(window >= 0, "window", window, ">= 0")
    if sinks is not None:
        require(sinks.shape == (heads,) and sinks.is_contiguous(), "sinks", list(sinks.shape), f"shape {[heads]}")
