"""Losses: scalar reference, golden numbers, numeric gradients, masks, aggregation, micro-batches, fault cases."""

import json
import math
from pathlib import Path

import pytest
import torch

from fastcollab.losses import (
    advantage_regression,
    anchors,
    effective_advantage,
    kl_estimate,
    merge_metrics,
    policy_loss,
    value_estimate,
)

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}
F64 = torch.float64


def batch(T=23, S=5, seed=0):
    """Log-probs with ratios on both sides of the clip, an empty segment (4), advantage 0 in segment 1."""
    g = torch.Generator().manual_seed(seed)
    lp = -3 * torch.rand(T, generator=g, dtype=F64)
    old, ref = (lp + 0.5 * torch.randn(T, generator=g, dtype=F64) for _ in range(2))
    advantage = torch.tensor([1.3, 0.0, -0.7, 2.0, -1.0], dtype=F64)[:S]
    ids = torch.randint(0, S - 1, (T,), generator=g).sort().values
    mask = torch.rand(T, generator=g) < 0.7
    return lp.requires_grad_(), old, ref, advantage, mask, ids


def scalar_policy_loss(lp, old, ref, advantage, mask, ids, o):
    """The definition in plain Python floats."""
    segments = {}
    for t in range(len(lp)):
        if mask[t]:
            segments.setdefault(int(ids[t]), []).append(t)
    values = {}
    for s, tokens in segments.items():
        A, mean = float(advantage[s]), sum(float(lp[t] - old[t]) for t in tokens) / len(tokens)
        for t in tokens:
            r = math.exp(mean if o.get("ratio") == "sequence" else float(lp[t] - old[t]))
            c = min(max(r, 1 - o.get("clip_low", 0.2)), 1 + o.get("clip_high", 0.2))
            form = o.get("form", "clip")
            if form == "clip":
                x = -min(r * A, c * A)
                if o.get("dual_clip") and A < 0:
                    x = min(x, -o["dual_clip"] * A)
            else:
                x = -A * float(lp[t]) * (c if form == "cispo" else 1)
            d = float(ref[t] - lp[t])
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[o.get("kl", "k3")]
            values.setdefault(s, []).append(x + o.get("beta", 0.0) * kl)
    flat = [x for xs in values.values() for x in xs]
    mode = o.get("aggregation", "token-mean")
    if mode == "token-mean":
        return sum(flat) / len(flat)
    if mode == "sequence-mean":
        return sum(sum(xs) / len(xs) for xs in values.values()) / len(values)
    return sum(flat) / (len(advantage) * o["max_length"])


