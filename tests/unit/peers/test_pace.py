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
    pace.reached(10, 153.0)
    assert pace.step_s == pytest.approx(0.3)
