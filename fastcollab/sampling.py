"""Sampling: the key of each row's random numbers, and one batched draw per forward."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from fastcollab import ops
from fastcollab.config import SamplingParams

MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def row_key(seed: int, step: int, uid: int, occurrence: int, sample: int) -> int:
    """Signed 64-bit key of one rollout: nothing about its place in a batch enters it."""
    key = 0
    for part in (seed, step, uid, occurrence, sample):
        key = _mix(key ^ _mix(part & MASK))
    return key - (1 << 64) if key >> 63 else key


def content_uid(value: Sequence[int] | str | int) -> int:
    """63-bit uid of a prompt: an int as it is, a text or ids by their hash (blake2b)."""
    if isinstance(value, int):
        return value
    data = value.encode() if isinstance(value, str) else b"".join(i.to_bytes(4, "little") for i in value)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


class Sampler:
    """Draws the next token of S rows under one SamplingParams."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def __call__(self, logits: torch.Tensor, plan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """logits [S, V] any float dtype -> id int64 [S] (-1: no finite logit), logprob fp32 [S], kept mass fp32 [S]."""
        p, n, device = self.params, len(logits), logits.device

        def full(value, dtype):
            return torch.full((n,), value, dtype=dtype, device=device)

        def move(array):
            return torch.from_numpy(array).to(device)

        return ops.sample(
            logits,
            full(p.temperature, torch.float32),
            full(p.top_k, torch.int32),
            full(p.top_p, torch.float32),
            full(p.min_p, torch.float32),
            move(plan.key),
            move(plan.position),
            move(plan.epoch),
        )