OPTIONS = [
    {},
    {"clip_low": 0.1, "clip_high": 0.3, "aggregation": "sequence-mean"},
    {"dual_clip": 1.4, "clip_high": 5.0, "aggregation": "constant", "max_length": 9},
    {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "sequence-mean"},
    {"form": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    {"form": "reinforce"},
    {"beta": 0.3, "kl": "k1"},
    {"beta": 0.3, "kl": "k2", "aggregation": "sequence-mean"},
    {"beta": 0.3, "kl": "k3", "form": "reinforce"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_policy_loss_equals_scalar_reference(options):
    lp, old, ref, advantage, mask, ids = batch()
    loss, _ = policy_loss(lp, old, advantage, mask, ids, ref_logprob=ref, **options)
    assert loss.item() == pytest.approx(
        scalar_policy_loss(lp.detach(), old, ref, advantage, mask, ids, options), abs=1e-12
    )


@pytest.mark.parametrize("options", [o for o in OPTIONS if o.get("form") != "cispo"], ids=str)
def test_policy_loss_gradcheck(options):
    lp, old, ref, advantage, mask, ids = batch()
    f = lambda lp: policy_loss(lp, old, advantage, mask, ids, ref_logprob=ref, **options)[0]  # noqa: E731
    assert torch.autograd.gradcheck(f, (lp,))


def test_cispo_weight_is_a_constant():
    lp, old, _, advantage, mask, ids = batch()
    (grad,) = torch.autograd.grad(policy_loss(lp, old, advantage, mask, ids, form="cispo")[0], lp)
    weight = (lp - old).exp().clamp(0.8, 1.2)
    torch.testing.assert_close(grad, torch.where(mask, -weight * advantage[ids], 0) / mask.sum())


def test_on_policy_gradient_is_reinforce():
    lp, _, _, advantage, mask, ids = batch()
    grads = [
        torch.autograd.grad(policy_loss(lp, lp.detach(), advantage, mask, ids, form=form)[0], lp)[0]
        for form in ("clip", "cispo", "reinforce")
    ]
    torch.testing.assert_close(grads[0], grads[2])
    torch.testing.assert_close(grads[1], grads[2])
    sequence, _ = policy_loss(lp, lp.detach(), advantage, mask, ids, ratio="sequence")
    torch.testing.assert_close(torch.autograd.grad(sequence, lp)[0], grads[2])


def test_only_the_current_log_probs_get_a_gradient():
    lp, _, _, advantage, mask, ids = batch()
    for loss_of in (
        lambda old: policy_loss(lp, old, advantage, mask, ids, ref_logprob=old - 0.1, beta=0.5)[0],
        lambda old: advantage_regression(lp, old, advantage, mask, ids, 0.1)[0],
    ):
        frozen, live = (torch.autograd.grad(loss_of(old), lp)[0] for old in (lp.detach(), lp))
        assert torch.equal(frozen, live) and (frozen != 0).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_contribute_exactly_nothing(poison):
    lp, old, ref, advantage, mask, ids = batch()
    options = {"beta": 0.1, "aggregation": "sequence-mean"}

    def run(fill):
        a, b, c = (torch.where(mask, x.detach(), fill) for x in (lp, old, ref))
        a.requires_grad_()
        where = torch.where(mask, ids, -100)
        loss, metrics = policy_loss(a, b, advantage, mask, where, ref_logprob=c, ratio="sequence", **options)
        regression, more = advantage_regression(a, b, advantage, mask, where, 0.1)
        return torch.autograd.grad(loss + regression, a)[0], loss, regression, *metrics.values(), *more.values()

    for x, y in zip(run(0.0), run(poison), strict=True):
        assert torch.equal(x, y)
    assert (run(poison)[0][~mask] == 0).all()


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "constant"])
def test_nothing_kept(aggregation):
    lp, old, ref, advantage, mask, ids = batch()
    for tokens in (len(lp), 0):
        lp, mask, ids = lp[:tokens], torch.zeros(tokens, dtype=torch.bool), ids[:tokens]
        loss, metrics = policy_loss(
            lp,
            old[:tokens],
            advantage,
            mask,
            ids,
            aggregation=aggregation,
            max_length=7,
            ref_logprob=ref[:tokens],
            beta=0.1,
        )
        regression, more = advantage_regression(lp, old[:tokens], advantage, mask, ids, 0.1)
        assert loss.item() == regression.item() == 0
        assert (torch.autograd.grad(loss + regression, lp)[0] == 0).all()
        assert merge_metrics([metrics]) == {"num_loss_tokens": 0, "num_loss_segments": 0} == merge_metrics([more])


@pytest.mark.parametrize(
    ("aggregation", "denominator"), [("token-mean", "tokens"), ("sequence-mean", "segments"), ("constant", "all")]
)
def test_micro_batches_add_up(aggregation, denominator):
    lp, old, ref, advantage, mask, ids = batch()
    options = {"aggregation": aggregation, "max_length": 9, "ref_logprob": ref, "beta": 0.2, "dual_clip": 1.3}
    whole, whole_metrics = policy_loss(lp, old, advantage, mask, ids, **options)
    counts = {"tokens": mask.sum(), "segments": len(ids[mask].unique()), "all": len(advantage)}
    regression, regression_metrics = advantage_regression(lp, old, advantage, mask, ids, 0.1)
    total, parts, regression_total, regression_parts = 0, [], 0, []
    for segments in ([0, 3], [1], [2, 4]):
        here = torch.isin(ids, torch.tensor(segments))
        local = torch.searchsorted(torch.tensor(segments), ids[here])
        options["ref_logprob"] = ref[here]
        args = (advantage[segments], mask[here], local)
        loss, metrics = policy_loss(lp[here], old[here], *args, denominator=counts[denominator], **options)
        total, parts = total + loss, [*parts, metrics]
        loss, metrics = advantage_regression(lp[here], old[here], *args, 0.1, denominator=counts["segments"])
        regression_total, regression_parts = regression_total + loss, [*regression_parts, metrics]
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(regression_total, regression)
    assert merge_metrics(parts) == pytest.approx(merge_metrics([whole_metrics]))
    assert merge_metrics(regression_parts) == pytest.approx(merge_metrics([regression_metrics]))


def test_runaway_ratio_is_capped():
    lp = torch.tensor([-1.0, -1.0], requires_grad=True)
    mask, ids = torch.ones(2, dtype=torch.bool), torch.arange(2)
    loss, metrics = policy_loss(lp, torch.tensor([-500.0, -1.1]), torch.tensor([-1.0, -1.0]), mask, ids)
    (grad,) = torch.autograd.grad(loss, lp)
    assert loss.isfinite() and grad[0] == 0 and grad[1] > 0
    assert metrics["max/ratio"].item() == pytest.approx(math.exp(20))


def test_half_precision_is_computed_in_fp32():
    lp, old, _, advantage, mask, ids = batch()
    half = lp.detach().bfloat16().requires_grad_()
    loss, _ = policy_loss(half, old.bfloat16(), advantage, mask, ids)
    want, _ = policy_loss(half.float(), old.bfloat16().float(), advantage.float(), mask, ids)
    assert loss.dtype == torch.float32 and torch.equal(loss, want)
    assert torch.autograd.grad(loss, half)[0].dtype == torch.bfloat16


def test_metrics_are_raw_and_hand_checked():
    lp = torch.tensor([0.5, 2.0, 1.0, 0.4, 3.0, 9.0]).log()
    old = torch.zeros(6)
    mask = torch.tensor([True] * 5 + [False])
    ids = torch.tensor([0, 0, 0, 1, 1, 1])
    _, metrics = policy_loss(lp, old, torch.tensor([1.0, -1.0]), mask, ids, ref_logprob=lp - 1, dual_clip=2.0)
    merged = merge_metrics([metrics])
    assert merged == pytest.approx(
        {
            "num_loss_tokens": 5,
            "num_loss_segments": 2,
            "ratio/mean": 6.9 / 5,
            "ratio/min": 0.4,
            "ratio/max": 3.0,
            "clip_ratio/high_mean": 1 / 5,  # 2.0 with A > 0
            "clip_ratio/low_mean": 1 / 5,  # 0.4 with A < 0
            "clip_ratio/region_mean": 2 / 5,
            "clip_ratio/dual_mean": 1 / 5,  # 3.0 with A < 0
            "approx_kl": sum(r - 1 - math.log(r) for r in (0.5, 2, 1, 0.4, 3)) / 5,
            "kl": math.exp(-1),
        },
        abs=1e-6,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": None}, r"mask: got 'no mask', need bool \[23\]"),
        ({"mask": torch.ones(23)}, r"mask: got 'torch.float32 \[23\]', need bool"),
        ({"mask": torch.ones(22, dtype=torch.bool)}, r"torch.bool \[22\]', need bool \[23\]"),
        ({"old_logprob": torch.zeros(22)}, r"logprob, old_logprob: got \[\[23\], \[22\]\], need \[23\] each"),
        ({"old_logprob": torch.full((23,), float("nan"))}, "token 0 of segment 0: got .*'old_logprob': nan"),
        ({"advantage": torch.zeros(2)}, r"segment_ids: got \(0, 3\), need in \[0, 2\)"),
        ({"advantage": torch.tensor([0.0, 0, float("nan"), 0])}, "advantage of segment 2: got 'NaN or inf'"),
        ({"beta": 0.1}, "ref_logprob: got None"),
        ({"form": "ppo"}, "form: got 'ppo'"),
        ({"ratio": "group"}, "ratio: got 'group'"),
        ({"aggregation": "mean"}, "aggregation: got 'mean'"),
        ({"aggregation": "constant"}, "max_length: got None"),
        ({"dual_clip": 0.5}, "dual_clip: got 0.5"),
    ],
)
def test_bad_input(change, message):
    lp, old, _, advantage, _, ids = batch()
    mask = torch.ones(23, dtype=torch.bool)
    arguments = {"logprob": lp, "old_logprob": old, "advantage": advantage, "mask": mask, "segment_ids": ids}
    with pytest.raises(ValueError, match=message):
        policy_loss(**arguments | change)


