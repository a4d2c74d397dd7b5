"""Paged attention in Triton: append, then attend, one launch for decode, hand-off and prefill rows together.

A program takes up to ``tile`` queries of one row and one kv head (tokens x the query heads that share it, so K and V
are read once per group) and walks over the keys in steps aligned to absolute position. Rows with few queries are cut
every ``split`` positions, and a second kernel merges the pieces. Rows whose block tables are equal over one piece share
a prompt: where each has one new token, one program reads that piece for all of them.

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
from fastcollab.kernels.paged_walk import BOTH, POOL, load_query, walk

CHUNK = tl.constexpr(8)  # pieces merged at once, aligned to absolute position


@triton.jit
def _row_of(number, q_indptr, rows, SLOTS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, LIMIT: tl.constexpr):
    """The row that owns a tile (or, with SLOTS, a workspace slot): the last one that starts at or before it.

    Row r's tiles start at q_indptr[r] * GROUP // TILE + r, its slots at min(q_indptr[r] * GROUP, r * LIMIT): both leave
    room for what it needs. Starts are counted, not searched by halves: few loads that wait for one another.
    """
    count = number * 0
    for i in range(0, rows, 256):
        row = i + tl.arange(0, 256)
        begin = tl.load(q_indptr + row, mask=row < rows, other=0) * GROUP
        start = tl.minimum(begin, row * LIMIT) if SLOTS else begin // TILE + row
        count += tl.sum(((start <= number) & (row < rows)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _attend(
    q, out, partial, stats, sinks, source, token, head, at, valid, slot, direct, piece, start, stop, old, begin,
    q_token, q_head, kv_head, splits, scale, softcap, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    PART: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, MERGE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries (token, head, at, valid, slot: [M]) over positions start .. stop of one row's table."""
    M: tl.constexpr = token.shape[0]
    dv = tl.arange(0, VP)
    address = q + token.to(tl.int64) * q_token + head * q_head
    query = load_query(address, valid, 0, PART, DK)
    top = tl.full([M], -float("inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, VP], tl.float32)
    whole = tl.minimum(old, stop) // KEYS  # steps before this one find all their keys in the pool
    both = tl.where((old > start) & (old < stop), (old + KEYS - 1) // KEYS, whole)
    end = (stop + KEYS - 1) // KEYS
    for origin in tl.static_range(3):
        first = start // KEYS if origin == POOL else tl.maximum(start // KEYS, whole if origin == BOTH else both)
        last = whole if origin == POOL else both if origin == BOTH else end
        top, mass, acc = walk(
            query, address, valid, top, mass, acc, at, first, last, start, stop, old, begin, source, scale, softcap,
            window, DK, KP, PART, DV, PAGE, KEYS, origin, WINDOW, SOFTCAP, 1 if origin == BOTH else STAGES,
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
        part = (slot.to(tl.int64) * HEADS + kv_head) * splits + piece
        tl.store(partial + part[:, None] * DV + dv[None, :], acc, mask=keep)
        tl.store(stats + part * 2, top, mask=valid)
        tl.store(stats + part * 2 + 1, mass, mask=valid)


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


@triton.jit
def _sharers(
    i, row, rows, start, stop, table, block_table, table_row, q_indptr, kv_len,
    GROUP: tl.constexpr, LIMIT: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Queries i [M] of all one-token rows among TOGETHER neighbours whose pool positions start .. stop are ``row``'s.

    -> token, at, valid, slot: [M], and the first of these rows, whose program reads for them all.
    """
    other = row // TOGETHER * TOGETHER + i // GROUP
    valid = (i // GROUP < TOGETHER) & (other < rows)
    token = tl.load(q_indptr + other, mask=valid, other=0)
    valid &= tl.load(q_indptr + other + 1, mask=valid, other=0) == token + 1
    at = tl.load(kv_len + other, mask=valid, other=0) - 1
    valid &= at >= stop
    entry = start // PAGE + tl.arange(0, triton.next_power_of_2((SPLIT + PAGE - 2) // PAGE + 1))
    inside = entry <= (stop - 1) // PAGE
    mine = tl.load(table + entry, mask=inside, other=0)
    theirs = (block_table + other.to(tl.int64) * table_row)[:, None] + entry[None, :]
    theirs = tl.load(theirs, mask=valid[:, None] & inside[None, :], other=0)
    valid &= tl.max((theirs != mine[None, :]).to(tl.int32), 1) == 0
    slot = tl.minimum(token * GROUP, other * LIMIT) + i % GROUP
    return token, at, valid, slot, tl.min(tl.where(valid, other, rows), 0)


@triton.jit(do_not_specialize=["tokens", "rows", "tiles", "splits", "window"])
def append_and_attend(
    q, k, v, k_pool, v_pool, slot_mapping, block_table, q_indptr, kv_len, sinks, out, partial, stats,
    q_token, q_head, k_token, k_head, v_token, v_head, k_block, k_slot, k_pool_head, v_block, v_slot, v_pool_head,
    table_row, tokens, rows, tiles, splits, window, scale, softcap,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    PART: tl.constexpr, PAGE: tl.constexpr, SHORT: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, LIMIT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    MERGE: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr,
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

    table = block_table + row.to(tl.int64) * table_row
    source = (
        table, k + kv_head * k_head, v + kv_head * v_head,
        k_pool + kv_head * k_pool_head, v_pool + kv_head * v_pool_head,
        k_token, v_token, k_block, k_slot, v_block, v_slot,
    )  # fmt: skip
    short = n * GROUP <= SHORT if SHORT < TILE else True
    if short:
        i = base + tl.arange(0, SHORT)
        token, at, valid = begin + i // GROUP, old + i // GROUP, i < n * GROUP
        slot = tl.minimum(begin * GROUP, row * LIMIT) + i
        if MERGE and not WINDOW and SHORT >= 2 * GROUP:
            if (n == 1) & (stop <= old):
                token, at, valid, slot, reader = _sharers(
                    i, row, rows, start, stop, table, block_table, table_row, q_indptr, kv_len,
                    GROUP, LIMIT, PAGE, SPLIT, SHORT // GROUP,
                )  # fmt: skip
                if reader < row:
                    return
        _attend(
            q, out, partial, stats, sinks, source, token, kv_head * GROUP + i % GROUP, at, valid, slot, direct, piece,
            start, stop, old, begin, q_token, q_head, kv_head, splits, scale, softcap, window,
            GROUP, HEADS, DK, DV, KP, VP, PART, PAGE, KEYS, WINDOW, SOFTCAP, SINKS, MERGE, STAGES,
        )  # fmt: skip
    else:
        j = base + tl.arange(0, TILE)
        _attend(
            q, out, partial, stats, sinks, source, begin + j // GROUP, kv_head * GROUP + j % GROUP, old + j // GROUP,
            j < n * GROUP, tl.minimum(begin * GROUP, row * LIMIT) + j, direct, piece,
            start, stop, old, begin, q_token, q_head, kv_head, splits, scale, softcap, window,
            GROUP, HEADS, DK, DV, KP, VP, PART, PAGE, KEYS, WINDOW, SOFTCAP, SINKS, MERGE, STAGES,
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
    i = slot - tl.minimum(begin * GROUP, row * LIMIT)
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

    ``ValueError`` where shapes, dtypes or strides disagree. The values of slot_mapping, block_table, q_indptr and
    kv_len lie on the device and are not checked, that would wait for it: wrong ones read and write outside the tensors.
    No row may read, through its block table, a slot that this call writes for another row. Sizes depend on shapes
    alone, so a call can be captured in a CUDA graph.

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
            group, kv_heads, dk, dv, padded(dk), padded(dv), min(b.part, padded(dk)), page, b.short, b.tile, b.keys,
            b.split, b.limit, window > 0, capped, sinks is not None, p.merge > 0, APPEND, b.stages, num_warps=b.warps,
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


TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
OFFLINE = [  # dtype, group, width of K, of V, window, soft cap, sinks, merge
    (torch.bfloat16, 2, 128, 128, False, False, False, True),
    (torch.float32, 2, 128, 128, False, False, False, True),
    (torch.float32, 4, 80, 80, True, False, False, True),
    (torch.bfloat16, 2, 256, 256, True, True, False, True),
    (torch.bfloat16, 4, 128, 128, True, True, True, True),
    (torch.bfloat16, 2, 128, 128, False, False, False, False),
    (torch.float32, 2, 128, 128, False, False, False, False),
]


def offline_cases(target: str) -> list[Case]:
    """The kernels as launched with pools of q's dtype and 16-token blocks, for rows in pieces or too short for that."""
    cases = []
    for dtype, group, dk, dv, window, softcap, sinks, merge in OFFLINE:
        b, kind = paged_plan.blocks(group, dk, dv, dtype, target), TYPES[dtype]
        sizes = dict(GROUP=group, HEADS=8, DV=dv, VP=padded(dv), SPLIT=b.split, LIMIT=b.limit, WINDOW=window)
        own = dict(DK=dk, KP=padded(dk), PART=min(b.part, padded(dk)), PAGE=16, SHORT=b.short, TILE=b.tile, KEYS=b.keys,
                   SOFTCAP=softcap, SINKS=sinks, MERGE=merge, COUNT=APPEND, STAGES=b.stages)  # fmt: skip
        special = dict.fromkeys(("slot_mapping", "block_table", "q_indptr", "kv_len"), "*i32")
        special |= dict(partial="*fp32", stats="*fp32", scale="fp32", softcap="fp32")
        special |= dict.fromkeys(("q", "k", "v", "k_pool", "v_pool", "sinks", "out"), kind)
        launched = [(append_and_attend, sizes | own, b.warps), (merge_pieces, sizes, 2)]
        for kernel, constants, warps in launched if merge else launched[:1]:
            signature = {x: "constexpr" if x in constants else special.get(x, "i32") for x in kernel.arg_names}
            cases.append(Case(kernel, signature, constants, warps, b.stages))
    return cases
