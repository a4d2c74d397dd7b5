"""Group-relative advantages: hand-checked values, degenerate groups, abstentions."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from fastcollab.advantages import control_advantages, group_advantages, has_reward
from fastcollab.losses import policy_loss
from fastcollab.rewards import RewardFunctions

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "cases.json").read_text())}
NAN = float("nan")


def test_hand_values_and_metrics():
    advantage, metrics = group_advantages([1.0, 0.0, 3.0, 3.0], [7, 7, -2, -2])
    assert advantage.dtype == torch.float32
    torch.testing.assert_close(advantage, torch.tensor([0.5, -0.5, 0, 0]) / (0.5**0.5 + 1e-6))
    assert metrics == {
        "reward": 1.75,
        "reward_std": pytest.approx(0.5**0.5 / 2),
        "frac_reward_zero_std": 0.5,
        "reward/abstain_frac": 0.0,
    }


def test_without_scale():
    advantage, _ = group_advantages([[1.0, 0.0, 0.5], [2.0]], scale="none")
    assert advantage.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_order_and_neighbours_do_not_matter():
    rng = random.Random(0)
    rewards, ids = [rng.random() for _ in range(60)], [rng.randrange(7) for _ in range(60)]
    whole, _ = group_advantages(rewards, ids)
    order = rng.sample(range(60), 60)
    shuffled, _ = group_advantages(
        torch.tensor([rewards[i] for i in order], dtype=torch.float64), [ids[i] for i in order]
    )
    torch.testing.assert_close(shuffled, whole[order])
    alone, _ = group_advantages([r for r, g in zip(rewards, ids, strict=True) if g == 3], [3] * ids.count(3))
    torch.testing.assert_close(alone, whole[torch.tensor(ids) == 3])


def test_abstained_rows():
    rewards = [1.0, None, 0.0, NAN, 5.0, None]
    advantage, metrics = group_advantages(rewards, [0, 0, 0, 0, 1, 1])
    assert has_reward(rewards).tolist() == [True, False, True, False, True, False]
    torch.testing.assert_close(advantage, torch.tensor([0.5, 0, -0.5, 0, 0, 0]) / 0.5**0.5, atol=2e-6, rtol=0)
    assert metrics["reward"] == 2.0 and metrics["reward/abstain_frac"] == 0.5 and metrics["frac_reward_zero_std"] == 0.5
    nothing, metrics = group_advantages([None, None], [0, 0])
    assert nothing.tolist() == [0, 0] and metrics == {"reward/abstain_frac": 1.0}


def test_nearly_equal_rewards_count_as_equal():
    advantage, metrics = group_advantages([[0.3, 0.3 + 1e-9, 0.3], [0.3, 0.3 + 1e-3]])
    assert (advantage[:3] == 0).all() and advantage[4] > 0.7 and metrics["frac_reward_zero_std"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, float("inf")], [0, 0]), "reward of row 1: got 'inf'"),
        (([1.0, 2.0], [0]), "number of group_ids: got 1, need 2, one per reward"),
        (([1.0], [0], "batch"), "scale: got 'batch'"),
        (([], []), "number of rewards: got 0"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(*arguments)


def test_c01_degenerate_groups():
    case = CASES["C01"]
    groups, want = case["input"]["groups"], case["expected"]
    rewards = torch.tensor([r for g in groups for r in g], dtype=getattr(torch, case["input"]["dtype"]))
    ids = [i for i, g in enumerate(groups) for _ in g]
    for eps in case["input"]["eps_to_try"]:
        advantage, _ = group_advantages(rewards, ids, eps=eps)
        assert (advantage[:6] == 0).all()
        assert advantage[9:].tolist() == want["group2"]
        if eps == 1e-4:
            expected = torch.tensor(want["group1_ddof1_eps1e-4"])
            torch.testing.assert_close(advantage[6:9], expected, atol=case["tolerance"], rtol=0)
    advantage, _ = group_advantages(rewards, ids, eps=0.0)
    torch.testing.assert_close(advantage[6:9], torch.tensor(want["group1_ddof1_eps0"]), atol=case["tolerance"], rtol=0)
    assert "ddof 1" in group_advantages.__doc__

    lp = torch.full((10,), -1.0, requires_grad=True)
    loss, _ = policy_loss(lp, lp.detach() - 0.1, advantage, torch.ones(10, dtype=torch.bool), torch.arange(10))
    (grad,) = torch.autograd.grad(loss, lp)
    assert loss.isfinite() and grad.isfinite().all()
    assert (grad[:6] == 0).all() and grad[9] == 0 and (grad[6:9] != 0).all()


def test_c03_none_nan_and_wrong_lengths():
    case = CASES["C03"]
    given, want = case["input"], case["expected"]
    f1 = lambda completions: given["f1"]  # noqa: E731
    f2 = lambda completions: [float(x) if isinstance(x, str) else x for x in given["f2"]]  # noqa: E731
    n = given["group_size"]
    rewards = RewardFunctions([f1, f2], given["weights"], nonfinite="abstain")(["p"] * n, ["c"] * n).rewards
    combined = [None if x == "no score" else x for x in want["combined"]]
    assert [None if x != x else pytest.approx(x) for x in rewards.tolist()] == combined
    assert has_reward(rewards).tolist() == [x is not None for x in combined]
    advantage, metrics = group_advantages(rewards, [0] * n, eps=0.0)
    torch.testing.assert_close(advantage, torch.tensor(want["advantage_ddof1_eps0"]), atol=case["tolerance"], rtol=0)
    wrong = torch.tensor(case["wrong_value_to_watch"]["none_as_zero_ddof1"])
    assert (advantage - wrong).abs().max() > 0.1
    assert metrics["reward/abstain_frac"] == 1 / n

    with pytest.raises(ValueError, match="'<lambda>', row 2: got nan"):
        RewardFunctions(f2)(["p"] * n, ["c"] * n)
    for bad in given["bad_lengths"]:
        with pytest.raises(ValueError, match=f"'scorer': got {len(bad)}, need {n}, one per completion"):

            def scorer(completions, bad=bad):
                return bad

            RewardFunctions([scorer])(["p"] * n, ["c"] * n)
    bad_value = [float(given["bad_value"][0])] + [0.0] * (n - 1)
    with pytest.raises(ValueError, match="row 0: got inf, need a finite number"):
        RewardFunctions([lambda completions: bad_value])(["p"] * n, ["c"] * n)
    lenient = RewardFunctions([lambda completions: bad_value], nonfinite="abstain")(["p"] * n, ["c"] * n)
    assert lenient.rewards[0].isnan() and lenient.metrics["rewards/<lambda>/mean"] == 0.0


def test_control_advantages():
    """Mean, leave-one-out and soft baselines of the controls, any order of the groups; what has no baseline is NaN."""
    rewards, groups = [1, 0, 0, 0, 1, 1, 0.5, None, 1], [7, 7, 7, 7, 7, 3, 3, 5, 5]
    control = [True, True, True, True, False, True, False, True, False]
    nan = float("nan")
    mean, row = control_advantages(rewards, groups, control)
    assert mean.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, 0.75, 0, -0.5, nan, nan], nan_ok=True)
    assert row == {"no_baseline": 2 / 9, "value": (0.25 + 1) / 2, "flat": 0.0}
    loo, _ = control_advantages(rewards, groups, control, "loo")
    expected = [1, -1 / 3, -1 / 3, -1 / 3, 0.75, nan, -0.5, nan, nan]  # a single control has no others
    assert loo.tolist() == pytest.approx(expected, nan_ok=True)
    soft, _ = control_advantages(rewards, groups, control, "soft", beta=0.5)
    value = 0.5 * math.log((math.exp(2) + 3) / 4)
    assert soft[:5].tolist() == pytest.approx([1 - value, -value, -value, -value, 1 - value])
    assert control_advantages([1, 1], [0, 0], [True, False])[1]["flat"] == 1.0
    with pytest.raises(ValueError, match="baseline: got 'median', need mean, loo or soft"):
        control_advantages([1], [0], [True], "median")
    with pytest.raises(ValueError, match="rewards, group_ids, is_control: got \\(2, 1, 1\\), need one length"):
        control_advantages([1, 0], [0], [True])
