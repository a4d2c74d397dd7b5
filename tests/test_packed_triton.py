"""Packed attention in Triton: values and gradients against the reference in fp64, odd shapes and shared prefixes."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from fastcollab.kernels import packed_plan  # noqa: E402
from fastcollab.kernels.packed_attention import offline_cases, packed_attention_forward  # noqa: E402
from fastcollab.ops import packed_attention, use_impl  # noqa: E402
from fastcollab.reference.packed import Segments  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3


def segments_of(*rows):
    return Segments(*torch.tensor(rows, dtype=torch.int64).T.contiguous())


# a prompt longer than a tile with completions of 1 to 19 tokens, an empty one, one alone, tokens 62 and 63 in none
MIXED = segments_of((0, 21, 0, 0), (21, 3, 0, 21), (24, 19, 0, 21), (43, 0, 0, 21), (43, 1, 0, 21), (44, 18, 0, 0))
TOKENS, COVERED = 64, 62


def inputs(segments_tokens, heads, dtype, sinks=False, seed=0):
    """q, k, v [T, heads, width] with strides that a fused projection gives, sinks [H] or None, upstream gradient."""
    H, Hkv, dk, dv = heads
    g = torch.Generator().manual_seed(seed)
    fused = torch.randn(segments_tokens, H * dk + Hkv * (dk + dv), generator=g).to(DEVICE, dtype)
    q, k, v = fused.split([H * dk, Hkv * dk, Hkv * dv], 1)
    leaves = [x.unflatten(1, (n, -1)).requires_grad_() for x, n in ((q, H), (k, Hkv), (v, Hkv))]
    if sinks:
        leaves.append(torch.linspace(-1, 1, H, device=DEVICE).to(dtype).requires_grad_())
    return leaves, torch.randn(segments_tokens, H, dv, generator=g).to(DEVICE, dtype)


def run(impl, leaves, segments, upstream, window=0, softcap=0.0):
    """[out, dq, dk, dv, (dsinks)]"""
    sinks = leaves[3] if len(leaves) > 3 else None
    with use_impl(impl):
        out = packed_attention(*leaves[:3], segments, SCALE, window, softcap, sinks)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def naive(leaves, segments, upstream, window=0, softcap=0.0):
    """Plain torch in the inputs' own dtype, segment by segment."""
    q, k, v, *sinks = leaves
    groups = q.shape[1] // k.shape[1]
    parts = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    for start, length, prefix, depth in packed_plan._spans(segments):
        keys = torch.tensor([*range(prefix, prefix + depth), *range(start, start + length)], device=q.device)
        ks, vs = (x[keys].repeat_interleave(groups, 1) for x in (k, v))
        score = torch.einsum("ihd,jhd->hij", q[start : start + length], ks) * SCALE
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        apart = torch.arange(length)[:, None] + depth - torch.arange(depth + length)
        hidden = (apart < 0) | (apart >= window if window else False)
        score = score.masked_fill(hidden.to(q.device), float("-inf"))
        if sinks:
            score = torch.cat([score, sinks[0][:, None, None].expand(-1, length, 1)], 2)
        p = score.softmax(2)[..., : depth + length]
        parts = parts.index_copy(0, keys[depth:], torch.einsum("hij,jhd->ihd", p, vs))
    return [parts.detach(), *torch.autograd.grad(parts, leaves, upstream)]


