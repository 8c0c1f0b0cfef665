"""Which member is to blame for a reduction that takes too long."""

from __future__ import annotations

from peers.reduce.frames import Kind
from peers.reduce.plan import ATTEMPT_BYTES, ReducePlan, equal_bounds
from peers.reduce.progress import Blame, Progress


def plan_of_four() -> ReducePlan:
    return ReducePlan(
        attempt=bytes(ATTEMPT_BYTES),
        members=(0, 1, 2, 3),
        me=0,
        weights=(1.0,) * 4,
        norms=(1.0,) * 4,
        bounds=equal_bounds(4000, 4),
        codec="fp32",
        rule="mean",
    )


def test_who_alone_does_not_take_what_is_finished_keeps_the_others_waiting() -> None:
    plan = ReducePlan(
        attempt=bytes(ATTEMPT_BYTES),
        members=(0, 1, 2),
        me=0,
        weights=(1.0, 1.0, 1.0),
        norms=(1.0, 1.0, 1.0),
        bounds=equal_bounds(3000, 3),
        codec="fp32",
        rule="mean",
    )
    progress = Progress(plan)
    assert progress.slowest().culprit == 1
    progress.chunk_added(1, 0)
    assert progress.slowest().culprit == 2
    progress.chunk_added(2, 0)
    assert progress.slowest().culprit is None
    progress.everything_received(1)
    assert progress.slowest().culprit == 2
    progress.everything_received(2)
    # The others may be slow to take the result, or this peer slow to send it.
    assert progress.slowest().culprit is None
    progress.result_sent(1, 0)
    assert progress.slowest().culprit == 2
    progress.result_sent(2, 0)
    assert progress.slowest().culprit is None


def test_who_has_no_more_to_contribute_says_for_whom_it_waits() -> None:
    progress = Progress(plan_of_four())
    assert progress.next_frame(3, 0.0) == (Kind.CONTRIBUTION, 0)
    progress.chunk_added(1, 0)
    assert progress.next_frame(3, 0.0) == (Kind.ALIVE, 0)
    assert progress.slowest() == Blame(2)


def test_who_owes_results_because_of_another_has_that_one_blamed_by_its_word() -> None:
    progress = Progress(plan_of_four())
    for other in (1, 2, 3):
        progress.chunk_added(other, 0)
    progress.everything_received(1)
    assert progress.slowest() == Blame(None)
    progress.says_it_waits(2, Blame(1, (2,)))
    progress.says_it_waits(3, Blame(1, (3,)))
    assert progress.slowest().culprit == 1
    assert progress.slowest().told_by in {(2,), (3,)}
    # Member 2 names nobody, itself, or the listener.
    for nobody in (None, 2, 0):
        progress.says_it_waits(2, Blame(1, (2,)))
        progress.says_it_waits(2, Blame(nobody, (2,)))
        assert progress.on_waiting_for(2) == Blame(2)
