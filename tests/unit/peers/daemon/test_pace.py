"""How far a peer is between its worker's reports."""

from __future__ import annotations

from peers.daemon.pace import Pace


def test_a_pace_is_carried_on_up_to_the_epochs_last_step():
    pace = Pace()
    assert pace.local_step_at(100.0, 50) == 0
    pace.entered(0, 0.0, 100.0)
    pace.reached(5, 0.2, 101.0)
    assert [pace.local_step_at(now, 50) for now in (101.0, 101.3, 102.01, 200.0)] == [5, 6, 10, 49]
    pace.entered(0, 0.0, 150.0)
    assert pace.local_step_at(151.0, 50) == 5


def test_under_a_time_budget_the_position_of_a_slow_worker_follows_the_time():
    pace = Pace()
    pace.entered(0, 10.0, 100.0)
    pace.reached(5, 4.0, 101.0)
    assert [pace.local_step_at(now, 50) for now in (101.0, 102.01, 105.0)] == [5, 10, 25]
