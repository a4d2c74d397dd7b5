"""The advantage regression: golden numbers of the MInTRL spec, numeric gradients, anchors, the soft value."""

import json
import math
from pathlib import Path

import pytest
import torch
from loss_cases import IMPLS, on
from test_losses import batch

from fastcollab.losses import advantage_regression, anchors, effective_advantage, value_estimate

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}
F64 = torch.float64


GOLDEN = {None: (1.1, -0.64, 0.4096, -0.128, 2.048, 0.75), -1.0: (-1.9, -0.94, 0.8836, -0.188, 4.418, 1.05)}


@pytest.mark.parametrize("kappa", [None, -1.0], ids=["proxy", "const"])
@IMPLS
def test_regression_golden_numbers(impl, dtype, tolerance, kappa):
    log_ratio, e, L, dL, scaled, effective = GOLDEN[kappa]
    old = torch.tensor([-1.2, -0.4, -4.0], dtype=dtype)
    lp = torch.tensor([-1.0, -0.5, -3.0], dtype=dtype, requires_grad=True)
    a = anchors(old, torch.tensor([False, False, True]), kappa)
    A = torch.tensor([1 - 0.25], dtype=dtype)
    mask, ids = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    loss, metrics = on(impl, advantage_regression)(lp, a, A, mask, ids, 0.1)
    assert loss.item() == pytest.approx(scaled, abs=tolerance)
    assert torch.autograd.grad(loss, lp)[0].tolist() == pytest.approx([dL / 0.2] * 3, abs=tolerance)
    assert metrics["segment_sum/residual_sq"].item() == pytest.approx(L, abs=tolerance)
    assert pytest.approx(L, abs=1e-12) == e * e
    assert metrics["segment_sum/log_ratio"].item() == pytest.approx(log_ratio, abs=tolerance)
    assert effective_advantage(a, old, A, mask, ids, 0.1).item() == pytest.approx(effective, abs=tolerance)


