"""Packed attention: causal attention over many segments in one row of tokens, where segments may share a prefix.

Specification, and the training path on CPU. The token at index i of segment s sees the whole prefix span of s and the
tokens 0..i of s; its position is ``prefix_length[s] + i``, and a window counts positions. With ``p`` the softmax of
``softcap(scale * q @ k)`` over what is seen (and over the head's sink logit, which has no value), ``out = p @ v``.

On CPU, without window, soft cap and sinks, no mask and no copy of a prefix is made: each segment attends to itself, all
segments of a prefix attend to it as one block of queries, and the two are merged by their log-sum-exps, as in
FlashAttention. With the merged output and log-sum-exp, the backward of each is exact as it stands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastcollab.config import require

# A bucket may hold this share of padding, plus as many padded (query, key) pairs as one more attention call costs.
_PADDING_SHARE = 0.15
_CALL_PAIRS = 4096

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the segments of a packed row lie: int64 CPU tensors [S]. Segment s owns tokens start..start+length.

    A token belongs to at most one segment; one that belongs to none gets the output 0. ``prefix_length`` 0 means no
    prefix (the default); many segments may name the same prefix span, so a group's completions share one copy of
    their prompt.
    """

    start: Tensor
    length: Tensor
    prefix_start: Tensor | None = None
    prefix_length: Tensor | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("prefix_start", "prefix_length"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, torch.zeros_like(self.start))
        spans = (self.start, self.length, self.prefix_start, self.prefix_length)
        for name, x in zip(("start", "length", "prefix_start", "prefix_length"), spans, strict=True):
            ok = x.dtype == torch.int64 and x.device.type == "cpu" and x.ndim == 1 and len(x) == len(self.start)
            got = f"{x.dtype} {list(x.shape)} on {x.device}"
            require(ok, f"segments.{name}", got, f"int64 [{len(self.start)}] on cpu")
            require(bool((x >= 0).all()), f"segments.{name}", int(x.min()) if len(x) else None, ">= 0")
        require(len(self.start) >= 1, "number of segments", 0, ">= 1")
        end, order = self.start + self.length, self.start.argsort(stable=True)
        order = order[self.length[order] > 0]
        overlap = (end[order][:-1] > self.start[order][1:]).nonzero()
        if len(overlap):
            a, b = order[overlap[0, 0]].item(), order[overlap[0, 0] + 1].item()
            raise ValueError(f"segments: got segments {a} and {b} that overlap, need each token in at most one")
        own = (self.prefix_length > 0) & (self.length > 0)
        own &= (self.prefix_start < end) & (self.start < self.prefix_start + self.prefix_length)
        require(
            not own.any(), "segments", f"a prefix that overlaps its segment {int(own.int().argmax())}", "one outside"
        )

    @property
    def num_tokens(self) -> int:
        """Length of the shortest packed row that holds every segment and prefix."""
        if "num_tokens" not in self._cache:
            prefix_end = torch.where(self.prefix_length > 0, self.prefix_start + self.prefix_length, 0)
            self._cache["num_tokens"] = int(torch.maximum(self.start + self.length, prefix_end).max())
        return self._cache["num_tokens"]

    def buckets(self) -> list[Tensor]:
        """Segment indices [n] of each bucket: similar lengths together, so that padding stays small."""
        if "buckets" not in self._cache:
            self._cache["buckets"] = _bucket(self.length.tolist(), self.prefix_length.tolist())
        return self._cache["buckets"]

    def parts(self) -> list[_Part]:
        """The calls without a mask that make up all attention, those of the segments before those of the prefixes."""
        if "parts" not in self._cache:
            self._cache["parts"] = _own_parts(self) + _prefix_parts(self)
        return self._cache["parts"]

    def plan(self, device: torch.device, num_tokens: int) -> _Plan:
        """Index tensors on ``device`` for a row of ``num_tokens`` tokens, made once and kept."""
        key = ("plan", device, num_tokens)
        if key not in self._cache:
            self._cache[key] = _make_plan(self, device, num_tokens)
        return self._cache[key]

    def mask(self, bucket: int, window: int, device: torch.device) -> Tensor:
        """bool [n or 1, 1, Lq, P + Lq]: what each query of the bucket sees; made once and kept."""
        key = ("mask", bucket, window, device)
        if key not in self._cache:
            self._cache[key] = _make_mask(self, self.buckets()[bucket], window).to(device)
        return self._cache[key]


