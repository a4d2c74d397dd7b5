"""Attention over a paged KV cache, the specification: append, then causal attention of each row over its pages."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcollab.config import require


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
    """Append T new K/V rows to the pools (in place), then attend.

    q [T, H, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv]; k_pool [N, block, Hkv, Dk], v_pool [N, block, Hkv, Dv];
    slot_mapping [T] int32 (block * block size + offset), block_table [R, B] int32, q_indptr [R + 1] int32, kv_len [R]
    int32 (counted after the append); sinks [H] or None -> [T, H, Dv]. H is a multiple of Hkv.

    Row r owns tokens q_indptr[r] .. q_indptr[r + 1], the last positions of its kv_len[r]. A query at position p sees
    positions max(0, p - window + 1) .. p (window 0: all up to p). score = scale * q.k, capped as softcap * tanh(score /
    softcap) where softcap > 0; a sink is one more logit of its head that takes probability and gives no value.
    ``ValueError`` where shapes or indices disagree.
    """
    tokens, heads, _ = q.shape
    block, kv_heads = k_pool.shape[1:3]
    require(heads % kv_heads == 0, "q", heads, f"heads in a multiple of {kv_heads}")
    require(k.shape == (tokens, *k_pool.shape[2:]), "k", list(k.shape), f"shape {[tokens, *k_pool.shape[2:]]}")
    require(v.shape == (tokens, *v_pool.shape[2:]), "v", list(v.shape), f"shape {[tokens, *v_pool.shape[2:]]}")
    require(q_indptr[-1] == tokens, "q_indptr", q_indptr.tolist(), f"{tokens}, the number of tokens, at its end")
    slots = slot_mapping.long()
    in_pool = not tokens or 0 <= int(slots.min()) and int(slots.max()) < k_pool.shape[0] * block
    require(in_pool, "slot_mapping", slot_mapping.tolist(), f"slots in [0, {k_pool.shape[0] * block})")

    k_pool[slots // block, slots % block] = k.to(k_pool.dtype)
    v_pool[slots // block, slots % block] = v.to(v_pool.dtype)
    out = q.new_empty(tokens, heads, v.shape[-1])
    bounds, lengths = q_indptr.tolist(), kv_len.tolist()
    for r, length in enumerate(lengths):
        n = bounds[r + 1] - bounds[r]
        require(0 <= n <= length or n == 0, "kv_len", length, f">= {n}, the tokens of row {r}")
        require(length <= block_table.shape[1] * block, "kv_len", length, f"<= the block table of row {r}")
        for i in range(0, n, 256):
            first = length - n + i  # position of the piece's first query
            last = min(first + 256, length)
            low = max(0, first - window + 1) if window else 0
            position = torch.arange(low, last, device=q.device)
            page = block_table[r].long()[position // block]
            piece = slice(bounds[r] + i, bounds[r] + i + last - first)
            keys, values = k_pool[page, position % block], v_pool[page, position % block]
            out[piece] = _attend(q[piece], keys.to(q), values.to(q), first, position, scale, window, softcap, sinks)
    return out


def _attend(q, k, v, first, position, scale, window, softcap, sinks) -> Tensor:
    """q [n, H, Dk] at positions first .. first + n over k, v [L, Hkv, D] at the given positions -> [n, H, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    at = torch.arange(first, first + q.shape[0], device=q.device)[:, None]
    visible = (position <= at) & ((position > at - window) if window else True)
    score = score.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.to(score)[:, None, None].expand(-1, q.shape[0], 1)], dim=-1)
    probability = score.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", probability, v)


def copy_blocks(pools: list[Tensor], pairs: Tensor) -> None:
    """pools[i][destination] = pools[i][source] for each (source, destination) of pairs [P, 2] int64, in order."""
    for source, destination in pairs.tolist():
        for pool in pools:
            inside = 0 <= source < len(pool) and 0 <= destination < len(pool)
            require(inside, "pairs", (source, destination), f"blocks in [0, {len(pool)})")
            pool[destination] = pool[source].clone()
