"""Packed attention: equal to plain attention of each segment alone, with its own copy of the prefix."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastcollab.reference.packed import Segments, packed_attention

SCALE = 0.3


def naive(q, k, v, segments, scale, window=0, softcap=0.0, sinks=None):
    """One query at a time, keys gathered by hand."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    rows = torch.stack([segments.start, segments.length, segments.prefix_start, segments.prefix_length], 1)
    for start, length, p_start, p_length in rows.tolist():
        seen = list(range(p_start, p_start + p_length))
        for t in range(start, start + length):
            seen.append(t)
            keys = seen[-window:] if window else seen
            score = torch.einsum("hd,jhd->hj", q[t], k[keys]) * scale
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            if sinks is not None:
                score = torch.cat([score, sinks[:, None]], 1)
            p = score.softmax(-1)[:, : len(keys)]
            out[t] = torch.einsum("hj,jhd->hd", p, v[keys])
    return out


def segments_of(*rows):
    return Segments(*torch.tensor(rows, dtype=torch.int64).T.contiguous())


def tensors(T, H, Hkv, Dk, Dv, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((T, H, Dk), (T, Hkv, Dk), (T, Hkv, Dv))
    return [torch.randn(s, generator=g, dtype=dtype).requires_grad_() for s in shapes]


# two prompts that completions of unequal length share, an empty segment, one alone, and tokens 25 and 26 in none
MIXED = (
    (0, 5, 0, 0),
    (5, 3, 0, 5),
    (8, 1, 0, 5),
    (9, 7, 0, 5),
    (16, 3, 0, 0),
    (19, 0, 16, 3),
    (19, 4, 16, 3),
    (23, 2, 0, 0),
)


@pytest.mark.parametrize("heads", [(4, 2, 5, 5), (3, 3, 4, 7), (6, 1, 3, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3},
        {"window": 100},
        {"softcap": 2.0},
        {"sinks": True},
        {"window": 4, "softcap": 1.5, "sinks": True},
    ],
)
def test_equals_naive_in_value_and_gradient(heads, options):
    q, k, v = tensors(27, *heads)
    options = dict(options)
    leaves = [q, k, v]
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 1, heads[0], dtype=q.dtype).requires_grad_()
        leaves.append(options["sinks"])
    segments = segments_of(*MIXED)
    got, want = (f(q, k, v, segments, SCALE, **options) for f in (packed_attention, naive))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert (got[25:] == 0).all()
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_overlapping_prefixes_of_equal_length_share_a_call():
    segments = segments_of((0, 6, 0, 0), (6, 3, 0, 4), (9, 4, 1, 4), (13, 1, 2, 4), (15, 2, 0, 4))
    prefix_parts = [part for part in segments.parts() if not part.is_causal]
    assert [part.n for part in prefix_parts] == [3]
    leaves = tensors(17, 4, 2, 5, 5)
    got, want = (f(*leaves, segments, SCALE) for f in (packed_attention, naive))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    for a, b in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def test_a_group_in_one_piece_copies_nothing():
    segments = segments_of((0, 99, 0, 0), (99, 4, 0, 99), (103, 4, 0, 99))
    assert all(isinstance(x, slice) for part in segments.parts() for x in (part.query, part.key, part.rows))
    assert sorted((part.n, part.is_causal) for part in segments.parts()) == [(1, False), (1, True), (2, True)]


def test_shared_prompt_equals_unshared_copies():
    P, G, L = 6, 3, 4
    q, k, v = tensors(P + G * L, 4, 2, 8, 8)
    shared = segments_of((0, P, 0, 0), *((P + g * L, L, 0, P) for g in range(G)))
    repeat = torch.cat([torch.cat([torch.arange(P), torch.arange(P + g * L, P + (g + 1) * L)]) for g in range(G)])
    apart = segments_of(*((g * (P + L), P + L, 0, 0) for g in range(G)))
    got = packed_attention(q, k, v, shared, SCALE)[P:]
    want = packed_attention(q[repeat], k[repeat], v[repeat], apart, SCALE).unflatten(0, (G, -1))[:, P:].flatten(0, 1)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    for a, b in zip(
        torch.autograd.grad(got.sin().sum(), (q, k, v)), torch.autograd.grad(want.sin().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"window": 2}, {"softcap": 1.0, "sinks": torch.tensor([0.3, -0.2], dtype=torch.float64)}]
)
def test_gradcheck(options):
    segments = segments_of((0, 3, 0, 0), (3, 2, 0, 3), (5, 1, 0, 3))
    q, k, v = tensors(7, 2, 1, 3, 2)
    assert torch.autograd.gradcheck(lambda q, k, v: packed_attention(q, k, v, segments, SCALE, **options), (q, k, v))


