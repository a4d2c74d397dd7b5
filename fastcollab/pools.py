"""Block pools: the paged K/V memory of one model, one pair of tensors per layer, and how much of it a budget buys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastcollab import ops
from fastcollab.config import parse_memory, require


class Layer(Protocol):
    """The widths that a layer's pages need (``model.LayerSpec``)."""

    kv_heads: int
    k_width: int
    v_width: int


class Pools:
    """K ``[num_blocks, block_size, kv_heads, k_width]`` and V ``[..., v_width]`` per layer, uninitialised.

    Attributes: ``k``, ``v`` (lists of tensors, by layer), ``num_blocks``, ``block_size``.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ):
        require(num_blocks >= 1, "num_blocks", num_blocks, ">= 1")
        require(block_size >= 1, "block_size", block_size, ">= 1")
        self.num_blocks, self.block_size = num_blocks, block_size

        def pages(kv_heads: int, width: int) -> Tensor:
            return torch.empty(num_blocks, block_size, kv_heads, width, dtype=dtype, device=device)

        self.k = [pages(layer.kv_heads, layer.k_width) for layer in layers]
        self.v = [pages(layer.kv_heads, layer.v_width) for layer in layers]
        self._all = self.k + self.v

    def copy(self, pairs: Tensor) -> None:
        """Copy whole blocks in every layer: pairs int64 [P, 2] of (source, destination), in order."""
        if len(pairs):
            ops.copy_blocks(self._all, pairs)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._all)


def bytes_per_block(layers: Iterable[Layer], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    return sum(layer.kv_heads * (layer.k_width + layer.v_width) for layer in layers) * block_size * dtype.itemsize


def plan_blocks(models: Iterable, kv_memory: str | int, block_size: int) -> list[int]:
    """Blocks of each model, in order, when all pools together fit in ``kv_memory``: the same number for every model.

    Equal numbers, because a row holds the same tokens in every model. ``models`` are ``Model`` objects (``layers``,
    ``dtype``, ``name``); ``ValueError`` if the budget buys no block.
    """
    sizes = {model.name: bytes_per_block(model.layers, block_size, model.dtype) for model in models}
    require(bool(sizes), "models", list(sizes), "at least one")
    require(block_size >= 1, "block_size", block_size, ">= 1")
    budget, one = parse_memory(kv_memory), sum(sizes.values())
    require(
        budget >= one,
        "kv_memory",
        f"{budget} bytes",
        f">= {one} bytes, one block of {block_size} tokens in each of {list(sizes)}",
    )
    return [budget // one] * len(sizes)
