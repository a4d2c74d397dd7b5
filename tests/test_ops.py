"""Operators of the KV cache: accuracy against fp64, bits independent of the batch, NaN slots, errors, dispatch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastcollab import ops
from fastcollab.ops import dispatch
from fastcollab.reference import attention
from fastcollab.reference.packed import Segments

native = pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))
IMPLS = ["reference", pytest.param("native", marks=native)]


def make_case(lengths, tokens, heads, kv_heads, dk, dv, block, dtype=torch.float32, seed=0):
    """Rows of the given lengths with their last ``tokens`` still to append; every unwritten slot is NaN."""
    g = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block) for length in lengths]
    free = torch.randperm(sum(blocks) + 2, generator=g).tolist()
    table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    k_pool = torch.full((len(free), block, kv_heads, dk), torch.nan, dtype=dtype)
    v_pool = torch.full((len(free), block, kv_heads, dv), torch.nan, dtype=dtype)
    q, k, v, slots, indptr = [], [], [], [], [0]
    for row, (length, new) in enumerate(zip(lengths, tokens, strict=True)):
        table[row, : blocks[row]] = torch.tensor([free.pop() for _ in range(blocks[row])], dtype=torch.int32)
        at = torch.arange(length)
        slot = table[row].long()[at // block] * block + at % block
        keys = torch.randn(length, kv_heads, dk, generator=g).to(dtype)
        values = torch.randn(length, kv_heads, dv, generator=g).to(dtype)
        old = slot[: length - new]
        k_pool[old // block, old % block] = keys[: length - new]
        v_pool[old // block, old % block] = values[: length - new]
        q.append(torch.randn(new, heads, dk, generator=g).to(dtype))
        k.append(keys[length - new :])
        v.append(values[length - new :])
        slots.append(slot[length - new :].int())
        indptr.append(indptr[-1] + new)
    return dict(
        q=torch.cat(q), k=torch.cat(k), v=torch.cat(v), k_pool=k_pool, v_pool=v_pool,
        slot_mapping=torch.cat(slots), block_table=table, q_indptr=torch.tensor(indptr, dtype=torch.int32),
        kv_len=torch.tensor(lengths, dtype=torch.int32), scale=dk**-0.5,
    )  # fmt: skip


def run(case, impl="native", dtype=None, **settings):
    """The operator on copies of the case's tensors, floats cast to ``dtype``; returns (out, the copies)."""

    def copy(x):
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(dtype, copy=True) if dtype and x.is_floating_point() else x.clone()

    args = {name: copy(x) for name, x in {**case, **settings}.items()}
    with ops.use_impl(impl):
        return ops.paged_attention(**args), args


SHAPES = [  # heads, kv heads, Dk, Dv, block, window, softcap, sinks
    (1, 1, 8, 8, 4, 0, 0.0, False),
    (2, 1, 16, 24, 16, 0, 0.0, True),
    (3, 1, 80, 48, 4, 7, 0.0, False),
    (4, 2, 24, 24, 16, 0, 30.0, False),
    (6, 2, 64, 64, 16, 40, 50.0, True),
    (8, 1, 64, 128, 4, 1, 0.0, False),
    (4, 4, 128, 64, 16, 64, 0.0, False),
    (2, 2, 256, 256, 16, 0, 0.0, True),
    (16, 2, 17, 5, 3, 0, 0.0, False),
    (130, 1, 8, 16, 16, 5, 0.0, False),
]
LENGTHS, TOKENS = [1, 17, 150, 64, 33, 65], [1, 17, 70, 0, 1, 2]


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_native_is_as_exact_as_torch(shape, dtype):
    heads, kv_heads, dk, dv, block, window, softcap, with_sinks = shape
    case = make_case(LENGTHS, TOKENS, heads, kv_heads, dk, dv, block, dtype)
    sinks = torch.linspace(-1, 2, heads).to(dtype) if with_sinks else None
    settings = dict(window=window, softcap=softcap, sinks=sinks)
    truth = run(case, "reference", torch.float64, **settings)[0]
    today, used_today = run(case, "reference", **settings)
    ours, used = run(case, "native", **settings)
    assert ours.dtype == dtype and ours.shape == (sum(TOKENS), heads, dv)
    for name in ("k_pool", "v_pool"):  # appended, and nothing else touched
        torch.testing.assert_close(used[name], used_today[name], rtol=0, atol=0, equal_nan=True)
        assert used[name].isnan().any()
    error, allowed = (ours.double() - truth).abs().max(), (today.double() - truth).abs().max()
    assert error <= 2 * allowed + 2e-7 * truth.abs().max()


