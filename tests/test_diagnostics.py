"""Diagnostics on four questions and two students, with every value worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from test_ballots import ballot

from fastcollab.diagnostics import PATIENCE, SMOOTH, Alarms, cohort_metrics, gold_metrics, selection_score
from fastcollab.labels import Label, make_labels

UIDS = ["q", "r", "s", "t"]
SAID = {"a": ["xxx.", "xxyy", "yyyx", "xxxx"], "b": ["xxyz", "zz..", "xyyy", "...."]}
STUDENTS = ["a", "b"]


@pytest.fixture
def step():
    """Votes: a x - y x; b x z y -. Labels: a from b, b from a, so a lacks t and b lacks r."""
    ballots = {
        (v, u): ballot(keys, voter=v, uid=u) for v, said in SAID.items() for u, keys in zip(UIDS, said, strict=True)
    }
    labels = make_labels("pair", {})(3, UIDS, STUDENTS, ballots)
    rewards = {}
    for s in STUDENTS:
        rows = [[labels[s, u].reward(k) for k in ballots[s, u].keys] for u in UIDS]
        rewards[s] = np.array([[np.nan if r is None else r for r in row] for row in rows])
    return UIDS, STUDENTS, ballots, labels, rewards


def entropy(*p):
    return -sum(x * math.log(x) for x in p)


def test_cohort_metrics(step):
    """a's rewards: 1110, 0000, 1110, none; b's: 1100, none, 0111, 0000."""
    row = cohort_metrics(*step)
    want = {
        "a/parse_rate": 15 / 16,
        "b/parse_rate": 10 / 16,
        "a/majority_ratio": (3 + 2 + 3 + 4) / 16,
        "b/majority_ratio": (2 + 2 + 3 + 0) / 16,
        "a/majority_ratio_parsed": (1 + 1 / 2 + 3 / 4 + 1) / 4,
        "b/majority_ratio_parsed": (1 / 2 + 1 + 3 / 4) / 3,
        "a/margin": (3 + 0 + 2 + 4) / 16,
        "b/margin": (1 + 2 + 2 + 0) / 16,
        "a/tie_rate": 1 / 4,
        "b/tie_rate": 0.0,
        "a/distinct": (1 + 2 + 2 + 1) / 4,
        "b/distinct": (3 + 1 + 2 + 0) / 4,
        "a/answer_entropy": (entropy(0.5, 0.5) + entropy(0.75, 0.25)) / 4,
        "b/answer_entropy": (entropy(0.5, 0.25, 0.25) + entropy(0.75, 0.25)) / 3,
        "a/label_rate": 3 / 4,
        "b/label_rate": 3 / 4,
        "a/eff_group": 2 / 4,
        "b/eff_group": 2 / 4,
        "a/reward": 6 / 12,
        "b/reward": 5 / 12,
        "a/reward_std": (0.5 + 0 + 0.5) / 3,
        "b/reward_std": (math.sqrt(1 / 3) + 0.5 + 0) / 3,
        "a/constancy": 2 / 4,
        "b/constancy": 1 / 4,
        "agree/a,b": 1.0,  # on q and s, where both voted
        "kappa/a,b": 1.0,  # by chance 1/2 * 1/2 + 1/2 * 1/2
        "jsd/a,b": (jsd([1, 0, 0], [0.5, 0.25, 0.25]) + 1 + 2 * 0 + jsd([0.25, 0.75], [0.25, 0.75])) / 3,
        "tv/a,b": (0.5 + 1 + 0) / 3,
        "unanimous": 2 / 4,
        **{f"{s}/{name}": 1.0 for s in "ab" for name in ("agree", "kappa")},
    }
    assert row == pytest.approx(want, abs=1e-12)


def jsd(p, q):
    p, q = np.array(p, dtype=float), np.array(q, dtype=float)
    middle = (p + q) / 2
    terms = [x * math.log2(x / m) for d in (p, q) for x, m in zip(d, middle, strict=True) if x]
    return sum(terms) / 2


def test_gold_metrics(step):
    """Right are x, z, x and (for t) nothing is known. a's rollouts: 1110 paid of xxx., none of xxyy, yyyx paid 1110."""
    row = gold_metrics(*step, {"q": "x", "r": "z", "s": "x"})
    want = {
        "a/vote_acc": 1 / 3,  # x - y
        "b/vote_acc": 2 / 3,  # x z y
        "a/label_acc": 2 / 3,
        "b/label_acc": 1 / 2,  # q right, s wrong, r without a label
        "a/reward_acc": (4 + 4 + 0) / 12,
        "b/reward_acc": (4 + 0) / 8,  # xxyz paid 1100; xyyy paid 0111
        "a/false_pos": 3 / 8,  # right rollouts: xxx and the x of s; of the 8 wrong yyy is paid
        "b/false_pos": 3 / 5,
        "a/false_neg": 1 / 4,
        "b/false_neg": 1 / 3,
        "a/skew": (3 / 8) / (3 / 8 + 1 / 4),
        "b/skew": (3 / 5) / (3 / 5 + 1 / 3),
        "double_fault/a,b": 1 / 2,  # q both right, s both wrong
        "same_wrong/a,b": 1 / 2,
        "phi/a,b": 1.0,
    }
    share = {"a": [3 / 4] * 3 + [0] + [2 / 4] * 4 + [3 / 4] * 3 + [1 / 4], "b": [2 / 4] * 2 + [1 / 4] * 3 + [3 / 4] * 3}
    error = {"a": [0] * 8 + [1] * 3 + [-1], "b": [0] * 4 + [-1, 1, 1, 1]}
    want |= {f"{s}/coupling": np.corrcoef(share[s], error[s])[0, 1] for s in "ab"}
    assert row == pytest.approx(want, abs=1e-12)