GOLDEN = {None: (1.1, -0.64, 0.4096, -0.128, 2.048, 0.75), -1.0: (-1.9, -0.94, 0.8836, -0.188, 4.418, 1.05)}


@pytest.mark.parametrize("kappa", [None, -1.0], ids=["proxy", "const"])
def test_regression_golden_numbers(kappa):
    log_ratio, e, L, dL, scaled, effective = GOLDEN[kappa]
    old = torch.tensor([-1.2, -0.4, -4.0], dtype=F64)
    lp = torch.tensor([-1.0, -0.5, -3.0], dtype=F64, requires_grad=True)
    a = anchors(old, torch.tensor([False, False, True]), kappa)
    A = torch.tensor([1 - 0.25], dtype=F64)
    mask, ids = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    loss, metrics = advantage_regression(lp, a, A, mask, ids, 0.1)
    assert loss.item() == pytest.approx(scaled, abs=1e-12)
    assert torch.autograd.grad(loss, lp)[0].tolist() == pytest.approx([dL / 0.2] * 3, abs=1e-12)
    assert metrics["segment_sum/residual_sq"].item() == pytest.approx(L, abs=1e-12) == pytest.approx(e * e)
    assert metrics["segment_sum/log_ratio"].item() == pytest.approx(log_ratio, abs=1e-12)
    assert effective_advantage(a, old, A, mask, ids, 0.1).item() == pytest.approx(effective, abs=1e-12)


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
def test_regression_golden_numbers_at_the_logits(kappa):
    z = torch.tensor([[0.3, -0.2, 0.1], [0, 0.5, -0.5]], dtype=F64, requires_grad=True)
    z_t = torch.tensor([[0.1, 0, -0.1], [0.2, 0.1, -0.3]], dtype=F64)
    y = torch.tensor([[1], [2]])
    lp, old = (x.log_softmax(-1).gather(1, y)[:, 0] for x in (z, z_t))
    a = anchors(old, torch.tensor([False, True]), kappa)
    mask, ids = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    loss, _ = advantage_regression(lp, a, torch.tensor([0.75], dtype=F64), mask, ids, 0.1)
    unscaled = 2 * 0.1 * loss
    L, dz = LOGIT_GOLDEN[kappa]
    assert unscaled.item() == pytest.approx(L, abs=1e-14)
    torch.testing.assert_close(torch.autograd.grad(unscaled, z)[0], torch.tensor(dz, dtype=F64), atol=1e-14, rtol=0)


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


