"""How long an epoch may last where peers train at different speeds."""

from __future__ import annotations

import math

import pytest

from peers.core.epoch_time import FASTEST, best_epoch_s, nominal_step_s


def rate(step_s: list[float], local_steps: int, round_s: float, epoch_s: float) -> float:
    """Steps per second of all peers together."""
    return sum(min(local_steps, epoch_s / each) for each in step_s) / (epoch_s + round_s)


def test_nobody_waits_for_the_slowest_where_rounds_cost_nothing():
    assert best_epoch_s(1.0, [1.0, 1.0, 4.0], 50, round_s=0.0) == 50.0
    assert best_epoch_s(1.0, [4.0], 50, round_s=0.0) == 50.0


def test_epochs_are_longer_where_rounds_take_long():
    slow, fast = 4.0, 1.0
    assert best_epoch_s(fast, [slow, slow, slow], 10, round_s=1.0) == 10.0
    assert best_epoch_s(fast, [slow, slow, slow], 10, round_s=60.0) == 40.0


@pytest.mark.parametrize("round_s", [0.0, 0.5, 5.0, 50.0])
def test_no_other_length_trains_more(round_s):
    paces = [0.7, 1.0, 1.1, 2.5, 4.0]
    best = best_epoch_s(paces[0], paces[1:], 20, round_s)
    others = [0.1 * number for number in range(1, 2000)]
    assert rate(paces, 20, round_s, best) >= max(rate(paces, 20, round_s, other) for other in others) - 1e-9


@pytest.mark.parametrize("round_s", [0.0, 5.0, 18.0, 30.0, 60.0, 200.0])
def test_where_rounds_are_hidden_no_other_length_trains_more(round_s):
    paces = [0.7, 1.0, 1.1, 2.5, 4.0]
    best = best_epoch_s(paces[0], paces[1:], 20, round_s, hides_rounds=True)

    def hidden(epoch_s: float) -> float:
        return sum(min(20, epoch_s / pace) for pace in paces) / max(epoch_s, round_s)

    assert hidden(best) >= max(hidden(0.1 * number) for number in range(1, 2000)) - 1e-9


def test_a_peer_that_claims_to_be_very_fast_shortens_epochs_only_so_far():
    honest = best_epoch_s(1.0, [1.0] * 3, 50, round_s=0.0)
    assert best_epoch_s(1.0, [*[1.0] * 3, 1e-9], 50, round_s=0.0) == honest / FASTEST


def test_nobody_waits_for_one_that_is_a_hundred_times_slower():
    assert best_epoch_s(1.0, [100.0], 50, round_s=0.0) == 50.0


@pytest.mark.parametrize("claim", [5e-324, 1e-308, 1e-9, 1e300, 1.7e308])
@pytest.mark.parametrize("num_liars", [1, 2, 5])
def test_whatever_is_claimed_there_is_time_for_a_step_and_none_without_end(claim, num_liars):
    found = best_epoch_s(1.0, [claim] * num_liars, 50, round_s=0.1)
    assert math.isfinite(found) and (found == 0.0 or found >= 1.0)


def test_the_nominal_step_keeps_up_with_the_time():
    assert nominal_step_s(4.0, 50, epoch_s=50.0) == 1.0
    assert nominal_step_s(0.5, 50, epoch_s=50.0) == 0.5
    assert nominal_step_s(4.0, 50, epoch_s=0.0) == 4.0
