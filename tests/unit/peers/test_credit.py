"""Peers that announce a state which nobody gets, on a clock of its own."""

from __future__ import annotations

from peers.round.credit import PATIENCE_S, Credit
from tests.support.round_world import status

AHEAD = {0: status(0), 5: status(5, lineage="b", tokens=10**9)}


def test_a_peer_is_passed_over_once_its_state_has_not_come_for_a_while():
    credit = Credit()
    credit.failed(["peer5"], 0.0, 1.0)
    assert credit.credible(AHEAD, "a", 1.0) == AHEAD
    credit.failed(["peer5"], 1.0, PATIENCE_S)
    assert set(credit.credible(AHEAD, "a", PATIENCE_S)) == {0}


def test_one_download_that_hangs_for_long_is_enough():
    credit = Credit()
    credit.failed(["peer5"], 0.0, 15.0)
    assert set(credit.credible(AHEAD, "a", 15.0)) == {0}


def test_it_is_heard_again_later_and_then_passed_over_for_longer():
    credit = Credit()
    credit.failed(["peer5"], 0.0, 15.0)
    assert credit.credible(AHEAD, "a", 60.0) == AHEAD
    credit.failed(["peer5"], 60.0, 75.0)
    assert set(credit.credible(AHEAD, "a", 120.0)) == {0}


def test_a_peer_that_delivers_after_all_has_failed_in_nothing():
    credit = Credit()
    credit.failed(["peer5"], 0.0, 5.0)
    credit.delivered(["peer5"])
    credit.failed(["peer5"], 20.0, 25.0)
    assert credit.credible(AHEAD, "a", 25.0) == AHEAD


def test_whoever_is_on_our_own_lineage_stays():
    credit = Credit()
    credit.failed(["peer5"], 0.0, 15.0)
    assert set(credit.credible(AHEAD, "b", 15.0)) == {0, 5}
