"""How fast a peer trains, by what its worker tells."""

from __future__ import annotations

import pytest

from peers.daemon.pace import Pace


def test_a_pace_is_measured_between_pauses_and_carried_on():
    pace = Pace()
    assert pace.local_step_at(100.0, 50) == 0
    pace.entered(0, 100.0)
    pace.reached(5, 101.0)
    assert pace.step_s == pytest.approx(0.2)
    assert [pace.local_step_at(now, 50) for now in (101.0, 101.3, 102.01, 200.0)] == [5, 6, 10, 49]
    # A round takes place; what it takes is no training.
    pace.entered(0, 150.0)
    pace.reached(5, 151.0)
    assert pace.step_s == pytest.approx(0.2)


def test_a_machine_that_was_asleep_is_no_slower_for_that_and_one_that_got_slower_is():
    pace = Pace()
    pace.entered(0, 0.0)
    for step in range(1, 20):
        pace.reached(step, 0.1 * step)
    pace.reached(20, 12.0)
    assert pace.step_s == pytest.approx(0.1)
    for step in range(21, 24):
        pace.reached(step, 12.0 + 0.3 * (step - 20))
    assert pace.step_s == pytest.approx(0.3)