class _Part(NamedTuple):
    """One call: n blocks of equally many queries and keys. Rows in one piece are a slice, which copies nothing."""

    n: int
    query: slice | Tensor  # [n * Lq] packed index of each query; padding repeats a block's last one
    key: slice | Tensor  # [n * Lk] of each key
    is_causal: bool  # over the segment itself; else over a whole prefix
    real: Tensor | None  # index of the queries that are not padding; None: all
    is_padding: Tensor | None  # bool [n, 1, Lq, 1]
    rows: slice | Tensor  # query[real]


class _Bucket(NamedTuple):
    query: Tensor  # [n * Lq] packed index of each padded query
    key: Tensor  # [n * (P + Lq)] the same for the keys: prefix first, then the segment
    n: int
    has_prefix: bool


class _Plan(NamedTuple):
    buckets: list[_Bucket]
    inverse: Tensor  # [T] row of the concatenated bucket outputs that belongs to each token
    is_covered: bool  # False if some token is in no segment: it reads one row of zeros at the end


def _bucket(length: list[int], prefix: list[int]) -> list[Tensor]:
    """The cheaper of two greedy partitions, one that goes down by prefix first and one by length first."""
    used = [s for s in range(len(length)) if length[s]]
    orders = [lambda s: (prefix[s] > 0, prefix[s], length[s]), lambda s: (prefix[s] > 0, length[s], prefix[s])]
    partitions = [_partition(sorted(used, key=key, reverse=True), length, prefix) for key in orders]
    return [torch.tensor(sorted(b)) for b in min(partitions, key=lambda partition: partition[0])[1]]


def _partition(order: list[int], length: list[int], prefix: list[int]) -> tuple[int, list[list[int]]]:
    """(padded pairs, a call's price included; buckets): one is closed when its padding outgrows what a call costs."""
    buckets: list[list[int]] = []
    total = padded = pairs = width = depth = 0  # of the open bucket: (query, key) pairs, longest segment and prefix
    for s in order:
        own = length[s] * (prefix[s] + length[s])
        wider, deeper = max(width, length[s]), max(depth, prefix[s])
        grown = (len(buckets[-1]) + 1) * wider * (deeper + wider) if buckets else 0
        fits = grown - pairs - own <= _CALL_PAIRS + _PADDING_SHARE * (pairs + own)
        if buckets and fits and (prefix[s] > 0) == (depth > 0):
            buckets[-1].append(s)
            padded, pairs, width, depth = grown, pairs + own, wider, deeper
        else:
            total += padded
            buckets.append([s])
            padded, pairs, width, depth = own, own, length[s], prefix[s]
    return total + padded + _CALL_PAIRS * len(buckets), buckets


def _padded_span(start: Tensor, length: Tensor, width: int) -> Tensor:
    # Padding repeats the span's own last token: another segment's values, NaN perhaps, must not get near.
    return start[:, None] + torch.minimum(torch.arange(width), length[:, None] - 1)


def _own_parts(segments: Segments) -> list[_Part]:
    spans = [torch.arange(s, s + n) for s, n in zip(segments.start.tolist(), segments.length.tolist(), strict=True)]
    buckets = _bucket(segments.length.tolist(), [0] * len(spans))
    return [_part([spans[s] for s in bucket], None) for bucket in buckets]


def _prefix_parts(segments: Segments) -> list[_Part]:
    groups: dict[tuple[int, int], list[Tensor]] = {}
    spans = torch.stack([segments.start, segments.length, segments.prefix_start, segments.prefix_length], 1)
    for start, length, prefix, depth in sorted(spans.tolist()):
        if length and depth:
            groups.setdefault((depth, prefix), []).append(torch.arange(start, start + length))
    calls: list[list[tuple[Tensor, Tensor]]] = []
    blocks = [(torch.cat(spans), torch.arange(prefix, prefix + depth)) for (depth, prefix), spans in groups.items()]
    for query, key in sorted(blocks, key=lambda block: (len(block[1]), len(block[0]))):
        joined = [*calls.pop(), (query, key)] if calls and len(calls[-1][0][1]) == len(key) else [(query, key)]
        pairs = len(joined) * len(query) * len(key)
        padded = pairs - sum(len(rows) for rows, _ in joined) * len(key)
        fits = padded <= _CALL_PAIRS + _PADDING_SHARE * pairs
        calls += [joined] if fits else [joined[:-1], joined[-1:]]
    return [_part(*map(list, zip(*call, strict=True))) for call in calls]