@pytest.fixture
def poisoned():
    """Uninitialised memory is NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.mark.parametrize(
    ("heads", "dtype", "options"),
    [
        ((4, 2, 12, 12), torch.float32, {}),
        ((2, 1, 5, 24), torch.float32, {"window": 7}),
        ((1, 1, 16, 16), torch.float32, {"window": 18, "softcap": 1.5, "sinks": True}),
        ((2, 1, 16, 8), torch.bfloat16, {"softcap": 2.0}),
        ((1, 1, 16, 16), torch.bfloat16, {"sinks": True}),
        ((1, 1, 20, 20), torch.float16, {"window": 1}),
        ((2, 1, 48, 96), torch.float32, {}),  # whole parts, but no power of two
    ],
)
def test_as_accurate_as_plain_torch(poisoned, heads, dtype, options):
    options = dict(options)
    leaves, upstream = inputs(TOKENS, heads, dtype, options.pop("sinks", False))
    got = run("triton", leaves, MIXED, upstream, **options)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    truth = run("reference", wide, MIXED, upstream.double(), **options)
    plain = naive(leaves, MIXED, upstream, **options)
    for name, a, b, c in zip(("out", "dq", "dk", "dv", "dsinks"), got, plain, truth, strict=False):
        assert a.dtype == dtype and a.shape == c.shape
        tiny = 4e-7 * (c.abs().max() if dtype == torch.float32 else 10)
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + tiny, name
    assert (got[0][COVERED:] == 0).all() and all((x[COVERED:] == 0).all() for x in got[1:4])


def test_a_shared_prompt_equals_its_copies():
    P, L, G = 18, 5, 3
    leaves, upstream = inputs(P + G * L, (2, 1, 16, 16), torch.float32)
    shared = segments_of((0, P, 0, 0), *((P + g * L, L, 0, P) for g in range(G)))
    copies = torch.cat([torch.cat([torch.arange(P), torch.arange(P + g * L, P + (g + 1) * L)]) for g in range(G)]).to(
        DEVICE
    )
    apart = segments_of(*((g * (P + L), P + L, 0, 0) for g in range(G)))
    own = (torch.arange(P + L).repeat(G) >= P).to(DEVICE)
    with use_impl("triton"):
        got = packed_attention(*leaves, shared, SCALE)[P:]
        want = packed_attention(*(x[copies] for x in leaves), apart, SCALE)[own]
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    for a, b in zip(*(torch.autograd.grad(x, leaves, upstream[P:]) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=0)


def test_the_same_bits_alone_as_in_a_pack():
    leaves, upstream = inputs(TOKENS, (1, 1, 16, 16), torch.float32)
    packed = run("triton", leaves, MIXED, upstream)
    for first, last, segments in ((44, 62, segments_of((0, 18, 0, 0))),):
        alone = [x.detach()[first:last].clone().requires_grad_() for x in leaves]
        for a, b in zip(run("triton", alone, segments, upstream[first:last]), packed, strict=True):
            assert torch.equal(a, b[first:last])
    completion = segments_of((21, 19, 0, 21))
    rows = [*range(21), *range(24, 43)]
    alone = run("triton", [x.detach()[rows].requires_grad_() for x in leaves], completion, upstream[rows])
    for a, b in zip(alone, packed, strict=True):
        assert torch.equal(a[21:], b[24:43])


def test_nan_stays_in_its_segment():
    leaves, upstream = inputs(TOKENS, (1, 1, 16, 16), torch.float32)
    clean = run("triton", leaves, MIXED, upstream)
    with torch.no_grad():
        for x in (*leaves, upstream):
            x[24:43] = float("nan")  # the second completion
            x[COVERED:] = float("nan")
    dirty = run("triton", leaves, MIXED, upstream)
    others = [t for t in range(TOKENS) if not 24 <= t < 43]
    for a, b in zip(clean[:2], dirty[:2], strict=True):
        assert torch.equal(a[others], b[others]) and b[24:43].isnan().all()
    beyond = [*range(21, 24), *range(43, TOKENS)]  # the prompt's own keys were read by the second completion
    for a, b in zip(clean[2:], dirty[2:], strict=True):
        assert torch.equal(a[beyond], b[beyond])


def test_strided_sinks_and_no_second_derivative():
    leaves, upstream = inputs(18, (2, 1, 8, 8), torch.float32)
    segments, wide = segments_of((0, 18, 0, 0)), torch.tensor([[2.0, -9.0], [0.5, 9.0]], device=DEVICE)
    for want, got in zip(*(run("triton", [*leaves, x.detach().requires_grad_()], segments, upstream) for x in
                           (wide[:, 0].contiguous(), wide[:, 0])), strict=True):  # fmt: skip
        assert torch.equal(want, got)
    with use_impl("triton"), pytest.raises(ValueError, match="create_graph: got True, need False"):
        torch.autograd.grad(packed_attention(*leaves, segments, SCALE).sum(), leaves[0], create_graph=True)


def test_each_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    seen, device_of = [], torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: seen.append(x.device.type) or device_of(x))
    leaves, upstream = inputs(3, (1, 1, 8, 8), torch.float32)
    run("triton", leaves, segments_of((0, 3, 0, 0)), upstream)
    assert seen == [DEVICE] * 3


def test_plan_meets_every_pair_once():
    spans = ((0, 21, 0, 0), (21, 3, 0, 21), (24, 19, 0, 21), (43, 0, 0, 21), (44, 8, 3, 16), (52, 2, 44, 5))
    tiles, visits = packed_plan.key_tiles(segments_of(*spans), 55, 4, torch.device("cpu"))
    assert sorted(t for first, count, *_ in tiles.tolist() for t in range(first, first + count)) == list(range(55))
    seen = torch.zeros(55, 55, dtype=torch.int64)
    for first, count, begin, end in tiles.tolist():
        for start, length, depth, position in visits[begin:end].tolist():
            for j in range(count):
                for i in range(length):
                    seen[start + i, first + j] += position + j <= depth + i
    want = torch.zeros_like(seen)
    for start, length, prefix, depth in spans:
        want[start : start + length, prefix : prefix + depth] += 1
        want[start : start + length, start : start + length] += torch.ones(length, length, dtype=torch.int64).tril()
    assert torch.equal(seen, want)


def test_plan_is_made_once():
    cpu = torch.device("cpu")
    assert packed_plan.query_tiles(MIXED, 16, cpu) is packed_plan.query_tiles(MIXED, 16, cpu)
    assert packed_plan.key_tiles(MIXED, TOKENS, 16, cpu)[1] is packed_plan.key_tiles(MIXED, TOKENS, 16, cpu)[1]


def test_lse_and_empty_packs():
    leaves, _ = inputs(TOKENS, (1, 1, 16, 16), torch.float32)
    out, lse = packed_attention_forward(*(x.detach() for x in leaves), MIXED, SCALE, 0, 0.0, None)
    q, k = leaves[0][44:62].double(), leaves[1][44:62].double()
    score = (torch.einsum("ihd,jhd->hij", q, k) * SCALE).masked_fill(torch.ones(18, 18).triu(1).bool().to(DEVICE), -1e9)
    torch.testing.assert_close(lse[44:62].double(), score.logsumexp(2).T, atol=1e-5, rtol=0)
    leaves, upstream = inputs(3, (1, 1, 16, 16), torch.float32)
    for x in run("triton", leaves, segments_of((0, 0, 0, 0)), upstream):
        assert (x == 0).all()


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_offline_cases_name_every_argument(target):
    for case in offline_cases(target):
        assert set(case.signature) == set(case.kernel.arg_names)
        assert {x for x, kind in case.signature.items() if kind == "constexpr"} == set(case.constants)
