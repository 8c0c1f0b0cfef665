"""Where in an epoch a peer enters it, by what the others have announced."""

from __future__ import annotations

import dataclasses

import pytest

from peers.pace import Pace, entry_with_work, progress_of_others
from peers.records import Announcement
from tests.support.round_world import status


def at(rank: int, local_step: int, step_s: float = 0.0, **more: object) -> Announcement:
    return dataclasses.replace(status(rank, **more), local_step=local_step, step_s=step_s)


def test_a_joiner_enters_at_the_others_median_but_trains_at_least_one_step():
    view = {r: at(r, step) for r, step in enumerate((0, 40, 90, 99))}
    assert progress_of_others(view, "a", 0, 100) == 90
    assert progress_of_others(view, "a", 0, 50) == 49
    assert progress_of_others({0: status(0)}, "a", 0, 100) == 0


def test_what_the_others_have_trained_since_they_said_so_counts():
    view = {r: at(r, 10, step_s=0.5) for r in range(4)}
    assert progress_of_others(view, "a", 0, 100, dict.fromkeys(view, 2.0)) == 14
    # Rather a step early than late.
    assert progress_of_others(view, "a", 0, 100, dict.fromkeys(view, 2.1)) == 15
    assert progress_of_others(view, "a", 0, 100, {1: 2.0}) == 10


def test_no_pace_that_is_announced_breaks_anything():
    view = {0: at(0, 0, step_s=0.1), 1: at(1, 1, step_s=5e-324), 2: at(2, 1, step_s=1e15)}
    for lineage_of in ({1: view[1]}, {2: view[2]}, view):
        seen = {0: view[0], **lineage_of}
        assert 0 <= progress_of_others(seen, "a", 0, 100, dict.fromkeys(seen, 30.0)) < 100
        entry = entry_with_work(seen, "a", 0, 100, dict.fromkeys(seen, 30.0), has_time_budget=False)
        assert entry is None or 0 <= entry < 100


def test_who_waits_for_a_round_does_not_go_on():
    view = {r: at(r, 10, step_s=0.5, state="averaging") for r in range(3)}
    assert progress_of_others(view, "a", 0, 100, dict.fromkeys(view, 5.0)) == 10


@pytest.mark.parametrize(
    ("own_step_s", "entry"),
    [
        (0.1, 40),  # as fast as they
        (0.05, 40),  # faster: no more steps than they
        (0.2, 70),  # half as fast: half of what is left
        (0.9, 94),
        (1.3, None),  # four of a hundred
        (0.0, None),  # who knows
    ],
)
def test_work_of_an_earlier_epoch_goes_on_where_it_can_be_done_with_the_others(own_step_s, entry):
    view = {0: at(0, 0, step_s=own_step_s), 1: at(1, 40, step_s=0.1), 2: at(2, 40, step_s=0.1)}
    assert entry_with_work(view, "a", 0, 100, {}, has_time_budget=False) == entry


def test_where_the_others_wait_already_nobody_trains_on():
    view = {
        0: at(0, 0, step_s=1.0),
        1: at(1, 10, 1.0, state="averaging"),
        2: at(2, 10, 1.0, state="averaging"),
    }
    assert entry_with_work(view, "a", 0, 10, {}, has_time_budget=False) is None
    assert progress_of_others(view, "a", 0, 10) == 9


def test_where_time_ends_epochs_only_the_time_counts():
    view = {0: at(0, 0), 1: at(1, 40)}
    assert entry_with_work(view, "a", 0, 100, {}, has_time_budget=True) == 40
    assert entry_with_work({**view, 1: at(1, 96)}, "a", 0, 100, {}, has_time_budget=True) is None
    # Where nobody else trains there is nobody to be done with.
    assert entry_with_work({0: at(0, 0)}, "a", 0, 100, {}, has_time_budget=True) is None


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
