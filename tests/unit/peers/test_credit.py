"""Peers that announce a state which nobody gets, on a clock of its own."""

from __future__ import annotations

from peers.round.credit import MAX_REMEMBERED, PATIENCE_S, Credit
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


def test_who_has_taken_hours_is_not_believed_for_longer_than_that():
    credit = Credit()
    credit.failed(["peer5"], 0.0, 4000.0)
    assert set(credit.credible(AHEAD, "a", 11_999.0)) == {0}
    assert credit.credible(AHEAD, "a", 12_001.0) == AHEAD
    credit.failed(["peer5"], 12_001.0, 16_001.0)
    assert set(credit.credible(AHEAD, "a", 32_000.0)) == {0}


def test_of_several_that_were_asked_none_is_blamed_for_all_the_time_that_was_lost():
    credit = Credit()
    credit.failed(["peer5", "peer0"], 0.0, 4000.0)
    assert set(credit.credible(AHEAD, "a", 4029.0)) == {0}
    assert credit.credible(AHEAD, "a", 4031.0) == AHEAD


def test_what_failed_long_ago_and_what_fails_now_are_two_things():
    credit = Credit()
    credit.failed(["peer5"], 0.0, 3.0)
    credit.failed(["peer5"], 36_000.0, 36_001.0)
    assert credit.credible(AHEAD, "a", 36_001.0) == AHEAD


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


def test_of_endless_names_the_oldest_are_forgotten():
    credit = Credit()
    for number in range(MAX_REMEMBERED + 1):
        credit.failed([f"peer{number}"], 0.0, 15.0)
        if number == 1:
            credit.failed(["peer0"], 0.0, 15.0)
    named = {rank: status(rank, lineage="b", tokens=10**9) for rank in (0, 1, 2, MAX_REMEMBERED)}
    assert set(credit.credible(named, "a", 15.0)) == {1}
