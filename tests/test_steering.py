"""Steering: a share outside its band turns a knob towards it, within the settings, and otherwise nothing moves."""

from __future__ import annotations

import pytest

from fastcollab.steering import PATIENCE, Steering


def fed(steering, share, batches=PATIENCE, written=1000):
    for _ in range(batches):
        steering.update(round(share * written), written)
    return steering.reviews, steering.tokens


def test_inside_the_band_or_without_one_nothing_moves():
    assert fed(Steering(8, 32, (0.02, 0.04)), 0.03, 40) == (8, 32)
    assert fed(Steering(8, 32, None), 0.9, 40) == (8, 32)


def test_too_much_shortens_corrections_first_then_takes_reviews_away():
    steering = Steering(3, 32, (0.02, 0.04))
    assert fed(steering, 0.06) == (3, 16)  # 32 * 0.03 / 0.06
    seen = [fed(steering, 0.5) for _ in range(8)]
    assert seen == [(3, 8), (2, 8), (1, 8), (1, 4), (1, 2), (1, 1), (1, 1), (1, 1)]  # no half words while it may be


def test_too_little_gives_back_what_was_taken_and_no_more():
    steering = Steering(3, 32, (0.02, 0.04))
    fed(steering, 0.5, 20 * PATIENCE)
    assert (steering.reviews, steering.tokens) == (1, 1)
    assert fed(steering, 0.001) == (1, 2)
    assert fed(steering, 0.0) == (1, 32)  # no correction at all says nothing about their length
    assert [fed(steering, 0.001) for _ in range(4)] == [(2, 32), (3, 32), (3, 32), (3, 32)]


@pytest.mark.parametrize("slope", [0.0005, 0.003])
def test_a_share_that_follows_the_knobs_is_brought_into_the_band(slope):
    steering = Steering(8, 64, (0.02, 0.04))
    share = slope * 64 * 8 / 8
    for _ in range(30):
        share = slope * steering.tokens * steering.reviews / 8
        fed(steering, share)
    assert 0.02 <= share <= 0.04


def test_the_share_is_pooled_over_tokens_not_over_batches():
    steering = Steering(8, 32, (0.02, 0.04))
    for external, written in ((90, 100), (0, 5000), (0, 2000), (90, 100)):
        steering.update(external, written)
    assert steering.tokens == 32  # 180 of 7,200


def test_state_goes_on_where_it_stood():
    a, b = Steering(8, 32, (0.02, 0.04)), Steering(8, 32, (0.02, 0.04))
    fed(a, 0.06, PATIENCE + 2)
    b.load_state_dict(a.state_dict())
    assert fed(a, 0.06, 2) == fed(b, 0.06, 2) == (8, 8)


def test_a_resumed_run_with_smaller_settings_keeps_to_them():
    smaller = Steering(2, 4, (0.02, 0.04))
    smaller.load_state_dict(Steering(8, 32, (0.02, 0.04)).state_dict())
    assert (smaller.reviews, smaller.tokens) == (2, 4)
