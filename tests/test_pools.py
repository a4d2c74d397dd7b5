"""Pools: sizes, budgets and block copies."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from fastcollab.model import Model
from fastcollab.pools import Pools, bytes_per_block, parse_memory, plan_blocks


@pytest.mark.parametrize(
    "text, size",
    [
        ("1GiB", 2**30),
        ("512 MiB", 2**29),
        ("2.5GB", 2_500_000_000),
        ("64", 64),
        (4096, 4096),
        ("1kB", 1000),
        ("7KiB", 7168),
    ],
)
def test_parse_memory(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1GiBs", "0", 0, "1.5.2GB", None, "1 gib", 0.5])
def test_parse_memory_refuses(text):
    with pytest.raises(ValueError, match="kv_memory: got .*, need a positive size"):
        parse_memory(text)


def test_blocks_are_planned_equally_and_copied():
    models = [Model("a", tiny_model("deepseek_v3")), Model("b", tiny_model("qwen3"))]
    sizes = [bytes_per_block(m.layers, 16, m.dtype) for m in models]
    assert sizes == [3 * 4 * 28 * 16 * 4, 3 * 2 * 16 * 16 * 4]
    assert plan_blocks(models, 10 * sum(sizes) + 5, 16) == [10, 10]
    with pytest.raises(
        ValueError, match=r"kv_memory: got '.* bytes', need >= .* one block of 16 tokens in each of \['a', 'b'\]"
    ):
        plan_blocks(models, sum(sizes) - 1, 16)
    pools = Pools(models[0].layers, 3, 2, torch.float32)
    assert pools.nbytes == 3 * bytes_per_block(models[0].layers, 2, torch.float32)
    for n, t in enumerate(pools.k + pools.v):
        t.copy_(torch.arange(t.numel()).view_as(t) + n)
    before = [t.clone() for t in pools.k + pools.v]
    pools.copy(torch.tensor([[0, 2], [2, 1]]))
    for old, new in zip(before, pools.k + pools.v, strict=True):
        assert torch.equal(new[0], old[0]) and torch.equal(new[1], old[0]) and torch.equal(new[2], old[0])
    pools.copy(torch.empty(0, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_blocks: got 0"):
        Pools(models[0].layers, 0, 2, torch.float32)
