"""Peers that are there and come to no round."""

from __future__ import annotations

from peers.round.absences import AGAIN_EVERY, TOLERATED, Absences
from tests.support.round_world import status

VIEW = {rank: status(rank) for rank in range(4)}


def test_who_does_not_come_several_times_in_a_row_is_waited_for_no_more_until_it_does() -> None:
    absences = Absences()
    for _ in range(TOLERATED):
        assert absences.unawaited(VIEW, 0) == []
        absences.note(VIEW, (0, 1, 2, 3), (0, 1, 2))
    assert absences.unawaited(VIEW, 0) == [3]
    # It is waited for once more now and then.
    assert [epoch for epoch in range(2 * AGAIN_EVERY) if not absences.unawaited(VIEW, epoch)] == [13, 29]
    # Under another rank it is the same peer.
    assert absences.unawaited({7: VIEW[3]}, 0) == [7]
    absences.note(VIEW, (0, 1, 2, 3), (0, 1, 2))
    assert absences.unawaited(VIEW, 0) == [3]
    absences.note(VIEW, (0, 1, 2, 3), (0, 1, 2, 3))
    assert absences.unawaited(VIEW, 0) == []


def test_who_is_late_now_and_then_or_elsewhere_meanwhile_has_missed_nothing_in_a_row() -> None:
    absences = Absences()
    for members in (*[(0, 1, 2)] * (TOLERATED - 1), (0, 1, 2, 3)) * 3:
        absences.note(VIEW, (0, 1, 2, 3), members)
        assert absences.unawaited(VIEW, 0) == []
    for expected in (*[(0, 1, 2, 3)] * (TOLERATED - 1), (0, 1, 2)) * 3:
        absences.note(VIEW, expected, (0, 1, 2))
        assert absences.unawaited(VIEW, 0) == []
