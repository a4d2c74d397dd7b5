"""The problems of generation: attention over the paged cache, the hand-off beside decode rows, sampling, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from fastcollab import ops
from fastcollab.bench import op_baselines as peers
from fastcollab.bench.op_cases import OURS, Case, Outputs, Problem
from fastcollab.reference import attention as reference

BLOCK = 16  # tokens of a cache block
FLASH_BLOCK = 256
LAGS = (1, 4, 16, 64)  # tokens that the handed-off row ingests; with 1 it is a decode row


class Cache:
    """K and V of some rows in shuffled pages, ``cached`` tokens each, with room for the longest lag."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.rows, self.cached, self.heads, self.kv_heads, self.width = case.shape.values()
        self.device, self.dtype, self.scale = device, case.dtype, self.width**-0.5
        pages = -(-(self.cached + max(LAGS)) // BLOCK)
        self.table = torch.randperm(self.rows * pages, device=device).view(self.rows, pages)
        shape = (self.rows * pages, BLOCK, self.kv_heads, self.width)
        self.pools = [torch.randn(shape, device=device).to(case.dtype) for _ in range(2)]

    def step(self, counts: Sequence[int]) -> Step:
        """A call's tokens, where row r brings ``counts[r]`` new ones after its cached ones."""
        return Step(self, list(counts))

    def read_bytes(self, counts: Sequence[int]) -> float:
        """K and V of every row once, up to its last position."""
        tokens = self.rows * self.cached + sum(counts)
        return 2.0 * tokens * self.kv_heads * self.width * self.pools[0].itemsize

    def flops(self, counts: Sequence[int]) -> float:
        pairs = sum(n * self.cached + n * (n + 1) / 2 for n in counts)
        return 4.0 * pairs * self.heads * self.width


class Step:
    """New tokens of all rows: the arguments of one attention call, ours, the peers' and the reference's."""

    def __init__(self, cache: Cache, counts: list[int]) -> None:
        device, n = cache.device, torch.tensor(counts, device=cache.device)
        self.cache, self.counts = cache, counts
        self.indptr = torch.zeros(cache.rows + 1, dtype=torch.int32, device=device)
        self.indptr[1:] = n.cumsum(0)
        row = torch.arange(cache.rows, device=device).repeat_interleave(n)
        position = cache.cached + torch.arange(len(row), device=device) - self.indptr[row]
        self.slots = cache.table[row, position // BLOCK] * BLOCK + position % BLOCK
        self.kv_len = (cache.cached + n).int()
        self.q, self.k, self.v = (
            torch.randn(len(row), heads, cache.width, device=device).to(cache.dtype)
            for heads in (cache.heads, cache.kv_heads, cache.kv_heads)
        )

    def ours(self) -> Callable[[], Tensor]:
        where = self.slots.int(), self.cache.table.int(), self.indptr, self.kv_len
        return partial(ops.paged_attention, self.q, self.k, self.v, *self.cache.pools, *where, self.cache.scale)

    def truth(self) -> Outputs:
        """The reference in fp32, on pages of its own."""
        q, k, v, *pools = (x.float().clone() for x in (self.q, self.k, self.v, *self.cache.pools))
        where = self.slots.int(), self.cache.table.int(), self.indptr, self.kv_len
        return (reference.paged_attention(q, k, v, *pools, *where, self.cache.scale),)

    def row_by_row(self) -> Callable[[], Tensor]:
        lengths = [self.cache.cached + n for n in self.counts]
        return partial(peers.rows_sdpa, self.q, self.k, self.v, *self.cache.pools, self.slots, self.cache.table,
                       self.counts, lengths, self.cache.scale)  # fmt: skip

    def all_rows(self) -> Callable[[], Tensor]:
        """For decode steps."""
        return partial(peers.batch_sdpa, self.q, self.k, self.v, *self.cache.pools, self.slots, self.cache.table,
                       self.cache.cached + 1, self.cache.scale)  # fmt: skip

    def contiguous(self) -> Callable[[], Tensor]:
        """For decode steps: the KV, the new token included, lies ready in one piece; nothing is appended."""
        keys, values = (
            torch.cat([pool[self.cache.table].flatten(1, 2)[:, : self.cache.cached], new[:, None]], 1).transpose(1, 2)
            for pool, new in zip(self.cache.pools, (self.k, self.v), strict=True)
        )
        return partial(peers.contiguous_sdpa, self.q, keys.contiguous(), values.contiguous(), self.cache.scale)

    def flash(self) -> Callable[[], Tensor]:
        """For decode steps: flash-attn, which appends and attends too, over the same KV in its larger pages."""
        c = self.cache
        pages = -(-(c.cached + 1) // FLASH_BLOCK)
        table = torch.randperm(c.rows * pages, device=c.device).view(c.rows, pages)
        pools = []
        for pool in c.pools:
            rows = pool[c.table].flatten(1, 2)[:, : c.cached]
            padded = rows.new_zeros(c.rows, pages * FLASH_BLOCK, c.kv_heads, c.width)
            padded[:, : c.cached] = rows
            larger = rows.new_empty(c.rows * pages, FLASH_BLOCK, c.kv_heads, c.width)
            larger[table.flatten()] = padded.view(-1, FLASH_BLOCK, c.kv_heads, c.width)
            pools.append(larger)
        cached = torch.full((c.rows,), c.cached, dtype=torch.int32, device=c.device)
        return partial(peers.flash_decode(c.scale), self.q, self.k, self.v, *pools, table.int(), cached)


def paged_attention(case: Case, device: torch.device) -> Iterator[Problem]:
    """One decode step of all rows."""
    cache = Cache(case, device)
    counts = [1] * cache.rows
    step = cache.step(counts)
    calls = {
        OURS: step.ours(),
        "row by row: gather + SDPA": step.row_by_row(),
        "all rows: gather + SDPA": step.all_rows(),
        "ideal: SDPA, KV in one piece": step.contiguous(),
    }
    missing = {}
    if reason := peers.no_flash(device, case.dtype):
        missing["flash-attn"] = reason
    else:
        calls["flash-attn"] = step.flash()
    yield Problem(case, "forward", cache.flops(counts), cache.read_bytes(counts), step.truth, calls, missing)


def handoff(case: Case, device: torch.device) -> Iterator[Problem]:
    """One row ingests its lag beside decode rows, in one call: every lag against the pure decode call (lag 1)."""
    cache = Cache(case, device)
    steps = {lag: cache.step([1] * (cache.rows - 1) + [lag]) for lag in LAGS}
    calls, view = {}, {}
    for lag, step in steps.items():
        for name, call in ((OURS, step.ours()), ("row by row: gather + SDPA", step.row_by_row())):
            calls[f"{name}, lag {lag}"] = call
            view[f"{name}, lag {lag}"] = partial(_only, LAGS.index(lag))
    yield Problem(case, "forward", 0.0, cache.read_bytes([1] * cache.rows),
                  lambda: [x for step in steps.values() for x in step.truth()], calls, {}, view)  # fmt: skip


def _only(index: int, result: Tensor) -> Outputs:
    """A result to be compared with one of the lags' truths."""
    return [result if i == index else None for i in range(len(LAGS))]


def sample(case: Case, device: torch.device) -> Iterator[Problem]:
    """Checked by the log-prob of the drawn id: what is drawn differs, for each has its own noise."""
    rows, vocab, top_k = case.shape.values()
    top_p = 0.95 if top_k else 1.0
    logits = (3 * torch.randn(rows, vocab, device=device)).to(case.dtype)
    one = torch.ones(rows, device=device)
    law = (one, torch.full((rows,), top_k, dtype=torch.int32, device=device), one * top_p, one * 0)
    keys = (torch.arange(rows, device=device), one.int(), one.int())
    calls = {
        OURS: partial(ops.sample, logits, *law, *keys),
        "softmax + multinomial": partial(peers.multinomial, logits, top_k, top_p),
        "Gumbel argmax": partial(peers.gumbel_argmax, logits, top_k, top_p),
    }

    def error(result: Outputs) -> Outputs:
        id, logprob = result[:2]
        return (logprob - logits.double().log_softmax(-1).gather(1, id[:, None])[:, 0],)

    moved = float(logits.nbytes)
    yield Problem(case, "forward", 0.0, moved, lambda: (one * 0,), calls, {}, dict.fromkeys(calls, error))


def copy_blocks(case: Case, device: torch.device) -> Iterator[Problem]:
    """Copy-on-write of some blocks in every layer's pools."""
    count, blocks, pairs, kv_heads, width = case.shape.values()
    pools = [torch.randn(blocks, BLOCK, kv_heads, width, device=device).to(case.dtype) for _ in range(count)]
    source, destination = torch.randperm(blocks, device=device)[: 2 * pairs].view(2, pairs)
    calls = {
        OURS: partial(ops.copy_blocks, pools, torch.stack([source, destination], 1)),
        "index_copy_": partial(peers.index_copy, pools, source, destination),
    }

    def copied(_: None) -> Outputs:
        """The destinations, which are wiped for the next call."""
        found = [pool[destination] for pool in pools]
        for pool in pools:
            pool[destination] = 0
        return found

    moved = 2.0 * count * pairs * pools[0][0].nbytes
    view = dict.fromkeys(calls, copied)
    yield Problem(case, "forward", 0.0, moved, lambda: [pool[source] for pool in pools], calls, {}, view)
