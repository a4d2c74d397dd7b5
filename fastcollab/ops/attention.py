"""Attention over the paged KV cache and over packed training rows, and the copying of cache blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from fastcollab.config import require
from fastcollab.ops.dispatch import choose, fake, refuse_create_graph
from fastcollab.reference import packed
from fastcollab.reference.packed import Segments

__all__ = ["copy_blocks", "packed_attention", "paged_attention"]


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
    """Append new K/V rows to pages, then causal attention: see :func:`fastcollab.reference.attention.paged_attention`.

    q, k, v may be strided views with unit stride in the last dimension. native: float32 and bfloat16, computed in fp32;
    a row's result has the same bits alone, in any batch and however its tokens are split over calls.
    """
    sinks = None if sinks is None else sinks.contiguous()
    run = choose("paged_attention", q.device, q.dtype, k_pool.dtype)[1].paged_attention
    return run(q, k, v, k_pool, v_pool, slot_mapping, block_table, q_indptr, kv_len, scale, window, softcap, sinks)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed segments that may share a prefix, with autograd and no copy of a prefix.

    See :func:`fastcollab.reference.packed.packed_attention`. triton: the gradient's bits are the same in every run, and
    a segment's output has the same bits alone and in any pack.
    """
    impl, where = choose("packed_attention", q.device, q.dtype)
    if impl == "reference":
        return where.packed_attention(q, k, v, segments, scale, window, softcap, sinks)
    packed.check(q, k, v, segments, sinks)
    sinks = None if sinks is None else sinks.contiguous()
    return _PackedAttention.apply(q, k, v, sinks, where, segments, scale, window, softcap)


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, where, segments, scale, window, softcap):
        out, lse = where.packed_attention_forward(q, k, v, segments, scale, window, softcap, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.where, ctx.settings = where, (segments, scale, window, softcap)
        return out

    @staticmethod
    def backward(ctx, grad):
        refuse_create_graph()
        *saved, sinks = ctx.saved_tensors
        dq, dk, dv, dsinks = ctx.where.packed_attention_backward(grad, *saved, *ctx.settings, sinks)
        return dq, dk, dv, None if sinks is None else dsinks, *[None] * 5


def copy_blocks(pools: list[Tensor], pairs: Tensor) -> None:
    """pools[i][destination] = pools[i][source] for each (source, destination) of pairs [P, 2] int64, in order."""
    if not pools:
        return
    device = pools[0].device
    impl, where = choose("copy_blocks", device, pools[0].dtype)
    if impl == "native" and device.type == "cuda":
        if not pairs.is_cuda and len(pairs):
            size = min(len(pool) for pool in pools)
            inside = 0 <= int(pairs.min()) and int(pairs.max()) < size
            require(inside, "pairs", pairs.tolist(), f"blocks in [0, {size})")
        where.copy_blocks(pools, pairs.to(device), torch.cuda.current_stream(device).cuda_stream)
    else:
        where.copy_blocks(pools, pairs)


@fake("paged_attention")
def _(q, k, v, *indices_and_settings, **settings):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@fake("copy_blocks")
def _(pools, pairs, stream=0):
    return None