def _part(queries: list[Tensor], keys: list[Tensor] | None) -> _Part:
    width = torch.arange(max(map(len, queries)))
    query = torch.cat([rows[width.clamp(max=len(rows) - 1)] for rows in queries])
    key = _as_slice(query if keys is None else torch.cat(keys))
    is_real = torch.stack([width < len(rows) for rows in queries])
    if is_real.all():
        query = _as_slice(query)
        return _Part(len(queries), query, key, keys is None, None, None, query)
    real = is_real.flatten().nonzero().flatten()
    return _Part(len(queries), query, key, keys is None, real, ~is_real[:, None, :, None], _as_slice(query[real]))


def _as_slice(rows: Tensor) -> slice | Tensor:
    first, n = int(rows[0]), len(rows)
    return slice(first, first + n) if torch.equal(rows, torch.arange(first, first + n)) else rows


def _make_plan(segments: Segments, device: torch.device, num_tokens: int) -> _Plan:
    buckets, inverse, offset = [], torch.full((num_tokens,), -1), 0
    for index in segments.buckets():
        length, depth = segments.length[index], segments.prefix_length[index]
        width, has_prefix = int(length.max()), bool(depth.max() > 0)
        key = query = _padded_span(segments.start[index], length, width)
        if has_prefix:
            key = torch.cat([_padded_span(segments.prefix_start[index], depth, int(depth.max())), query], dim=1)
        real = torch.arange(width) < length[:, None]
        inverse[query[real]] = offset + real.flatten().nonzero().flatten()
        offset += query.numel()
        buckets.append(_Bucket(query.flatten().to(device), key.flatten().to(device), len(index), has_prefix))
    is_covered = bool((inverse >= 0).all())
    inverse[inverse < 0] = offset
    return _Plan(buckets, inverse.to(device), is_covered)


def _make_mask(segments: Segments, index: Tensor, window: int) -> Tensor:
    width, depth = int(segments.length[index].max()), segments.prefix_length[index]
    deepest = int(depth.max())
    if bool((depth == deepest).all()):
        depth = depth[:1]  # one mask serves the bucket: padded keys lie behind every real query
    i, j = torch.arange(width), torch.arange(deepest)
    query_position = depth[:, None] + i
    key_position = torch.cat([j.expand(len(depth), -1), query_position], dim=1)
    exists = torch.cat([j < depth[:, None], torch.ones_like(query_position, dtype=torch.bool)], dim=1)
    distance = query_position[:, :, None] - key_position[:, None, :]
    seen = exists[:, None, :] & (distance >= 0)
    if window > 0:
        seen &= distance < window
    return seen[:, None]


def check(q: Tensor, k: Tensor, v: Tensor, segments: Segments, sinks: Tensor | None) -> None:
    """Raise ValueError for what :func:`packed_attention` does not take."""
    T, H, Hkv = q.shape[0], q.shape[1], k.shape[1]
    fits = k.shape[0] == v.shape[0] == T and v.shape[1] == Hkv and k.shape[2] == q.shape[2] and H % Hkv == 0
    shapes = (list(q.shape), list(k.shape), list(v.shape))
    require(fits, "q, k, v", shapes, "[T, H, Dk], [T, Hkv, Dk], [T, Hkv, Dv] with H a multiple of Hkv")
    require(segments.num_tokens <= T, "end of the segments", segments.num_tokens, f"<= {T}, the number of tokens")
    require(sinks is None or sinks.shape == (H,), "sinks", sinks is not None and list(sinks.shape), f"[{H}]")


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
    """Causal attention of packed tokens within their segments and over their prefixes, with autograd.

    Args: q [T, H, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv] of one float dtype, any strides, H a multiple of Hkv;
    ``window`` w > 0 lets position p see p-w+1..p; ``softcap`` c > 0 puts scores through ``c * tanh(score / c)``;
    ``sinks`` [H] adds a logit per head to the softmax's denominator.
    Returns: [T, H, Dv]; 0 for a token that is in no segment.
    Raises: ValueError for shapes that do not fit, or segments beyond T.
    """
    check(q, k, v, segments, sinks)
    T, H = q.shape[:2]
    if q.device.type == "cpu":
        if q.dtype in (torch.bfloat16, torch.float16):  # torch's CPU backward takes 13 times as long in bfloat16
            wide = (x.float() for x in (q, k, v))
            return packed_attention(*wide, segments, scale, window, softcap, sinks).to(q.dtype)
        is_windowed = 0 < window < int((segments.prefix_length + segments.length).max())
        if not is_windowed and softcap == 0 and sinks is None and k.shape[2] == v.shape[2]:
            return _Merged.apply(q, k, v, segments.parts(), scale)
    plan = segments.plan(q.device, T)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    outs = []
    for b, bucket in enumerate(plan.buckets):
        qb, kb, vb = (
            x.index_select(0, rows).unflatten(0, (bucket.n, -1)).transpose(1, 2)
            for x, rows in ((q, bucket.query), (k, bucket.key), (v, bucket.key))
        )  # [n, heads, length, width]
        if softcap > 0 or sinks is not None:
            out = _explicit(qb, kb, vb, segments.mask(b, window, q.device), scale, softcap, sinks)
        else:
            is_causal = not bucket.has_prefix and not 0 < window < qb.shape[2]
            mask = None if is_causal else segments.mask(b, window, q.device)
            out = _sdpa(qb, kb, vb, mask, scale)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    if not plan.is_covered:
        outs.append(v.new_zeros(1, H, v.shape[2]))
    return torch.cat(outs).index_select(0, plan.inverse)