@pytest.mark.parametrize("window", [0, 5])
def test_reference_equals_sdpa(window):
    case = make_case([9, 20], [9, 20], 4, 2, 8, 8, 4, torch.float64)
    out, _ = run(case, "reference", window=window)
    for rows in (slice(0, 9), slice(9, 29)):
        q, k, v = (case[name][rows].transpose(0, 1) for name in "qkv")
        n = q.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        mask &= ~torch.ones(n, n, dtype=torch.bool).tril(-window) if window else mask
        expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        torch.testing.assert_close(out[rows].transpose(0, 1), expected)


def test_reference_long_prompt_in_pieces():
    case = make_case([300], [300], 2, 1, 8, 8, 16, torch.float64)
    q, k, v = (case[name].transpose(0, 1) for name in "qkv")
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(run(case, "reference")[0].transpose(0, 1), whole)


@native
@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bits_do_not_depend_on_neighbours_or_threads(window, dtype):
    case = make_case(LENGTHS, TOKENS, 6, 2, 40, 40, 16, dtype)
    whole, _ = run(case, window=window)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(case, window=window)[0], whole)
    finally:
        torch.set_num_threads(threads)
    for row, tokens in enumerate(TOKENS):
        mine = slice(int(case["q_indptr"][row]), int(case["q_indptr"][row + 1]))
        alone = {name: case[name][mine] for name in ("q", "k", "v", "slot_mapping")}
        alone |= {"block_table": case["block_table"][row : row + 1], "kv_len": case["kv_len"][row : row + 1]}
        alone["q_indptr"] = torch.tensor([0, tokens], dtype=torch.int32)
        assert torch.equal(run({**case, **alone}, window=window)[0], whole[mine])


@native
@pytest.mark.parametrize("window", [0, 20, 64])
@pytest.mark.parametrize("pieces", [[1] * 150, [64, 64, 22], [1, 100, 7, 42], [149, 1]], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 24, torch.float32), (4, 4, 32, torch.bfloat16), (4, 1, 48, torch.float32),
                                   (4, 2, 64, torch.bfloat16)], ids=str)  # fmt: skip
def test_bits_do_not_depend_on_how_tokens_are_split(shape, pieces, window):
    heads, kv_heads, width, dtype = shape
    case = make_case([150], [150], heads, kv_heads, width, width, 16, dtype)
    sinks = torch.tensor([0.1, -1.0, 2.0, 0.0])
    whole, _ = run(case, window=window, sinks=sinks)
    done, parts, state = 0, [], {name: case[name].clone() for name in ("k_pool", "v_pool")}
    indices = torch.arange(151, dtype=torch.int32)
    for n in pieces:
        piece = {name: case[name][done : done + n] for name in ("q", "k", "v", "slot_mapping")}
        done += n
        piece |= {"q_indptr": indices[[0, n]], "kv_len": indices[[done]]}
        out, used = run({**case, **state, **piece}, window=window, sinks=sinks)
        state = {name: used[name] for name in state}
        parts.append(out)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_views_and_pools(impl):
    case = make_case([20, 5], [20, 1], 4, 2, 16, 16, 4)
    fused = torch.cat([case["q"], case["k"], case["v"]], 1)  # [T, H + 2 Hkv, D], as one projection gives it
    q, k, v = fused.transpose(0, 1).contiguous().transpose(0, 1).split([4, 2, 2], 1)
    assert not q.is_contiguous()
    wide = torch.full((2, *case["k_pool"].shape), torch.nan)
    wide[0], wide[1] = case["k_pool"], case["v_pool"]
    pools = wide.permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4)  # K and V of a head side by side
    expected, used = run(case, impl)
    with ops.use_impl(impl):
        out = ops.paged_attention(**{**case, "q": q, "k": k, "v": v, "k_pool": pools[0], "v_pool": pools[1]})
    assert torch.equal(out, expected)
    torch.testing.assert_close(pools[0], used["k_pool"], rtol=0, atol=0, equal_nan=True)


