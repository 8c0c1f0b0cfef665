from __future__ import annotations

from typing import Any

import pytest

from peers.core.schedule import AS_LONG_AS_THE_ROUND, Schedule
from peers.errors import UserError


def test_each_fragment_is_averaged_every_local_steps_at_even_distances():
    schedule = Schedule(local_steps=12, num_fragments=3)
    assert schedule.steps_per_epoch == 4
    assert [schedule.fragment_of(epoch) for epoch in range(5)] == [0, 1, 2, 0, 1]


def test_weights_leave_before_the_epochs_end_but_for_the_runs_last():
    schedule = Schedule(local_steps=10, overlap_steps=3)
    assert [schedule.leaves_at(epoch, 25) for epoch in range(3)] == [7, 7, 10]
    assert schedule.leaves_at(2, None) == 7


def test_with_the_overlap_left_open_weights_leave_at_the_epochs_end():
    schedule = Schedule(local_steps=10, overlap_steps=AS_LONG_AS_THE_ROUND)
    assert schedule.never_waits
    assert schedule.leaves_at(0, None) == 10


@pytest.mark.parametrize(("end_step", "final"), [(1, 3), (4, 3), (5, 4), (8, 4)])
def test_in_the_end_every_fragment_is_averaged_once_more(end_step, final):
    assert Schedule(local_steps=12, num_fragments=3).final_epoch(end_step) == final


def test_nominal_steps_stop_at_the_epochs_and_the_runs_end():
    schedule = Schedule(local_steps=10)
    assert [schedule.nominal_step(2, step, 25) for step in (0, 4, 9)] == [20, 24, 25]
    assert schedule.nominal_step(2, 13, None) == 30


def test_a_time_budget_moves_slow_peers_on_and_leaves_fast_ones_to_their_steps():
    schedule = Schedule(local_steps=20, num_fragments=2, local_time_s=10.0)
    assert schedule.seconds_per_epoch == 5.0

    def after(steps_done: int, elapsed_s: float, epoch_s: float = 5.0, **more: Any) -> int:
        return schedule.local_step_after(steps_done, elapsed_s, epoch_s, **{"step_s": 0.0, **more})

    assert [after(1, elapsed_s) for elapsed_s in (0.4, 1.0, 4.9, 5.0, 60.0)] == [1, 2, 9, 10, 10]
    assert after(7, 1.0) == 7
    assert after(3, schedule.elapsed_at(3, 5.0)) == 3
    assert after(7, 1e6, 0.0) == 7
    # Steps of two seconds end at 4 s and 6 s, equally near to the epoch's 5 s; steps of one second end at 5 s.
    assert [after(1, 4.0, step_s=step_s) for step_s in (1.0, 2.0)] == [8, 10]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"local_steps": 10, "num_fragments": 3}, "12 steps would do"),
        ({"local_steps": 10, "num_fragments": 2, "overlap_steps": 5}, "must be less than the 5 steps"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Schedule.of({f"hv.{name}": value for name, value in fields.items()})