class _Merged(torch.autograd.Function):
    """Attention part by part, merged by the parts' log-sum-exps. Returns [T, H, D] for parts as ``Segments.parts``."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, parts: list[_Part], scale: float) -> Tensor:
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = q.new_zeros(q.shape), q.new_zeros(q.shape[:2])
        for part in parts:
            inputs = _blocks(part, (q,), (k, v))
            o, z = (_packed(part, x) for x in _flash(*inputs, 0.0, part.is_causal, scale=scale))
            if not part.is_causal:
                own, own_z = _take(out, part.rows), _take(lse, part.rows)
                o, z = own.lerp(o, (z - own_z).sigmoid_()[:, :, None]), torch.logaddexp(own_z, z)
            for total, x in ((out, o), (lse, z)):
                if isinstance(part.rows, slice):
                    total[part.rows] = x
                else:
                    total.index_copy_(0, part.rows, x)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        require(not torch.is_grad_enabled(), "create_graph", True, "False: the gradient's own gradient is not known")
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        grad = grad.contiguous()
        for part in ctx.parts:
            qb, ob, zb, gb, kb, vb = _blocks(part, (q, out, lse, grad), (k, v))
            if part.real is not None:
                gb = gb.masked_fill_(part.is_padding, 0)
            d = _flash_backward(gb, qb, kb, vb, ob, zb, 0.0, part.is_causal, scale=ctx.scale)
            _add(dq, part.rows, _packed(part, d[0]))
            for total, x in ((dk, d[1]), (dv, d[2])):
                if part.is_causal:
                    _add(total, part.rows, _packed(part, x))
                else:
                    _add(total, part.key, x.transpose(1, 2).flatten(0, 1))
        return dq, dk, dv, None, None


def _blocks(part: _Part, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> list[Tensor]:
    """[T, heads, ...] -> [n, heads, length, ...] each."""
    rows = [*(_take(x, part.query) for x in queries), *(_take(x, part.key) for x in keys)]
    return [x.unflatten(0, (part.n, -1)).transpose(1, 2) for x in rows]


def _packed(part: _Part, x: Tensor) -> Tensor:
    x = x.transpose(1, 2).flatten(0, 1)
    return x if part.real is None else x.index_select(0, part.real)


def _take(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _add(total: Tensor, rows: slice | Tensor, x: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows] += x
    else:
        total.index_add_(0, rows, x)  # two prefixes may overlap


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.is_cuda and mask is not None:
        # with a mask CUDA has no fused kernel for grouped heads
        k, v, groups = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups > 1
    )


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    n, H, L, _ = q.shape
    groups = H // k.shape[1]
    q = q.unflatten(1, (-1, groups))
    k, v = k[:, :, None], v[:, :, None]
    score = (q @ k.transpose(-1, -2)) * scale
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    if softcap > 0:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~mask[:, :, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(score.dtype).view(-1, groups, 1, 1).expand(n, -1, -1, L, 1)
        score = torch.cat([score, sink], dim=-1)
    p = score.softmax(-1)[..., : k.shape[-2]]
    return (p.to(v.dtype) @ v).flatten(1, 2)