@native
def test_pools_of_another_dtype():
    case = make_case([40, 3], [40, 3], 2, 1, 16, 16, 16)
    half = {name: case[name].bfloat16() for name in ("k_pool", "v_pool")}
    ours, used = run({**case, **half})
    today, used_today = run({**case, **half}, "reference")
    torch.testing.assert_close(ours, today, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(used["k_pool"], used_today["k_pool"], rtol=0, atol=0, equal_nan=True)


@native
def test_blocks_behind_the_window_may_be_gone():
    case = make_case([100], [1], 2, 1, 16, 16, 16)
    whole, _ = run(case, window=10)
    gone = case["block_table"].clone()
    gone[0, :5] = -1  # positions 0..79; the query at 99 sees 90..99
    for impl in ("native", "reference"):
        assert torch.equal(run({**case, "block_table": gone}, impl, window=10)[0], run(case, impl, window=10)[0])
    assert not whole.isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_and_no_tokens(impl):
    case = make_case([4, 4], [0, 0], 2, 1, 8, 8, 4)
    assert run(case, impl)[0].shape == (0, 2, 8)


BAD = {
    "slot_mapping": (dict(slot_mapping=torch.tensor([999], dtype=torch.int32)), "slot_mapping: got .*999.*need"),
    "kv_len too long": (dict(kv_len=torch.tensor([99], dtype=torch.int32)), "kv_len: got 99.*need <="),
    "kv_len too short": (dict(kv_len=torch.tensor([0], dtype=torch.int32)), "kv_len: got 0.*need >= 1"),
    "q_indptr": (dict(q_indptr=torch.tensor([0, 2], dtype=torch.int32)), "q_indptr: got .*2.*need 1"),
    "heads": (dict(q=torch.zeros(1, 3, 8)), "q: got 3.*need .*a multiple of 2"),
    "k": (dict(k=torch.zeros(1, 2, 9)), r"k: got \[1, 2, 9\], need shape \[1, 2, 8\]"),
    "v": (dict(v=torch.zeros(2, 2, 8)), r"v: got \[2, 2, 8\], need shape \[1, 2, 8\]"),
}
BAD_NATIVE = {
    "block_table": (dict(block_table=torch.full((1, 2), -1, dtype=torch.int32)), "block_table: got -1 at 0, need"),
    "index type": (dict(kv_len=torch.tensor([5])), "kv_len: got Long, need Int"),
    "types": (dict(k=torch.zeros(1, 2, 8, dtype=torch.bfloat16)), "k: got BFloat16, need Float"),
    "stride": (dict(q=torch.zeros(1, 8, 2).transpose(1, 2)), "q: got 2, need stride 1"),
    "window": (dict(window=-1), "window: got -1, need >= 0"),
    "sinks": (dict(sinks=torch.zeros(3)), r"sinks: got \[3\], need shape \[2\]"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("impl", IMPLS)
def test_bad_input_names_the_value(impl, name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        run({**make_case([5], [1], 2, 2, 8, 8, 4), **change}, impl)


@native
@pytest.mark.parametrize("name", BAD_NATIVE)
def test_bad_input_of_the_compiled_operator(name):
    change, message = BAD_NATIVE[name]
    with pytest.raises(ValueError, match=message):
        run({**make_case([5], [1], 2, 2, 8, 8, 4), **change})


@pytest.mark.parametrize("impl", IMPLS)
def test_copy_blocks_in_order(impl):
    pools = [torch.randn(6, 4, 2, 8), torch.randn(6, 4, 2, 3).bfloat16(), torch.arange(6)]
    pairs = torch.tensor([[0, 3], [3, 5], [1, 0], [2, 2]])  # the second reads what the first wrote
    expected = [pool[[1, 1, 2, 0, 4, 0]].clone() for pool in pools]
    with ops.use_impl(impl):
        ops.copy_blocks(pools, pairs)
        ops.copy_blocks(pools, pairs[:0])
        ops.copy_blocks([], pairs)
        assert all(torch.equal(pool, want) for pool, want in zip(pools, expected, strict=True))
        with pytest.raises(ValueError, match="pairs: got .*6.*need"):
            ops.copy_blocks(pools, torch.tensor([[0, 6]]))


@native
def test_every_output_is_written():
    case = make_case([20, 5], [20, 1], 4, 2, 16, 12, 4)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        assert torch.isfinite(run(case)[0]).all()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


@native
def test_opcheck():
    case = make_case([20, 5], [20, 1], 4, 2, 16, 16, 4)
    extra = dict(window=3, softcap=2.0, sinks=torch.zeros(4))
    torch.library.opcheck(torch.ops.fastcollab.paged_attention.default, (), {**case, **extra})
    torch.library.opcheck(torch.ops.fastcollab.copy_blocks.default, ([torch.zeros(3, 2)], torch.tensor([[0, 1]])))
    row = torch.ones(2)
    law = (row, row.int(), row, row * 0, row.long(), row.int(), row.int())
    torch.library.opcheck(torch.ops.fastcollab.sample.default, (torch.randn(2, 9), *law))


@native
def test_compile_sees_one_graph():
    case = make_case([6], [2], 2, 1, 8, 8, 4)

    def layer(q):
        args = {**case, "q": q * 2, "k_pool": case["k_pool"].clone(), "v_pool": case["v_pool"].clone()}
        return torch.ops.fastcollab.paged_attention(**args) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case["q"]), layer(case["q"]))


def test_forced_implementations():
    case = make_case([3], [1], 2, 1, 8, 8, 4)
    with pytest.raises(ValueError, match="impl: got 'cuda', need reference or native or triton"):
        with ops.use_impl("cuda"):
            pass
    with ops.use_impl("triton"):
        assert ops.impl_report()["forced"] == "triton"
        with ops.use_impl("reference"):
            assert ops.impl_report()["sample"]["cpu"] == "reference"
        with pytest.raises(RuntimeError, match="paged_attention: got the forced implementation 'triton', need"):
            run(case, "triton", torch.float64)
    assert ops.impl_report()["forced"] is None
    assert torch.isfinite(ops.paged_attention(**case)).all()


@native
def test_a_forced_implementation_leaves_the_operators_that_never_had_it(monkeypatch):
    segments = Segments(*torch.tensor([[0], [3], [0], [0]]))
    with ops.use_impl("native"):
        x = torch.ones(3, 1, 8)
        assert torch.equal(ops.packed_attention(x, x, x, segments, 1.0), x)
        report = ops.impl_report()
        assert report["unforced"] == ["packed_attention"] and report["packed_attention"]["cpu"] == "reference"
    with ops.use_impl("triton"):
        pools = [torch.arange(2)]
        ops.copy_blocks(pools, torch.tensor([[0, 1]]))
        report = ops.impl_report()
        assert pools[0].tolist() == [0, 0] and report["unforced"] == ["copy_blocks", "sample"]
        assert report["sample"]["cpu"] == "native"
    monkeypatch.setattr(dispatch, "NATIVE_ABSENT", "not built")
    dispatch._choose.cache_clear()
    try:
        with ops.use_impl("native"), pytest.raises(RuntimeError, match="linear_logprob: got .*'native'.*not built"):
            ops.linear_logprob(torch.ones(1, 2), torch.ones(3, 2), None, torch.tensor([0]))
    finally:
        dispatch._choose.cache_clear()


@pytest.mark.parametrize("impl", IMPLS)
def test_sinks_of_any_stride(impl):
    case = make_case([20, 5], [20, 1], 4, 2, 16, 16, 4)
    wide = torch.randn(4, 2)
    assert torch.equal(run(case, impl, sinks=wide[:, 0])[0], run(case, impl, sinks=wide[:, 0].contiguous())[0])


@native
def test_dtypes_that_native_lacks_go_to_the_reference():
    case = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x
            for name, x in make_case([3], [1], 2, 1, 8, 8, 4).items()}  # fmt: skip
    assert torch.equal(ops.paged_attention(**case), attention.paged_attention(**case))
    with pytest.raises(RuntimeError, match="takes float32 and bfloat16, not torch.float64"):
        run(case, "native")
