"""paged_attention in Triton: accuracy against fp64, bits of a row alone, pieces, shared prompts, strides, errors.

Without a device the kernels run in Triton's interpreter, with pieces of 32 positions instead of 512.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from interpreter import repair  # noqa: E402
from test_ops import BAD, make_case  # noqa: E402

from fastcollab import ops  # noqa: E402
from fastcollab.kernels import paged_attention as kernels  # noqa: E402
from fastcollab.kernels import paged_plan  # noqa: E402

repair()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS, TOKENS = [1, 40, 70, 20, 33], [1, 3, 18, 0, 1]  # a row of each kind; 33: its own key opens a piece
real_blocks = paged_plan.blocks


@pytest.fixture(autouse=True)
def small_blocks_and_nan_memory(monkeypatch):
    def small(*of):
        return real_blocks(*of)._replace(short=16, tile=32, limit=max(32, of[0]), keys=16, split=32)

    monkeypatch.setattr(paged_plan, "blocks", small)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def run(case, impl="triton", dtype=None, **settings):
    """The operator on copies of the case's tensors, floats cast to ``dtype``; returns (out, the copies)."""

    def copy(x):
        if not isinstance(x, torch.Tensor):
            return x
        x = x.to(DEVICE, copy=True)
        return x.to(dtype) if dtype and x.is_floating_point() else x

    args = {name: copy(x) for name, x in {**case, **settings}.items()}
    with ops.use_impl(impl):
        return ops.paged_attention(**args), args


def check(case, **settings):
    """The accuracy rule, exact appends, nothing else touched. -> the output"""
    truth = run(case, "reference", torch.float64, **settings)[0]
    today, used_today = run(case, "reference", **settings)
    ours, used = run(case, **settings)
    assert ours.dtype == case["q"].dtype and ours.shape == truth.shape
    for name in ("k_pool", "v_pool"):
        torch.testing.assert_close(used[name], used_today[name], rtol=0, atol=0, equal_nan=True)
        assert used[name].isnan().any()
    error, allowed = (ours.double() - truth).abs().max(), (today.double() - truth).abs().max()
    assert error <= 2 * allowed + 2e-7 * truth.abs().max()
    return ours


def part(case, row, first=0, last=None):
    """The case of one row alone, its new tokens first .. last (kv_len as it is after them)."""
    start, stop = case["q_indptr"][row : row + 2].tolist()
    end = stop if last is None else start + last
    mine = {name: case[name][start + first : end] for name in ("q", "k", "v", "slot_mapping")}
    mine |= {"block_table": case["block_table"][row : row + 1], "kv_len": case["kv_len"][row : row + 1] - (stop - end)}
    return {**case, **mine, "q_indptr": torch.tensor([0, end - start - first], dtype=torch.int32)}


@pytest.mark.parametrize(
    "heads, kv_heads, dk, dv, block, window, softcap, with_sinks, dtype",
    [
        (1, 1, 8, 8, 4, 0, 0.0, False, BF16),
        (2, 1, 16, 24, 16, 0, 0.0, True, FP32),
        (3, 1, 80, 48, 1, 7, 0.0, False, BF16),
        (2, 1, 24, 24, 16, 0, 30.0, False, FP32),
        (4, 2, 64, 64, 16, 40, 50.0, True, FP16),
        (2, 1, 17, 128, 3, 1, 0.0, False, FP32),
        (40, 1, 8, 5, 16, 5, 0.0, True, BF16),
    ],
)
def test_as_exact_as_torch(heads, kv_heads, dk, dv, block, window, softcap, with_sinks, dtype):
    lengths, tokens = (LENGTHS, TOKENS) if heads < 32 else ([40, 33], [1, 2])
    case = make_case(lengths, tokens, heads, kv_heads, dk, dv, block, dtype)
    sinks = torch.linspace(-1, 2, heads).to(dtype) if with_sinks else None
    check(case, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize("window", [15, 17, 32])
def test_windows_at_the_edges_of_steps_and_pieces(window):
    check(make_case([64, 65, 66], [1, 1, 3], 2, 1, 16, 16, 16), window=window)


@pytest.mark.parametrize("q, pool", [(FP32, BF16), (BF16, FP32)], ids=str)
def test_pools_of_another_dtype(q, pool):
    case = make_case([40, 3], [2, 3], 2, 1, 16, 16, 16, q)
    half = {name: case[name].to(pool) for name in ("k_pool", "v_pool")}
    ours, used = run({**case, **half})
    today, used_today = run({**case, **half}, "reference")
    torch.testing.assert_close(ours, today, rtol=1e-5 if q == FP32 else 0.02, atol=1e-6 if q == FP32 else 0.01)
    torch.testing.assert_close(used["k_pool"], used_today["k_pool"], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [0, 33])
def test_bits_do_not_depend_on_neighbours(window):
    case = make_case(LENGTHS, TOKENS, 2, 1, 24, 24, 16)
    whole, _ = run(case, window=window)
    for row in range(len(LENGTHS)):
        mine = slice(*case["q_indptr"][row : row + 2].tolist())
        assert torch.equal(run(part(case, row), window=window)[0], whole[mine])


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("tokens, pieces", [(6, [1] * 6), (6, [4, 2]), (40, [23, 17])], ids=str)
def test_bits_do_not_depend_on_how_tokens_are_split(tokens, pieces, window):
    case = make_case([68], [tokens], 2, 1, 24, 24, 16)  # across the edge of a piece at 64; 40: never in pieces
    settings = dict(window=window, sinks=torch.tensor([0.1, 2.0]))
    whole, _ = run(case, **settings)
    done, parts, pools = 0, [], {}
    for n in pieces:
        out, used = run({**part(case, 0, done, done + n), **pools}, **settings)
        pools = {name: used[name] for name in ("k_pool", "v_pool")}
        parts.append(out)
        done += n
    assert torch.equal(torch.cat(parts), whole)


def test_rows_with_one_prompt_read_it_once(monkeypatch):
    case = make_case([40, 39, 37, 50, 33], [1, 1, 2, 1, 1], 2, 1, 16, 16, 4)
    table = case["block_table"].clone()
    table[[1, 3, 4], :8] = table[0, :8]  # positions 0 .. 31, one piece; row 2 has two tokens
    for name in ("k_pool", "v_pool"):  # a copy for each row in the unshared case
        case[name][case["block_table"][[1, 3, 4], :8].long()] = case[name][table[0, :8].long()]
    reads, attend = [], kernels._attend
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "_attend", lambda *args: (reads.append(1), attend(*args)))
    apart, count = run(case)[0], len(reads)
    together = run(case, block_table=table)[0]
    assert torch.equal(together, apart)
    assert DEVICE != "cpu" or (count, len(reads) - count) == (10, 7)


