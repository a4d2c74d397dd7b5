"""The losses in Triton: on a GPU, or a few small shapes in the interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch
from loss_cases import DEVICE, F32, POLICY, REGRESSION, batch, check, poison, results

from fastcollab import ops
from fastcollab.losses import advantage_regression, policy_loss

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """In the interpreter a program is slow and a large block of tokens is mostly empty."""
    if DEVICE == "cpu":
        names = ("segments", "policy_loss", "advantage_regression")
        modules = [importlib.import_module(f"fastcollab.kernels.{name}") for name in names]
        for module in modules:  # all are imported by now: one that came later would keep the small block for good
            monkeypatch.setattr(module, "BLOCK", 32)
        monkeypatch.setattr("fastcollab.kernels.segments._CHUNK", 2)
        monkeypatch.setattr("fastcollab.kernels.advantage_regression._SCORED", 4)


@pytest.mark.parametrize("i", range(len(POLICY)), ids=lambda i: str(POLICY[i]))
def test_policy_loss_is_as_exact_as_torch(i):
    check("triton", batch(83, order=("sorted", "random")[i % 2]), **POLICY[i])


@pytest.mark.parametrize("i", range(len(REGRESSION)), ids=lambda i: str(REGRESSION[i]))
def test_regression_is_as_exact_as_torch(i):
    check("triton", batch(83, order=("random", "sorted")[i % 2]), advantage_regression, **REGRESSION[i])


@pytest.mark.parametrize("T", [0, 1, 16, 17])
def test_lengths(T):
    case = batch(T, S=3)
    check("triton", case, beta=0.1, dual_clip=1.2)
    check("triton", case, ratio="sequence", aggregation="sequence-mean")
    check("triton", case, advantage_regression)


def test_nothing_kept():
    case = batch(40, keep=0.0)
    for settings in ({}, {"ratio": "sequence", "aggregation": "sequence-mean", "beta": 0.1}):
        assert check("triton", case, **settings)["loss"] == 0
    assert check("triton", case, advantage_regression)["loss"] == 0


def test_large_ratios_are_capped():
    lp, old, ref, advantage, mask, ids = batch(40, keep=1.0)
    old[3], ref[5], old[7], ref[9] = -500, 90, 300, -400
    for settings in ({"beta": 0.1}, {"form": "cispo", "beta": 1e-3}):
        check("triton", (lp, old, ref, advantage, mask, ids), **settings)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("name", ["logprob", "old", "ref", "advantage", "ids"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_the_loss_nan(name, value):
    case = list(batch(40, keep=1.0))
    at = ["logprob", "old", "ref", "advantage", None, "ids"].index(name)
    case[at][2] = 17 if name == "ids" else value
    if name == "advantage":
        case[5][:] = 2
    with ops.use_impl("triton"):
        for settings in ({"beta": 0.1}, {"ratio": "sequence", "aggregation": "sequence-mean"}):
            assert not results(policy_loss, case, F32, **settings)["loss"].isfinite()
        if name != "ref":
            assert not results(advantage_regression, case, F32)["loss"].isfinite()


def test_the_same_bits_every_time_and_uninitialised_memory_is_never_read():
    case = poison(batch(83, order="random"))
    outputs = []
    for fill in (False, True):
        torch.use_deterministic_algorithms(fill)  # then torch.empty is filled with NaN
        try:
            with ops.use_impl("triton"):
                outputs.append(results(policy_loss, case, F32, ratio="sequence", aggregation="sequence-mean", beta=0.1)
                               | results(advantage_regression, case, F32))  # fmt: skip
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(torch.equal(outputs[0][k], outputs[1][k]) for k in outputs[0])


def test_half_precision_is_widened():
    lp, old, ref, advantage, mask, ids = batch(30)
    for dtype in (torch.float16, torch.bfloat16):
        half = lp.to(dtype).requires_grad_()
        with ops.use_impl("triton"):
            loss, _ = policy_loss(half, old.to(dtype), advantage, mask, ids)
            want, _ = policy_loss(half.float(), old.to(dtype).float(), advantage, mask, ids)
        assert torch.equal(loss, want) and torch.autograd.grad(loss, half)[0].dtype == dtype