LOGIT_GOLDEN = {
    None: (
        0.6469690265438106,
        [[0.06633048661977056, -0.12063729588200431, 0.05430680926223375],
         [0.04941822418953479, 0.0814768773815136, -0.1308951015710484]],
    ),
    -1.0: (
        0.716438012901208,
        [[0.06980085606806055, -0.1269489635221516, 0.05714810745409104],
         [0.05200375467718524, 0.08573969649254658, -0.13774345116973183]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kappa", [None, -1.0], ids=["proxy", "const"])
@IMPLS
def test_regression_golden_numbers_at_the_logits(impl, dtype, tolerance, kappa):
    z = torch.tensor([[0.3, -0.2, 0.1], [0, 0.5, -0.5]], dtype=dtype, requires_grad=True)
    z_t = torch.tensor([[0.1, 0, -0.1], [0.2, 0.1, -0.3]], dtype=dtype)
    y = torch.tensor([[1], [2]])
    lp, old = (x.log_softmax(-1).gather(1, y)[:, 0] for x in (z, z_t))
    a = anchors(old, torch.tensor([False, True]), kappa)
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    loss, _ = on(impl, advantage_regression)(lp, a, torch.tensor([0.75], dtype=dtype), mask, ids, 0.1)
    unscaled = 2 * 0.1 * loss
    L, dz = LOGIT_GOLDEN[kappa]
    assert unscaled.item() == pytest.approx(L, abs=tolerance)
    (grad,) = torch.autograd.grad(unscaled, z)
    torch.testing.assert_close(grad, torch.tensor(dz, dtype=dtype), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"length_norm": "seq"}, {"length_norm": "max", "max_length": 9}, {"floor": -2.0}]
)
def test_regression_gradcheck_and_definition(options):
    lp, old, _, advantage, mask, ids = batch()
    f = lambda lp: advantage_regression(lp, old, advantage, mask, ids, 0.3, **options)[0]  # noqa: E731
    assert torch.autograd.gradcheck(f, (lp,))
    floor = options.get("floor", -math.inf)
    want, n = 0.0, 0
    for s in range(len(advantage)):
        own = mask & (ids == s)
        if own.any():
            e = 0.3 * (lp[own].clamp(min=floor) - old[own].clamp(min=floor)).sum() - advantage[s]
            want, n = want + e**2 / 0.6 / {"seq": own.sum(), "max": 9}.get(options.get("length_norm"), 1), n + 1
    torch.testing.assert_close(f(lp), want / n)


def test_regression_starts_as_reinforce_whatever_beta():
    lp, _, _, advantage, mask, ids = batch()
    n = len(ids[mask].unique())
    for beta in (1e-3, 1.0):
        loss, _ = advantage_regression(lp, lp.detach(), advantage, mask, ids, beta)
        torch.testing.assert_close(torch.autograd.grad(loss, lp)[0], torch.where(mask, -advantage[ids], 0) / n)


def test_long_sequences_are_summed_in_fp64():
    lp = torch.full((200_000,), -1e-3) - torch.arange(200_000) % 7 * 1e-4
    exact = lp.double().sum()
    mask, ids = torch.ones(200_000, dtype=torch.bool), torch.zeros(200_000, dtype=torch.int64)
    _, metrics = advantage_regression(lp, torch.zeros_like(lp), torch.zeros(1), mask, ids, 1e-3)
    assert metrics["segment_sum/log_ratio"].item() == pytest.approx(exact.item(), rel=1e-12)


def test_regression_floor_counts_and_tames_minus_infinity():
    lp = torch.tensor([-1.0, -torch.inf], requires_grad=True)
    args = (
        torch.tensor([-1.5, -torch.inf]),
        torch.ones(1),
        torch.ones(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.int64),
    )
    loss, metrics = advantage_regression(lp, *args, 0.1, floor=-30.0)
    grad = torch.autograd.grad(loss, lp)[0]
    assert grad[0] != 0 and grad[1] == 0 and metrics["count/floored"] == 1
    with pytest.raises(ValueError, match="token 1 of segment 0: got .*-inf"):
        advantage_regression(lp, *args, 0.1)


def test_anchors():
    old, foreign = torch.tensor([-0.5, -0.3, -4.0], requires_grad=True), torch.tensor([False, True, True])
    assert torch.equal(anchors(old, foreign), old.detach()) and not anchors(old, foreign).requires_grad
    assert anchors(old, foreign, -1.0).tolist() == [-0.5, -1.0, -1.0]
    torch.testing.assert_close(anchors(old, foreign, -1.0, at_least_old=True), torch.tensor([-0.5, -0.3, -1.0]))
    nobody = torch.zeros(3, dtype=torch.bool)
    assert torch.equal(anchors(old, nobody, -1.0), anchors(old, nobody))
    with pytest.raises(ValueError, match="kappa: got 0.5, need <= 0"):
        anchors(old, foreign, 0.5)


@IMPLS
def test_c11_value_as_log_mean_exp(impl, dtype, tolerance):
    case = CASES["C11"]
    given, want = case["input"], case["expected"]
    rewards = torch.tensor(given["rewards"], dtype=getattr(torch, given["dtype"]))
    padded = torch.cat([rewards, torch.full((3,), 99.0)])
    for beta in given["betas"]:
        expected = pytest.approx(want["V"][f"{beta:g}"], abs=case["tolerance"])
        assert value_estimate(rewards, beta).item() == expected
        assert value_estimate(padded, beta, torch.arange(7) < 4).item() == expected
        assert torch.equal(
            value_estimate(torch.stack([rewards, rewards.flip(0)]), beta)[1], value_estimate(rewards, beta)
        )
    assert value_estimate(rewards, 0.0).item() == 0.5

    sums = torch.tensor(given["sum_logratio_per_trajectory"])
    lp = torch.stack([sums - 0.25, torch.full((4,), 0.25), torch.full((4,), 7.0)], 1).flatten().requires_grad_()
    mask, ids = torch.tensor([True, True, False]).repeat(4), torch.arange(4).repeat_interleave(3)
    for beta, name in ((0.5, "loss_beta0.5"), (0.001, "loss_beta0.001")):
        A = rewards - value_estimate(rewards, beta)
        loss, _ = on(impl, advantage_regression)(lp, torch.zeros(12), A, mask, ids, beta)
        unscaled = 2 * beta * loss
        assert unscaled.item() == pytest.approx(want[name], abs=case["tolerance"])
        if beta == 0.5:
            grad = torch.autograd.grad(unscaled, lp)[0].view(4, 3)
            assert grad[:, 0].tolist() == pytest.approx(want["dloss_dS_beta0.5"], abs=case["tolerance"])
            assert torch.equal(grad[:, 0], grad[:, 1]) and (grad[:, 2] == 0).all()


def test_without_interventions_it_is_pmd_mean():
    """7.7: OpenKimi's 0.5 tau (A / tau - Lambda)^2 / T of each rollout, tau = beta."""
    lp, old, _, advantage, mask, ids = batch()
    total, n = 0.0, 0
    for s in range(len(advantage)):
        own = mask & (ids == s)
        if own.any():
            total += 0.5 * 0.3 * (advantage[s] / 0.3 - (lp - old)[own].sum()) ** 2 / own.sum()
            n += 1
    loss, _ = advantage_regression(lp, old, advantage, mask, ids, 0.3, length_norm="seq")
    torch.testing.assert_close(loss, total / n)
