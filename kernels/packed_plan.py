"""Plan of a packed-attention launch: block sizes, and which keys meet which queries, as index tensors.

The tables are made on the host, where the segments are, once per Segments and kept there: no kernel counts, no launch
waits. Tiles with most work come first, so that the last programs to finish are short ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastcollab.kernels.paged_plan import padded
from fastcollab.reference.packed import Segments


class Blocks(NamedTuple):
    """Sizes of one kernel's tiles. They depend on widths, dtype and device, never on the batch."""

    queries: int
    keys: int
    warps: int
    stages: int
    part: int = 0  # columns of a head multiplied at once; 0: all


@lru_cache
def blocks(kernel: str, dk: int, dv: int, dtype: torch.dtype, target: str) -> Blocks:
    """Block sizes of "forward", "dq" or "dkv" on "sm_80", "sm_90", "sm_100", "gfx942" or "cpu", the interpreter.

    The largest tiles of which nothing spills, vector or scalar register, in any of ``offline_cases``.
    """
    width = max(padded(dk), padded(dv))
    if target == "cpu":
        return Blocks(16, 16, 1, 1, 16 if width > 16 else 0)
    if dtype == torch.float32:
        tall = kernel == "dkv" and width <= 128 and target != "gfx942"
        # masks of columns spill on sm_80 where 8 warps leave a thread 128 registers
        cut = target == "sm_80" and (dk, dv) != (padded(dk), padded(dv))
        return Blocks(32, 16, 4 if cut else 8, 1, 32) if tall else Blocks(16, 32, 8, 1, 32)
    if target == "gfx942":
        narrow = {"forward": Blocks(128, 16, 8, 1), "dq": Blocks(128, 16, 8, 1), "dkv": Blocks(16, 64, 4, 1)}
        wide = {"forward": Blocks(64, 16, 8, 1), "dq": Blocks(32, 32, 4, 1), "dkv": Blocks(16, 32, 4, 1)}
        return (narrow if width <= 128 else wide)[kernel]
    return {
        "forward": (Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 3), Blocks(64, 32, 8, 2)),
        "dq": (Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2), Blocks(32, 64, 8, 1)),
        "dkv": (Blocks(32, 128, 8, 2), Blocks(32, 64, 8, 2), Blocks(32, 32, 8, 1)),
    }[kernel][(width > 64) + (width > 128)]


def query_tiles(segments: Segments, size: int, device: torch.device) -> Tensor:
    """int64 [tiles, 5]: start and length of the tile's segment, start and length of its prefix, first query's index."""

    def make() -> tuple[Tensor]:
        rows, work = [], []
        for start, length, prefix, depth in _spans(segments):
            for first in range(0, length, size):
                rows.append((start, length, prefix, depth, first))
                work.append(depth + min(first + size, length))
        return (_sorted(rows, work, 5),)

    return _kept(segments, ("query_tiles", size), device, make)[0]


def key_tiles(segments: Segments, num_tokens: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tiles of keys that all the same segments see, and for each tile the visits of those segments' queries.

    tiles int64 [tiles, 4]: packed index of the first key, number of keys, range of its visits. Every token is in one.
    visits int64 [visits, 4]: start and length of the segment, position of its first query, and of the tile's first key.
    """

    def make() -> tuple[Tensor, Tensor]:
        readers: dict[int, list[tuple[int, ...]]] = {}
        cuts, spans = {0, num_tokens}, _spans(segments)
        for start, length, prefix, depth in spans:
            cuts |= {start, start + length, prefix, prefix + depth} if depth else {start, start + length}
        cuts = sorted(cuts)
        at = {cut: i for i, cut in enumerate(cuts)}
        for start, length, prefix, depth in spans:
            for i in range(at[prefix], at[prefix + depth]) if depth else ():
                readers.setdefault(i, []).append((start, length, depth, cuts[i] - prefix))
            for i in range(at[start], at[start + length]):
                readers.setdefault(i, []).append((start, length, depth, depth + cuts[i] - start))
        rows, work, visits = [], [], []
        for i in range(len(cuts) - 1):
            for first in range(cuts[i], cuts[i + 1], size):
                begin, skipped = len(visits), first - cuts[i]
                visits += [(*visit, position + skipped) for *visit, position in readers.get(i, ())]
                rows.append((first, min(size, cuts[i + 1] - first), begin, len(visits)))
                work.append(sum(depth + length - max(depth, p) for _, length, depth, p in visits[begin:]))
        return _sorted(rows, work, 4), torch.tensor(visits, dtype=torch.int64).view(-1, 4)

    return _kept(segments, ("key_tiles", size, num_tokens), device, make)


def covers(segments: Segments, num_tokens: int) -> bool:
    """Whether every token is in a segment."""
    return int(segments.length.sum()) == num_tokens


def _spans(segments: Segments) -> list[list[int]]:
    spans = torch.stack([segments.start, segments.length, segments.prefix_start, segments.prefix_length], 1)
    return [span for span in spans.tolist() if span[1]]


def _sorted(rows: list[tuple[int, ...]], work: list[int], width: int) -> Tensor:
    order = torch.tensor(work, dtype=torch.int64).argsort(descending=True, stable=True)
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)[order]


def _kept(segments: Segments, name: tuple, device: torch.device, make) -> tuple[Tensor, ...]:
    key = (*name, device)
    if key not in segments._cache:
        segments._cache[key] = tuple(table.to(device) for table in make())
    return segments._cache[key]
