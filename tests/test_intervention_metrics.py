"""Figures of reviewed rollouts, each by hand on small made-up ones (mintrl spec 3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastcollab.intervention_metrics import logprob_metrics, named, outcome_metrics, review_metrics
from fastcollab.types import Intervention, Review, Rollout


def rollout(n, group=0, interventions=(), outcomes=()):
    author, ids = np.zeros(n, np.uint8), list(range(100, 100 + n))
    for at, _, inserted in interventions:
        author[at : at + len(inserted)] = 1
    reviews = [Review(4 * k, outcome) for k, outcome in enumerate(outcomes)]
    logprob = np.where(author == 0, -0.5, np.nan).astype(np.float32)
    return Rollout(
        [1], ids, author, ("policy", "verifier"), logprob, "eos", [], list(interventions), reviews, group=group
    )


FIXED = rollout(20, 0, [Intervention(4, (7, 8, 9), (104, 105))], ["intervention", "intervention", "keep", "leak"])
COPIED = rollout(10, 1, [Intervention(2, (103, 104), (102,))], ["malformed", "intervention"])
PLAIN = rollout(10, 1, [], ["keep", "out_of_range"])


def test_shares_and_rates():
    row = review_metrics([FIXED, replace(COPIED, unread=15), PLAIN], verifier_tokens=60)
    assert row["external_share_micro"] == 3 / 40 and row["external_share_macro"] == pytest.approx((0.1 + 0.1 + 0) / 3)
    assert row["reviews"] == 8 / 3 and row["interventions"] == 2 / 3 and row["interventions_histogram"] == [1, 2]
    assert row["revise_rate"] == 5 / 8 and row["malformed_rate"] == 1 / 8 and row["out_of_range_rate"] == 1 / 8
    assert row["leak_rate"] == row["rejected_rate"] == 1 / 8 and row["noop_rate"] == 0
    assert row["position"] == pytest.approx((4 / 20 + 2 / 10) / 2) and row["dropped_share"] == 5 / 45
    assert row["unread_share"] == 15 / 60
    assert row["re_revise_rate"] == 1 / 2  # after the first intervention another, after that a keep; COPIED's was last
    assert row["copy_back_rate"] == 1 / 2 and row["verifier_tokens_per_token"] == 60 / 40


def test_figures_that_are_not_defined_are_left_out():
    row = named(review_metrics([rollout(5)]))
    assert row["mintrl/reviews"] == 0 and row["mintrl/external_share_micro"] == 0
    assert not {"mintrl/revise_rate", "mintrl/position", "mintrl/re_revise_rate"} & row.keys()
    assert "mintrl/verifier_tokens_per_token" not in row


def test_outcomes_by_arm():
    """Group 0: controls fail, a corrected rollout succeeds. Group 1: controls mostly right, a correction did harm."""
    rollouts = [rollout(5), rollout(5), FIXED, rollout(5), *(rollout(5, 1) for _ in range(3)), COPIED, PLAIN, PLAIN]
    rewards = np.array([0, 0, 1, 0, 1, 1, 0, 0, 1, np.nan])
    arm = [False, False, True, True, False, False, False, True, True, True]
    row = outcome_metrics(rollouts, rewards, arm)
    assert row["control/reward"] == pytest.approx(2 / 5) and row["reviewed/reward"] == 2 / 4
    assert row["resume_success"] == 1 / 2 and row["harm"] == 1.0 and row["rescue_hard"] == 1 / 2
    assert row["lift"] == pytest.approx(((1 / 2 - 0) + (1 / 2 - 2 / 3)) / 2)
    assert row["control/pass_any"] == 1 / 2 and row["reviewed/pass_any"] == 1.0


def test_learnability():
    old, foreign = np.full(20, -1.0, np.float32), FIXED.author == 1
    old[foreign], old[19] = (-12.0, -2.0), np.nan  # the last was left out
    old[6:10] = -3.0
    row = logprob_metrics([FIXED], [old], [foreign])
    assert row["logprob/own"] == pytest.approx((13 * -1 + 4 * -3) / 17) and row["logprob/external"] == -7.0
    assert row["logprob/external_improbable"] == 1 / 2 and row["logprob/surprise"] == 14.0
    assert row["logprob/before_correction"] == -1.0
    assert row["logprob/behind_correction"] == pytest.approx((4 * -3 + 9 * -1) / 13)
    assert row["logprob/sampler_gap"] == 2.5
