"""The row algorithm of the CUDA kernel of `sample` against the reference: on CPU lane after lane, and where there is
a GPU on the device."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fastcollab import ops

ROOT = Path(__file__).parent.parent
CXX = os.environ.get("CXX") or "g++"
FLAGS = [
    "-std=c++20",
    "-O2",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
]
pytestmark = pytest.mark.skipif(shutil.which(shlex.split(CXX)[0]) is None, reason=f"no C++ compiler ({CXX}) on PATH")
on_cuda = torch.cuda.is_available() and ops.dispatch.absent("native", "sample", "cuda", (torch.float32,)) is None
KERNEL, BACKWARDS, FEWER, DEVICE = 0, 1, 2, "device"
TEAMS = [KERNEL, FEWER, *([DEVICE] if on_cuda else [])]


@pytest.fixture(scope="module")
def lanes(tmp_path_factory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("lanes") / "sample.so"
    source = Path(__file__).with_name("sample_lanes.cpp")
    subprocess.run([*shlex.split(CXX), *FLAGS, f"-I{ROOT / 'csrc'}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, key=None, position=0, epoch=0):
    def full(value, dtype):
        return torch.as_tensor(value).to(dtype).expand(rows).contiguous()

    real, int32 = torch.float32, torch.int32
    keys = torch.arange(rows) * 7919 if key is None else key
    return (full(temperature, real), full(top_k, int32), full(top_p, real), full(min_p, real),
            full(keys, torch.int64), full(position, int32), full(epoch, int32))  # fmt: skip


def draw(lanes, team, logits, law):
    rows, vocab = logits.shape
    if team == DEVICE:
        with ops.use_impl("native"):
            return tuple(t.cpu() for t in ops.sample(logits.cuda(), *(t.cuda() for t in law)))
    out = torch.full((rows,), -7), torch.full((rows,), torch.inf), torch.full((rows,), torch.inf)
    sizes = (ctypes.c_int64(n) for n in (rows, vocab, logits.stride(0)))
    lanes.sample(team, int(logits.dtype == torch.bfloat16), *sizes, *map(pointer, (logits, *law, *out)))
    return out


def reference(logits, law):
    with ops.use_impl("reference"):
        return ops.sample(logits, *law)


def agree(ours, spec):
    assert torch.equal(ours[0], spec[0])
    for mine, theirs in zip(ours[1:], spec[1:], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-7, atol=1e-14, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [1, 5, 64, 130, 3001, 40_003])
def test_the_kernel_draws_what_the_reference_draws(lanes, vocab, dtype):
    """Every row has its own temperature and filters, greedy and plain rows among them, in one call."""
    rows = 300 if vocab < 1000 else 60 if vocab < 10_000 else 8
    g = torch.Generator().manual_seed(vocab)

    def pick(*values):
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=g)]

    wide = torch.full((rows, vocab + 3), torch.nan, dtype=dtype)  # rows with a stride: what lies between is not read
    logits = wide[:, :vocab]
    logits[:] = torch.randn(rows, vocab, generator=g) * pick(0.1, 3.0, 30.0)[:, None]
    logits[torch.rand(rows, vocab, generator=g) < 0.1] = -torch.inf
    logits[:, vocab // 2] = 0.5
    law = settings(
        rows,
        temperature=pick(0.0, 0.3, 0.7, 1.0, 1.9),
        top_k=pick(0, 0, 1, 3, 50, 10_000),
        top_p=pick(1.0, 1.0, 0.95, 0.5, 1e-6, 0.999999),
        min_p=pick(0.0, 0.0, 0.02, 0.5, 1.0),
        key=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        position=torch.randint(0, 5000, (rows,), generator=g),
        epoch=pick(0, 1, 9),
    )
    spec = reference(logits, law)
    for team in TEAMS:
        ours = draw(lanes, team, logits, law)
        agree(ours, spec)
        alone = draw(lanes, team, logits[-1:], tuple(t[-1:] for t in law))
        assert all(torch.equal(a, b[-1:]) for a, b in zip(alone, ours, strict=True))
    forwards, backwards = (draw(lanes, team, logits, law) for team in (KERNEL, BACKWARDS))
    assert all(torch.equal(a, b) for a, b in zip(forwards, backwards, strict=True))


def agree_under(lanes, logits, *laws):
    for law in laws:
        law = settings(len(logits), **law)
        spec = reference(logits, law)
        for team in TEAMS:
            agree(draw(lanes, team, logits, law), spec)


@pytest.mark.parametrize("unit", [1.0, 0.03, 1e-4, 0.0], ids=["depths", "depth", "digit", "one"])
def test_ties_stay_by_id_whichever_digit_decides(lanes, unit):
    logits = torch.randint(-3, 1, (32, 700), generator=torch.Generator().manual_seed(2)) * unit
    logits[::2] *= -1  # the maximum above 0
    logits[:, ::3] = -0.0  # equal to 0
    agree_under(lanes, logits, {"top_k": 100}, {"top_k": 699}, {"top_p": 0.25}, {"top_k": 300, "top_p": 0.75},
                {"temperature": 0.0})  # fmt: skip


@pytest.mark.parametrize("team", TEAMS)
def test_a_threshold_reached_exactly_keeps_no_more(lanes, team):
    flat = torch.zeros(300, 128)
    id, _, kept = draw(lanes, team, flat, settings(300, top_p=0.25))  # 32 tokens are a quarter
    assert set(id.tolist()) == set(range(32)) and (kept == 0.25).all()
    id, _, kept = draw(lanes, team, flat, settings(300, top_k=8, top_p=0.5))
    assert set(id.tolist()) == set(range(4)) and (kept == 4 / 128).all()


def test_values_at_the_ends_of_fp32(lanes):
    big = torch.tensor([3e38, 5e8, 5.5e8, -1e9, 1e-40, 7.0, 0.0])
    logits = torch.randn(35, 300, generator=torch.Generator().manual_seed(4)) * big.repeat(5)[:, None]
    logits[:, 0] = -torch.inf
    agree_under(lanes, logits, {}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 200, "top_p": 0.999},
                {"temperature": 0.0}, {"temperature": 1e-9, "top_p": 0.9})  # fmt: skip


@pytest.mark.parametrize("team", TEAMS)
def test_rows_without_a_law_are_marked_and_alone(lanes, team):
    logits = torch.randn(12, 70, generator=torch.Generator().manual_seed(0))
    clean = draw(lanes, team, logits, settings(12))
    logits[0, 69] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    law = settings(12)
    for r, (setting, value) in enumerate(
        [(0, -1.0), (0, torch.inf), (0, torch.nan), (1, -2), (2, 0.0), (2, torch.nan), (3, -0.1), (3, 1.5)], 3
    ):
        law[setting][r] = value
    id, logprob, kept = draw(lanes, team, logits, law)
    assert (id[:11] == -1).all() and logprob[:11].isnan().all() and kept[:11].isnan().all()
    assert (id[11], logprob[11], kept[11]) == (clean[0][11], clean[1][11], 1)
    assert draw(lanes, team, logits[:0], settings(0))[0].shape == (0,)


def test_weights_are_whole_grains_at_every_depth(lanes):
    """At the ends of each depth and inside: grains times the grain is the weight; 2^19 of them fit a bin."""
    edge = torch.arange(1393) / 16
    below = torch.cat([edge, edge[1:].nextafter(torch.zeros(1392)), edge + 1 / 32, edge + torch.rand(1393) / 16])
    below = below[below <= 87].contiguous()
    n = len(below)
    weight, depth = torch.empty(n), torch.empty(n, dtype=torch.int32)
    grains, grain = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.float64)
    lanes.weigh(ctypes.c_int64(n), *map(pointer, (below, weight, depth, grains, grain)))
    assert depth.max() == 1392 and (weight > 0).all()
    assert torch.equal(grains * grain, weight.double())
    assert (grains >= 2**23).all() and (grains < 2**25).all()


@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_large_vocabularies(lanes, vocab):
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(5)) * torch.tensor([[0.01], [2.0], [6.0]])
    law = settings(3, top_k=[0, 1000, 0], top_p=[0.9, 0.99, 0.9])
    for team in {KERNEL, TEAMS[-1]}:
        agree(draw(lanes, team, logits, law), reference(logits, law))
    flat = torch.zeros(1, vocab)
    id, logprob, kept = draw(lanes, TEAMS[-1], flat, settings(1, top_k=vocab // 2, top_p=0.5))
    assert 0 <= id < vocab // 4 and logprob == -torch.tensor(float(vocab)).log() and kept == 0.25


def test_a_token_far_below_may_win(lanes):
    """Noise that can't win is not drawn: here one of many, 17.5 below the best, does win."""
    logits = torch.full((1, 262_144), -17.5)
    logits[0, 77] = 0
    law = settings(1, key=torch.tensor([242]))
    assert draw(lanes, TEAMS[-1], logits, law)[0] == 244_698
    agree_under(lanes, logits, {"key": torch.tensor([242])}, {"key": torch.tensor([242]), "top_p": 0.999})
