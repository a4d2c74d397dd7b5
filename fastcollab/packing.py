"""Packing: rollouts to micro-batches without padding, a group's prompt stored once, one target per trained token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastcollab.reference.packed import Segments
from fastcollab.types import Rollout


@dataclass
class Item:
    """One rollout as the loss sees it."""

    rollout: Rollout
    mask: np.ndarray  # bool [len(ids)], the trained tokens
    advantage: float
    old_logprob: np.ndarray  # fp32 [len(ids)], or MInTRL's anchor: what the log-ratio is taken against
    ref_logprob: np.ndarray | None = None  # fp32 [len(ids)]
    kept: bool = True  # False: no reward, or truncated and masked by option; it counts in no denominator

    @property
    def used(self) -> int:
        """Leading response tokens up to the last trained one: what comes after it needs no forward."""
        trained = np.flatnonzero(self.mask)
        return int(trained[-1]) + 1 if len(trained) else 0


@dataclass
class MicroBatch:
    """T packed tokens, N trained targets of S rollouts."""

    input_ids: torch.Tensor  # int64 [T]
    position_ids: torch.Tensor  # int64 [T]
    segments: Segments
    hidden_index: torch.Tensor  # int64 [N]: the log-prob of token t comes from the hidden state of t - 1
    target: torch.Tensor  # int64 [N]
    segment_ids: torch.Tensor  # int64 [N], rollout of each target
    old_logprob: torch.Tensor  # fp32 [N]
    ref_logprob: torch.Tensor | None  # fp32 [N]
    advantage: torch.Tensor  # fp32 [S]
    items: list[Item]


def micro_batches(items: Sequence[Item], budget: int, device: torch.device | str = "cpu") -> Iterator[MicroBatch]:
    """Packs of at most ``budget`` tokens (a single longer rollout stands alone), in order.

    A prompt is stored once per pack; a group that is split over two packs repeats it.
    """
    pack: list[Item] = []
    size, shared = 0, None
    for item in items:
        used = item.used
        if used == 0:
            continue
        prompt = (item.rollout.group, item.rollout.prompt_ids)
        own = used - 1 + (len(item.rollout.prompt_ids) if prompt != shared else 0)
        if pack and size + own > budget:
            yield _pack(pack, device)
            pack, size = [], 0
            own = used - 1 + len(item.rollout.prompt_ids)
        pack.append(item)
        size, shared = size + own, prompt
    if pack:
        yield _pack(pack, device)


def _pack(items: list[Item], device: torch.device | str) -> MicroBatch:
    ids, positions, spans, hidden, target, owner, old, ref = [], [], [], [], [], [], [], []
    shared, prompt_start = None, 0
    for s, item in enumerate(items):
        r, used = item.rollout, item.used
        length = len(r.prompt_ids)
        if (r.group, r.prompt_ids) != shared:
            shared, prompt_start = (r.group, r.prompt_ids), len(ids)
            ids += r.prompt_ids
            positions += range(length)
            spans.append((prompt_start, length, 0, 0))
        start = len(ids)
        if used > 1:
            ids += r.ids[: used - 1]
            positions += range(length, length + used - 1)
            spans.append((start, used - 1, prompt_start, length))
        trained = np.flatnonzero(item.mask)
        hidden.append(np.where(trained == 0, prompt_start + length - 1, start + trained - 1))
        target.append(np.asarray(r.ids, np.int64)[trained])
        owner.append(np.full(len(trained), s))
        old.append(item.old_logprob[trained])
        if item.ref_logprob is not None:
            ref.append(item.ref_logprob[trained])

    def flat(parts, dtype):
        return torch.as_tensor(np.concatenate(parts), dtype=dtype, device=device)

    return MicroBatch(
        input_ids=torch.tensor(ids, device=device),
        position_ids=torch.tensor(positions, device=device),
        segments=Segments(*torch.tensor(spans, dtype=torch.int64).T.contiguous()),
        hidden_index=flat(hidden, torch.int64),
        target=flat(target, torch.int64),
        segment_ids=flat(owner, torch.int64),
        old_logprob=flat(old, torch.float32),
        ref_logprob=flat(ref, torch.float32) if ref else None,
        advantage=torch.tensor([i.advantage for i in items], dtype=torch.float32, device=device),
        items=items,
    )