def test_a_soft_label_is_as_right_as_it_pays(step):
    labels = {(s, u): Label({"x": 0.75, "y": 0.25}) for s in STUDENTS for u in UIDS}
    row = gold_metrics(*step[:3], labels, step[4], {"q": "x", "r": "y", "s": "w"})
    assert row["a/label_acc"] == pytest.approx((0.75 + 0.25 + 0) / 3)


def test_more_votes_than_trained_rollouts(step):
    """V = 4 vote, G = 2 are trained: rewards are matched with the first two answers."""
    uids, students, ballots, labels, rewards = step
    row = gold_metrics(uids, students, ballots, labels, {s: r[:, :2] for s, r in rewards.items()}, {"q": "x"})
    assert (row["a/reward_acc"], row["b/reward_acc"]) == (1.0, 1.0)


def test_kappa_sees_through_constant_answers():
    """Both say x to all but one question: they agree in 6 of 8, and no more than chance would have it."""
    said = {"a": "xxxxxxxy", "b": "yxxxxxxx"}
    uids = list("01234567")
    ballots = {(v, u): ballot([k, k], voter=v, uid=u) for v in said for u, k in zip(uids, said[v], strict=True)}
    labels = {(v, u): Label(None) for v, u in ballots}
    nothing = {v: np.full((8, 2), np.nan) for v in said}
    row = cohort_metrics(uids, ["a", "b"], ballots, labels, nothing)
    chance = (7 * 7 + 1 * 1) / 64
    assert row["agree/a,b"] == 6 / 8 and row["kappa/a,b"] == pytest.approx((6 / 8 - chance) / (1 - chance))
    assert row["kappa/a,b"] < 0 and row["a/constancy"] == 7 / 8
    assert row["a/label_rate"] == row["a/eff_group"] == 0 and math.isnan(row["a/reward"])
    always = {(v, u): ballot("xx", voter=v, uid=u) for v in said for u in uids}
    assert cohort_metrics(uids, ["a", "b"], always, labels, nothing)["kappa/a,b"] == 0.0


def test_the_selection_score():
    uids = list("0123")

    def probe(**said):
        return {
            (v.replace("_", "@"), u): ballot([k, k], voter=v, uid=u)
            for v, keys in said.items()
            for u, k in zip(uids, keys, strict=True)
        }

    assert selection_score(probe(a="wxyz", b="wxyz")) == 1 * (1 - 1 / 4)
    assert selection_score(probe(a="wxyz", b="wxzy")) == 2 / 4 * (1 - 1 / 4)
    assert selection_score(probe(a="0000", b="0000")) == 0.0  # all agree on a constant
    # a agrees with b in 3 and with c in 1, b with c in 1; constancy 1/4, 2/4, 2/4
    assert selection_score(probe(a="wxyz", b="wxyw", c="z.xw")) == pytest.approx(
        ((3 / 4 + 0) / 2 * 3 / 4 + (3 / 4 + 1 / 4) / 2 * 2 / 4 + (0 + 1 / 4) / 2 * 3 / 4) / 3
    )
    assert selection_score(probe(a="wxyz", b="wxzy", a_p="wxyy", b_p="wxzy")) == 2 / 4 * 3 / 4 + (3 / 4 + 1) / 2
    assert selection_score(probe(a="wxyz", a_p="wxyy")) == 3 / 4


