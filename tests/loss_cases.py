"""What the tests of the losses share: inputs, settings, and the comparison with fp64 under the accuracy rule."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from fastcollab import ops
from fastcollab.losses import policy_loss
from fastcollab.reference import losses as reference

F32, F64 = torch.float32, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_native = pytest.mark.skipif(ops.NATIVE_ABSENT is not None, reason=str(ops.NATIVE_ABSENT))
_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
IMPLS = pytest.mark.parametrize(
    ("impl", "dtype", "tolerance"),
    [
        pytest.param("reference", F64, 1e-12, id="reference"),
        pytest.param("native", F32, 2e-6, id="native", marks=_native),
        pytest.param("triton", F32, 2e-6, id="triton", marks=_triton),
    ],
)

POLICY = [
    {},
    {"beta": 0.3, "kl": "k3", "clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.4},
    {"beta": 0.3, "kl": "k1", "aggregation": "sequence-mean"},
    {"beta": 0.3, "kl": "k2", "aggregation": "constant", "max_length": 9, "denominator": 5},
    {"ratio": "sequence", "clip_low": 0.02, "clip_high": 0.03, "aggregation": "sequence-mean"},
    {"ratio": "sequence", "dual_clip": 1.05, "clip_high": 5.0, "beta": 0.1, "kl": "k3"},
    {"form": "cispo", "clip_low": 1.0, "clip_high": 0.3, "denominator": torch.tensor(7.0)},
    {"form": "cispo", "ratio": "sequence", "beta": 0.2, "kl": "k2", "aggregation": "sequence-mean"},
    {"form": "reinforce", "aggregation": "constant", "max_length": 11},
    {"form": "reinforce", "beta": 1.5, "kl": "k3", "aggregation": "sequence-mean"},
]
REGRESSION = [
    {},
    {"length_norm": "seq", "denominator": torch.tensor(3)},
    {"length_norm": "max", "max_length": 9},
    {"floor": -2.0},
    {"floor": -1.5, "length_norm": True, "denominator": 11},
]


def batch(T, S=5, order="sorted", keep=0.7, seed=0, spread=0.4):
    """logprob, old, ref, advantage, mask, ids in fp32; the last segment is empty, the second has advantage 0."""
    g = torch.Generator().manual_seed(seed + T)
    lp = -3 * torch.rand(T, generator=g)
    old, ref = (lp + spread * torch.randn(T, generator=g) for _ in range(2))
    advantage = torch.randn(S, generator=g)
    advantage[1:2] = 0
    ids = torch.randint(0, max(S - 1, 1), (T,), generator=g)
    ids = ids.sort().values if order == "sorted" else ids
    return [x.to(DEVICE) for x in (lp, old, ref, advantage, torch.rand(T, generator=g) < keep, ids)]


def poison(case, value=float("nan"), segment=-100):
    """The same case with masked tokens that hold what nobody may read."""
    lp, old, ref, advantage, mask, ids = case
    lp, old, ref = (torch.where(mask, x, value) for x in (lp, old, ref))
    return lp, old, ref, advantage, mask, torch.where(mask, ids, segment)


def on(impl, loss_of):
    """The loss by one implementation, on its device, for CPU tensors."""

    def to(x):
        return x.to(DEVICE) if impl == "triton" and isinstance(x, torch.Tensor) else x

    def run(*args, **settings):
        with ops.use_impl(impl):
            loss, metrics = loss_of(*map(to, args), **{name: to(x) for name, x in settings.items()})
        return loss.cpu(), {name: x.cpu() for name, x in metrics.items()}

    return run


def results(loss_of, case, dtype, **settings):
    """Loss, gradient and metrics, all fp64, of a loss in ``dtype``."""
    lp, old, ref, advantage, mask, ids = (x.to(dtype) if x.is_floating_point() else x for x in case)
    lp = lp.clone().requires_grad_()
    if loss_of in (policy_loss, reference.policy_loss):
        loss, metrics = loss_of(lp, old, advantage, mask, ids, ref_logprob=ref, **settings)
    else:
        loss, metrics = loss_of(lp, old, advantage, mask, ids, settings.pop("coefficient", 0.1), **settings)
    assert loss.dtype == dtype and loss.ndim == 0 and not any(x.requires_grad for x in metrics.values())
    (grad,) = torch.autograd.grad(3 * loss, lp)
    return {"loss": loss.detach().double(), "grad": grad.double()} | {k: v.double() for k, v in metrics.items()}


def check(impl, case, loss_of=policy_loss, **settings):
    """Value, gradient and every metric: at most twice plain fp32 torch's error, or a rounding of the largest value.

    That is at least 1/2, since every sum has terms (ratios, differences of log-probs) of that size.

    The masked tokens are poisoned for ``impl`` alone.
    """
    plain = getattr(reference, loss_of.__name__)
    truth, torch_32 = (results(plain, case, dtype, **settings) for dtype in (F64, F32))
    with ops.use_impl(impl):
        ours = results(loss_of, poison(case), F32, **settings)
    assert ours.keys() == truth.keys()
    for name, want in truth.items():
        if not want.numel():
            continue
        error, allowed = (ours[name] - want).abs().max(), (torch_32[name] - want).abs().max()
        exact = want.isinf().all() and torch.equal(ours[name], want)
        tiny = 2.0**-22 * want.abs().max().clamp(min=0.5)
        assert exact or error <= 2 * allowed + tiny, (name, settings, float(error), float(allowed))
    mask = case[4]
    assert (ours["grad"][~mask] == 0).all()
    return ours
