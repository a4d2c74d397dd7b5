"""The head's public functions, Triton and native: the answers and errors of the reference, with strided vectors too."""

from __future__ import annotations

import pytest
import torch

from fastcollab.ops import NATIVE_ABSENT, linear_logprob, linear_policy_loss, linear_scores, use_impl

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
no_native = pytest.mark.skipif(
    NATIVE_ABSENT is not None or DEVICE == "cuda", reason=NATIVE_ABSENT or "native: CPU only"
)
FUSED = pytest.mark.parametrize("fused", ["triton", pytest.param("native", marks=no_native)])
N, D, V = 19, 21, 77
CAPPED = {"temperature": 0.7, "softcap": 3.0}


@pytest.fixture
def given():
    """h, weight, bias as a column of a matrix, target and second as every other id of a longer row."""
    g = torch.Generator().manual_seed(0)
    h, weight, wide = (torch.randn(n, d, generator=g).to(DEVICE) for n, d in ((N, D), (V, D), (V, 2)))
    target, second = torch.randint(0, V, (2 * N, 2), generator=g).to(DEVICE)[::2].unbind(1)
    return h, weight, wide[:, 1], target, second


def tokens():
    g = torch.Generator().manual_seed(1)
    old = torch.randn(N, generator=g) * 0.3 - 4.3
    mask, ids = torch.rand(N, generator=g) < 0.8, torch.randint(0, 3, (N,), generator=g)
    return [x.to(DEVICE) for x in (old, torch.tensor([1.0, -2.0, 0.5]), mask, ids.int())]


def leaves(given, dtype):
    return [x.detach().to(dtype).requires_grad_() for x in given[:3]]


def close(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=3e-5, rtol=1e-5)


@FUSED
@pytest.mark.parametrize("entropy", [False, True])
def test_linear_logprob(given, entropy, fused):
    found = []
    for impl, dtype in ((fused, torch.float32), ("reference", torch.float64)):
        h, weight, _ = mine = leaves(given, dtype)
        wide = torch.stack([mine[2], mine[2] * 0], 1)  # its first column: a bias with a stride, and a gradient
        with use_impl(impl):
            logprob, ent = linear_logprob(h, weight, wide[:, 0], given[3], entropy=entropy, **CAPPED)
            assert (ent is not None) == entropy
            out = [logprob] + ([ent] if entropy else [])
            upstream = torch.linspace(-1, 1, N, device=DEVICE, dtype=dtype)
            grads = torch.autograd.grad(sum((x * upstream).sum() for x in out), mine)
        found.append([x.detach() for x in (*out, *grads)])
    close(*found)


@FUSED
def test_linear_scores(given, fused):
    with use_impl(fused):
        got = linear_scores(*given, **CAPPED)
        assert linear_scores(*given[:4]).second_logprob is None
    with use_impl("reference"):
        want = linear_scores(*(x.double() for x in given[:3]), *given[3:], **CAPPED)
    close(got, want)


@FUSED
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_linear_policy_loss(given, aggregation, fused):
    found = []
    for impl, dtype in ((fused, torch.float32), ("reference", torch.float64)):
        h, weight, bias = mine = leaves(given, dtype)
        old, *rest = tokens()
        with use_impl(impl):
            loss, metrics = linear_policy_loss(h, weight, given[3], old.to(dtype), *rest, bias=bias, entropy=True,
                                               aggregation=aggregation, **CAPPED)  # fmt: skip
            grads = torch.autograd.grad(3 * loss, mine)
        found.append([loss.detach(), *(metrics[name] for name in sorted(metrics)), *grads])
    close(*found)


BAD = {"-100": (-100, r"target: got \(-100, \d+\), need ids in \[0, 77\)"),
       "V": (V, r"target: got \(\d+, 77\), need ids in \[0, 77\)"),
       "beyond 32 bits": (1 << 32, r"target: got \(\d+, 4294967296\), need ids in \[0, 77\)")}  # fmt: skip


@pytest.mark.parametrize("impl", ["triton", pytest.param("native", marks=no_native), "reference"])
@pytest.mark.parametrize("name", BAD)
def test_a_target_outside_the_vocabulary_is_refused(given, impl, name):
    h, weight, bias, target, second = given
    old, advantage, mask, ids = tokens()
    bad = target.clone()
    bad[mask.nonzero()[0]], message = BAD[name]
    with use_impl(impl):
        with pytest.raises(ValueError, match=message):
            linear_logprob(h, weight, bias, bad)
        with pytest.raises(ValueError, match=message.replace("target", "(target|second)")):
            linear_scores(h, weight, bias, target, bad)
        with pytest.raises(ValueError, match=message):
            linear_policy_loss(h, weight, bad, old, advantage, mask, ids, bias=bias)
        aside = target.clone()
        aside[~mask] = BAD[name][0]  # a row that is not kept may hold anything
        assert linear_policy_loss(h, weight, aside, old, advantage, mask, ids, bias=bias)[0].isfinite()


@FUSED
@pytest.mark.parametrize("op", ["linear_logprob", "linear_policy_loss"])
def test_no_second_derivative(given, op, fused):
    h, weight, _ = leaves(given, torch.float32)
    with use_impl(fused):
        if op == "linear_logprob":
            loss = linear_logprob(h, weight, None, given[3])[0].sum()
        else:
            loss = linear_policy_loss(h, weight, given[3], *tokens())[0]
        with pytest.raises(ValueError, match="create_graph: got True, need False"):
            torch.autograd.grad(loss, h, create_graph=True)
        assert torch.autograd.grad(loss, h)[0].isfinite().all()