HEALTHY = {"a/constancy": 0.1, "a/eff_group": 0.5, "a/majority_ratio": 0.5, "a/answer_entropy": 1.0, "kappa/a,b": 0.5,
           "agree/a,a@p": 0.8, "a/completions/mean_length": 100.0, "a/completions/clipped_ratio": 0.1}  # fmt: skip
COLLAPSES = {
    "constancy": {"a/constancy": 0.41},
    "eff_group": {"a/eff_group": 0.09},
    "majority_ratio": {"a/majority_ratio": 0.61, "kappa/a,b": 0.39},
    "answer_entropy": {"a/answer_entropy": 0.19, "agree/a,a@p": 0.7},
    "mean length": {"a/completions/mean_length": 29.0},
    "dup": {"a/dup": 0.31},
    "truncated": {"a/completions/clipped_ratio": 0.51},
}
CLOSE = {
    "constancy": {"a/constancy": 0.4},  # four times the start
    "eff_group": {"a/eff_group": 0.1},
    "majority alone": {"a/majority_ratio": 0.9, "kappa/a,b": 0.41},
    "kappa alone": {"a/majority_ratio": 0.59, "kappa/a,b": 0.0},
    "entropy alone": {"a/answer_entropy": 0.01},
    "mean length": {"a/completions/mean_length": 30.0},
    "dup": {"a/dup": 0.3},
    "truncated": {"a/completions/clipped_ratio": 0.5},
    "another's": {"b/constancy": 1.0, "kappa/b,c": -1.0},
}


def run(changed, steps=2 * PATIENCE, names="a"):
    alarms = Alarms(list(names))
    found = [alarms.look(HEALTHY | (changed if k >= SMOOTH else {})) for k in range(steps)]
    return alarms, found


@pytest.mark.parametrize("reason", COLLAPSES)
def test_an_alarm_for_each_collapse(reason):
    alarms, found = run(COLLAPSES[reason])
    raised = [k for k, f in enumerate(found) if f]
    assert len(raised) == 1 and found[raised[0]]["a"].startswith(reason)  # said once
    after = {"eff_group": PATIENCE, "dup": SMOOTH + 1}.get(reason, SMOOTH)  # "dup" begins with the collapse
    assert raised[0] == SMOOTH + after - 1
    assert alarms.paused("a") and not alarms.paused("b")


@pytest.mark.parametrize("case", CLOSE)
def test_no_alarm_before_the_threshold(case):
    alarms, found = run(CLOSE[case])
    assert not any(found) and not alarms.paused("a")


def test_the_start_is_remembered():
    alarms = Alarms(["a"])
    found = [bool(alarms.look({"a/completions/mean_length": 100 * 0.98**k})) for k in range(90)]
    start, mean = (
        np.mean(0.98 ** np.arange(5)),
        np.mean(0.98 ** np.arange(-4, 1)),
    )  # the last five of step k: mean * .98^k
    assert found.index(True) == math.ceil(math.log(0.3 * start / mean) / math.log(0.98))


def test_alarms_pass_over_what_is_absent_and_go_on_after_a_load():
    alarms = Alarms(["a", "b"])
    for _ in range(SMOOTH):
        assert alarms.look({"a/constancy": 0.1, "b/constancy": None, "kappa/a,b": math.nan, "a/eff_group": None}) == {}
    again = Alarms(["a", "b"])
    again.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    for k in range(SMOOTH):
        found = [x.look({"a/constancy": 0.9, "b/constancy": 0.0}) for x in (alarms, again)]
        assert found[0] == found[1] and bool(found[0]) is (k == 1)  # (0.1 * 3 + 0.9 * 2) / 5 = 0.42
    assert again.paused("a") and not again.paused("b")
    final = Alarms(["a", "b"])
    final.load_state_dict(json.loads(json.dumps(again.state_dict())))
    assert final.paused("a") and final.look({"a/constancy": 0.9}) == {}
