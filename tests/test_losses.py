"""Losses: scalar reference, golden numbers, numeric gradients, masks, aggregation, micro-batches, fault cases."""

import json
import math
from pathlib import Path

import pytest
import torch
from loss_cases import IMPLS, on

from fastcollab.losses import advantage_regression, kl_estimate, merge_metrics, policy_loss

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
def test_micro_batches_add_up(aggregation, denominator, monkeypatch):
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
    monkeypatch.setattr(torch.Tensor, "__float__", None)  # metrics leave the device at once, not one by one
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


@IMPLS
def test_c05_aggregation_modes(impl, dtype, tolerance):
    case, loss_of = CASES["C05"], on(impl, policy_loss)
    close = {"abs": max(case["tolerance"], tolerance)}
    given, want = case["input"], case["expected"]
    N = len(given["lengths"])

    def check(repeats, width):
        rows = [(i, t, r) for r in range(repeats) for i in range(N) for t in range(width or given["lengths"][i])]
        # advantage -1 and no ratio: a token's loss is its log-prob
        lp = torch.tensor([0.1 * (i + 1) + 0.01 * t for i, t, _ in rows], dtype=dtype)
        mask = torch.tensor([t < given["lengths"][i] for i, t, _ in rows])
        ids = torch.tensor([r * N + i for i, _, r in rows])
        A = -torch.ones(N * repeats, dtype=dtype)
        modes = {"token_mean": "token-mean", "seq_mean_token_mean": "sequence-mean", "dr_grpo_const": "constant"}
        for name, mode in modes.items():
            options = {"form": "reinforce", "aggregation": mode, "max_length": given["L_const"]}
            loss, _ = loss_of(lp, lp, A, mask, ids, **options)
            assert loss.item() == pytest.approx(want[name], **close)
            assert all(abs(loss.item() - wrong) > 1e-3 for wrong in case["wrong_value_to_watch"].values())
        total, _ = loss_of(lp, lp, A, mask, ids, form="reinforce", denominator=1)
        assert total.item() == pytest.approx(want["sum"] * repeats, **close)

    check(1, None)
    check(2, None)
    check(1, 16)


@IMPLS
def test_c07_kl_under_large_drift(impl, dtype, tolerance):
    case = CASES["C07"]
    want, pairs = case["expected"], torch.tensor(case["input"]["pairs_logp_ref"], dtype=dtype)
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
        loss, _ = on(impl, policy_loss)(lp, lp.detach(), zero, kept, ids, ref_logprob=ref, beta=1.0, denominator=1)
        (grad,) = torch.autograd.grad(loss, lp)
        assert loss.isfinite() and grad.isfinite().all()
        if name == "repeat":
            assert loss.item() == close(want["pair0"]["k3"]) and grad.tolist() == [
                close(want["pair0"]["dk3_dlogp"]),
                0.0,
            ]


@IMPLS
def test_c09_old_log_probs_stay_frozen_on_reuse(impl, dtype, tolerance):
    case = CASES["C09"]
    given, want = case["input"], case["expected"]
    close = {"abs": max(case["tolerance"], tolerance)}
    theta = torch.zeros(2, dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=given["lr"])
    action = torch.tensor([given["sampled_action"]])
    old = theta.log_softmax(-1)[action].detach()
    for i in range(given["inner_passes"]):
        optimizer.zero_grad()
        loss, metrics = on(impl, policy_loss)(
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
        assert metrics["token_sum/ratio"].item() == pytest.approx(expected["ratio"], **close)
        assert loss.item() == pytest.approx(expected["loss"], **close)
        assert theta.grad.tolist() == pytest.approx(expected["grad"], **close)
        optimizer.step()
    assert theta.tolist() == pytest.approx(want["theta_after"], **close)
    assert theta.tolist() != pytest.approx(case["wrong_value_to_watch"]["theta_if_refreshed"], abs=1e-3)