def test_checkpointing_calls_it_twice_and_changes_nothing():
    q, k, v = tensors(27, 4, 2, 5, 5)
    segments = segments_of(*MIXED)
    plain = torch.autograd.grad(packed_attention(q, k, v, segments, SCALE).sin().sum(), (q, k, v))
    out = checkpoint(packed_attention, q, k, v, segments, SCALE, use_reentrant=False)
    for a, b in zip(plain, torch.autograd.grad(out.sin().sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


def test_nan_in_one_segment_stays_there():
    q, k, v = tensors(27, 4, 2, 5, 5, torch.float32)
    segments = segments_of(*MIXED)
    clean = packed_attention(q, k, v, segments, SCALE)
    with torch.no_grad():
        for x in (q, k, v):
            x[9:16] = float("nan")
            x[25:] = float("nan")
    dirty = packed_attention(q, k, v, segments, SCALE)
    others = [t for t in range(27) if not 9 <= t < 16]
    assert torch.equal(clean[others], dirty[others])
    assert dirty[9:16].isnan().all()


def test_strided_and_low_precision_inputs():
    q, k, v = (x.detach().float() for x in tensors(27, 4, 2, 8, 8))
    segments = segments_of(*MIXED)
    want = packed_attention(q, k, v, segments, SCALE)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert torch.equal(packed_attention(*strided, segments, SCALE), want)
    low = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    for options in ({}, {"softcap": 1.5}, {"window": 4}):
        wide = [x.detach().double().requires_grad_() for x in low]
        truth = naive(*wide, segments, SCALE, **options)
        got, plain = (f(*low, segments, SCALE, **options) for f in (packed_attention, naive))
        truths = [truth, *torch.autograd.grad(truth, wide, upstream.double())]
        gots, plains = ([x, *torch.autograd.grad(x, low, upstream)] for x in (got, plain))
        for a, b, c in zip(gots, plains, truths, strict=True):
            assert a.dtype == torch.bfloat16
            assert (a - c).abs().max() <= 2 * (b - c).abs().max()


def test_padding_stays_small_in_few_calls():
    g = torch.Generator().manual_seed(0)
    length = torch.randint(30, 60, (128,), generator=g)
    prefix = torch.randint(13, 18, (16,), generator=g).repeat_interleave(8)
    start = length.cumsum(0) - length + 1000
    segments = Segments(start, length, torch.zeros_like(start), prefix)
    buckets = segments.buckets()
    assert sorted(torch.cat(buckets).tolist()) == list(range(128))
    padded = sum(len(b) * int(length[b].max()) * int(length[b].max() + prefix[b].max()) for b in buckets)
    real = int((length * (length + prefix)).sum())
    assert padded <= 1.15 * real + 4096 * len(buckets)
    assert len(buckets) <= 6


def test_a_second_derivative_is_refused():
    q, k, v = tensors(6, 2, 1, 4, 4, torch.float32)
    out = packed_attention(q, k, v, segments_of((0, 6, 0, 0)), SCALE)
    with pytest.raises(ValueError, match="create_graph: got True, need False"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_indices_are_made_once():
    segments = segments_of(*MIXED)
    q, k, v = tensors(27, 4, 2, 5, 5)
    packed_attention(q, k, v, segments, SCALE)
    plan, mask = segments.plan(q.device, 27), segments.mask(0, 0, q.device)
    packed_attention(q, k, v, segments, SCALE)
    assert segments.plan(q.device, 27) is plan and segments.mask(0, 0, q.device) is mask


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0, 3, 0, 0), (2, 2, 0, 0)), "segments 0 and 1 that overlap"),
        (((4, 2, 0, 0), (0, 5, 0, 0)), "segments 1 and 0 that overlap"),
        (((0, 4, 2, 3),), "overlaps its segment 0"),
        (((0, -1, 0, 0),), "got -1, need >= 0"),
    ],
)
def test_bad_segments(rows, message):
    with pytest.raises(ValueError, match=message):
        segments_of(*rows)


def test_bad_tensors():
    with pytest.raises(ValueError, match="int64"):
        Segments(torch.tensor([0.0]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match="number of segments: got 0, need >= 1"):
        Segments(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    q, k, v = tensors(4, 4, 2, 5, 5)
    with pytest.raises(ValueError, match="end of the segments: got 9, need <= 4"):
        packed_attention(q, k, v, segments_of((0, 9, 0, 0)), SCALE)
    with pytest.raises(ValueError, match="multiple of Hkv"):
        packed_attention(q[:, :3], k, v, segments_of((0, 4, 0, 0)), SCALE)
    with pytest.raises(ValueError, match="sinks"):
        packed_attention(q, k, v, segments_of((0, 4, 0, 0)), SCALE, sinks=torch.zeros(2))