def test_strided_views_and_pools():
    case = make_case([20, 5], [20, 1], 4, 2, 16, 16, 4)
    fused = torch.cat([case["q"], case["k"], case["v"]], 1)  # [T, H + 2 Hkv, D], as one projection gives it
    q, k, v = fused.transpose(0, 1).contiguous().to(DEVICE).transpose(0, 1).split([4, 2, 2], 1)
    wide = torch.stack([case["k_pool"], case["v_pool"]]).permute(1, 2, 3, 0, 4).contiguous().to(DEVICE)
    pools = wide.permute(3, 0, 1, 2, 4)  # K and V of a head side by side
    expected, used = run(case)
    rest = {name: used[name] for name in ("slot_mapping", "block_table", "q_indptr", "kv_len", "scale")}
    with ops.use_impl("triton"):
        out = ops.paged_attention(q, k, v, pools[0], pools[1], **rest)
    assert not q.is_contiguous() and torch.equal(out, expected)
    torch.testing.assert_close(pools[0], used["k_pool"], rtol=0, atol=0, equal_nan=True)


def test_blocks_behind_the_window_may_be_gone():
    case = make_case([100], [1], 2, 1, 16, 16, 16)
    gone = case["block_table"].clone()
    gone[0, :5] = -1  # positions 0..79; the query at 99 sees 90..99
    assert torch.equal(run(case, window=10, block_table=gone)[0], run(case, window=10)[0])


def test_offsets_beyond_int32(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    case = make_case([6, 7], [1, 2], 2, 1, 8, 8, 4, FP16)
    blocks = len(case["k_pool"])
    far = torch.empty((blocks - 1) * 2**29 + 64, dtype=FP16, device=DEVICE)  # touched here and there only
    pools = [far.as_strided((blocks, 4, 1, 8), (2**29, 16, 8, 1), offset) for offset in (0, 8)]
    assert far.numel() > 2**31
    for pool, name in zip(pools, ("k_pool", "v_pool"), strict=True):
        pool.copy_(case[name])
    expected, used = run(case)
    rest = {name: x for name, x in used.items() if not name.endswith("pool")}
    with ops.use_impl("triton"):
        assert torch.equal(ops.paged_attention(k_pool=pools[0], v_pool=pools[1], **rest), expected)
    torch.testing.assert_close(pools[1].cpu(), used["v_pool"].cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("group", [1, 3, 40])
def test_plan_has_room_for_every_row(group):
    g = torch.Generator().manual_seed(group)
    b = paged_plan.blocks(group, 64, 64, BF16, "sm_90")
    for trial in range(50):
        tokens = torch.randint(0, (3, 60)[trial % 2], (7,), generator=g).tolist()
        p = paged_plan.plan(b, sum(tokens), 7, 256, 0, group, 2)
        begin = [sum(tokens[:r]) for r in range(8)]
        tile = [at * group // b.tile + r for r, at in enumerate(begin)]
        slot = [min(at * group, r * b.limit) for r, at in enumerate(begin)]
        for r, n in enumerate(tokens):
            assert tile[r + 1] - tile[r] >= -(-n * group // b.tile)
            assert n * group > b.limit or slot[r + 1] - slot[r] >= n * group
        assert tile[-1] == p.tiles and slot[-1] == p.slots and p.splits == 8
    assert paged_plan.plan(b, 9, 7, 32, 0, group, 2).merge == 0
    assert paged_plan.plan(b, 9, 7, 4096, 2, group, 2).splits < 4


def test_no_rows_and_no_tokens():
    case = make_case([4, 4], [0, 0], 2, 1, 8, 8, 4)
    assert run(case)[0].shape == (0, 2, 8)


BAD_HERE = {name: BAD[name] for name in ("heads", "k", "v")} | {
    "q_indptr": (dict(q_indptr=torch.zeros(3, dtype=torch.int32)), r"q_indptr: got \[3\], need shape \[2\]"),
    "index type": (dict(kv_len=torch.tensor([5])), "kv_len: got torch.int64, need torch.int32"),
    "types": (dict(k=torch.zeros(1, 2, 8, dtype=BF16)), "k: got torch.bfloat16, need torch.float32"),
    "stride": (dict(q=torch.zeros(1, 8, 2).transpose(1, 2)), "q: got 2, need stride 1"),
    "window": (dict(window=-1), "window: got -1, need >= 0"),
    "sinks": (dict(sinks=torch.zeros(3)), r"sinks: got \[3\], need shape \[2\]"),
}


@pytest.mark.parametrize("name", BAD_HERE)
def test_bad_input_names_the_value(name):
    change, message = BAD_HERE[name]
    with pytest.raises(ValueError, match=message):
        run({**make_case([5], [1], 2, 2, 8, 8, 4), **change})
