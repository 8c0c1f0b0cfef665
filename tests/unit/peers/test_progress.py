"""Whom a reduction that takes too long is lost to."""

from __future__ import annotations

from peers.reduction.plan import ATTEMPT_BYTES, ReducePlan, equal_bounds
from peers.reduction.progress import Progress


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
    assert progress.slowest() == 1
    progress.chunk_added(1, 0)
    assert progress.slowest() == 2
    progress.chunk_added(2, 0)
    assert progress.slowest() is None
    progress.everything_received(1)
    assert progress.slowest() == 2
    progress.everything_received(2)
    # Either may be slow to take it, or this peer to send.
    assert progress.slowest() is None
    progress.result_sent(1, 0)
    assert progress.slowest() == 2
    progress.result_sent(2, 0)
    assert progress.slowest() is None
