"""Sizes of a paged-attention launch, all of them known on the host: block sizes, splits, workspace and grid."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

LOG2E = 1.4426950408889634
APPEND = 16  # tokens that one program appends


class Blocks(NamedTuple):
    """Block sizes of one launch. They depend on the heads, the dtype and the device, never on the batch."""

    short: int  # queries (tokens x query heads of a kv head) of a tile, in a row with no more than these
    tile: int  # the same in a row with more
    keys: int  # keys of a step, aligned to absolute position
    split: int  # positions that one program reads at most in a row of up to `limit` queries; a multiple of `keys`
    limit: int  # rows with more queries are never split: they have enough tiles
    part: int  # columns of a key multiplied at once
    warps: int
    stages: int


@lru_cache
def blocks(group: int, dk: int, dv: int, dtype: torch.dtype, target: str) -> Blocks:
    """Block sizes for ``group`` query heads per kv head, widths dk and dv, on "sm_80", "sm_90", "sm_100" or "gfx942".

    ``short`` holds at least 4 tokens where that fits, so that rows with an equal prompt can be read together.
    """
    width, fp32 = max(padded(dk), padded(dv)), dtype == torch.float32
    hopper = target in ("sm_90", "sm_100")
    tile = 16 if fp32 else 64 if hopper and width <= 128 else 32
    keys = 16 if fp32 or target == "gfx942" else max(16, min(64 if hopper else 32, 4096 // width))
    warps = 4 if width <= 128 and not fp32 else 8
    stages = 3 if hopper and warps == 4 else 1 if target == "gfx942" and warps == 8 else 2
    short = min(tile, max(16, 1 << (4 * group - 1).bit_length()))
    part = 1024 if not fp32 else 16 if target == "sm_100" else 32  # 32 spills there
    return Blocks(short, tile, keys, 512, max(tile, group), part, warps, stages)


def padded(width: int) -> int:
    """The width of a head in registers: a power of two that a matrix unit takes."""
    return max(16, 1 << (width - 1).bit_length())


@lru_cache
def target_of(device: torch.device) -> str:
    """The target whose block sizes this device takes."""
    if torch.version.hip:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 8
    return "sm_80" if major < 9 else "sm_90" if major == 9 else "sm_100"


class Plan(NamedTuple):
    """Upper bounds from shapes alone; programs beyond the real work exit at once."""

    tiles: int  # tiles of queries, over all rows
    splits: int  # pieces of a row
    slots: int  # queries of rows that may be split
    attend: int  # programs of the attention kernel
    merge: int  # programs of the merge kernel; 0 where no row can have two pieces


def plan(b: Blocks, tokens: int, rows: int, capacity: int, window: int, group: int, kv_heads: int) -> Plan:
    """``capacity``: positions that a row of the block table has room for."""
    tiles = tokens * group // b.tile + rows
    span = capacity
    if window:  # what the queries of one split row see together
        span = min(span, window + b.limit // group - 1)
    splits = max(1, -(-capacity // b.split))
    if span < capacity:
        splits = min(splits, -(-(span - 1) // b.split) + 1)
    slots = min(tokens * group, rows * b.limit)
    attend = (splits * tiles + -(-tokens // APPEND)) * kv_heads
    return Plan(tiles, splits, slots, attend, slots * kv_heads if splits > 1 else 0)