def test_c05_aggregation_modes():
    case = CASES["C05"]
    given, want = case["input"], case["expected"]
    N = len(given["lengths"])

    def check(repeats, width):
        rows = [(i, t, r) for r in range(repeats) for i in range(N) for t in range(width or given["lengths"][i])]
        # advantage -1 and no ratio: a token's loss is its log-prob
        lp = torch.tensor([0.1 * (i + 1) + 0.01 * t for i, t, _ in rows], dtype=F64)
        mask = torch.tensor([t < given["lengths"][i] for i, t, _ in rows])
        ids = torch.tensor([r * N + i for i, _, r in rows])
        A = -torch.ones(N * repeats, dtype=F64)
        modes = {"token_mean": "token-mean", "seq_mean_token_mean": "sequence-mean", "dr_grpo_const": "constant"}
        for name, mode in modes.items():
            options = {"form": "reinforce", "aggregation": mode, "max_length": given["L_const"]}
            loss, _ = policy_loss(lp, lp, A, mask, ids, **options)
            assert loss.item() == pytest.approx(want[name], abs=case["tolerance"])
            assert all(abs(loss.item() - wrong) > 1e-3 for wrong in case["wrong_value_to_watch"].values())
        total, _ = policy_loss(lp, lp, A, mask, ids, form="reinforce", denominator=1)
        assert total.item() == pytest.approx(want["sum"] * repeats, abs=case["tolerance"])

    check(1, None)
    check(2, None)
    check(1, 16)


def test_c07_kl_under_large_drift():
    case = CASES["C07"]
    want, pairs = case["expected"], torch.tensor(case["input"]["pairs_logp_ref"], dtype=torch.float32)
    close = lambda x: pytest.approx(x, abs=case["tolerance"])  # noqa: E731
    lp, ref = pairs[:, 0].clone().requires_grad_(), pairs[:, 1]
    k1, k2, k3 = (kl_estimate(lp, ref, kind) for kind in ("k1", "k2", "k3"))
    assert [k[0].item() for k in (k1, k2, k3)] == [close(want["pair0"][k]) for k in ("k1", "k2", "k3")]
    assert k1[1].item() == close(want["pair1_k1"]) and k2[1].item() == close(want["pair1_k2"])
    assert k3[1].item() == pytest.approx(math.exp(20) - 21, rel=1e-6)
    for kind in (k1, k2, k3):
        assert torch.autograd.grad(kind.sum(), lp, retain_graph=True)[0].isfinite().all()
    (grad,) = torch.autograd.grad(k3.sum(), lp)
    assert grad[0].item() == close(want["pair0"]["dk3_dlogp"]) and grad[1] <= 0

    zero, ids = torch.zeros(1), torch.zeros(2, dtype=torch.int64)
    for name, mask in (("mask", case["input"]["mask"]), ("repeat", case["input"]["repeat_with_mask"])):
        kept = torch.tensor(mask, dtype=torch.bool)
        loss, _ = policy_loss(lp, lp.detach(), zero, kept, ids, ref_logprob=ref, beta=1.0, denominator=1)
        (grad,) = torch.autograd.grad(loss, lp)
        assert loss.isfinite() and grad.isfinite().all()
        if name == "repeat":
            assert loss.item() == close(want["pair0"]["k3"]) and grad.tolist() == [
                close(want["pair0"]["dk3_dlogp"]),
                0.0,
            ]


def test_c09_old_log_probs_stay_frozen_on_reuse():
    case = CASES["C09"]
    given, want = case["input"], case["expected"]
    theta = torch.zeros(2, dtype=F64, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=given["lr"])
    action = torch.tensor([given["sampled_action"]])
    old = theta.log_softmax(-1)[action].detach()
    for i in range(given["inner_passes"]):
        optimizer.zero_grad()
        loss, metrics = policy_loss(
            theta.log_softmax(-1)[action],
            old,
            torch.tensor([given["A"]]),
            torch.ones(1, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
            clip_low=given["eps"],
            clip_high=given["eps"],
        )
        loss.backward()
        expected = want[f"pass{i + 1}"]
        assert metrics["token_sum/ratio"].item() == pytest.approx(expected["ratio"], abs=case["tolerance"])
        assert loss.item() == pytest.approx(expected["loss"], abs=case["tolerance"])
        assert theta.grad.tolist() == pytest.approx(expected["grad"], abs=case["tolerance"])
        optimizer.step()
    assert theta.tolist() == pytest.approx(want["theta_after"], abs=case["tolerance"])
    assert theta.tolist() != pytest.approx(case["wrong_value_to_watch"]["theta_if_refreshed"], abs=1e-3)


def test_c11_value_as_log_mean_exp():
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
        loss, _ = advantage_regression(lp, torch.zeros(12), A, mask, ids, beta)
        unscaled = 2 * beta * loss
        assert unscaled.item() == pytest.approx(want[name], abs=case["tolerance"])
        if beta == 0.5:
            grad = torch.autograd.grad(unscaled, lp)[0].view(4, 3)
            assert grad[:, 0].tolist() == pytest.approx(want["dloss_dS_beta0.5"], abs=case["tolerance"])
            assert torch.equal(grad[:, 0], grad[:, 1]) and (grad[:, 2] == 0).all()
