from __future__ import annotations

import dataclasses
from collections import Counter

from peers import membership
from tests.support.round_world import status


def test_members_of_the_last_commit_are_expected_before_they_say_that_they_have_committed():
    view = {
        0: dataclasses.replace(status(0, lineage="new", epoch=1, tokens=9), led_by=2),
        1: status(1, lineage="old"),
        2: status(2, lineage="old"),
    }
    assert membership.trainers_of(view, "new") == [0]
    moved = membership.after_commit(view, (0, 1), "old", view[0])
    assert membership.trainers_of(moved, "new") == [0, 1]
    assert (moved[1].epoch, moved[1].committed_tokens, moved[1].led_by) == (1, 9, 2)
    assert moved[2].lineage == "old"


def test_whom_most_others_on_this_lineage_have_followed_is_known_if_it_is_there():
    def led_by_most(*led_by: int) -> int | None:
        view = {rank: dataclasses.replace(status(rank), led_by=leader) for rank, leader in enumerate(led_by)}
        elsewhere = {9: dataclasses.replace(status(9, lineage="b"), led_by=0)}
        return membership.led_by_most({**view, **elsewhere}, "a", me=3)

    assert led_by_most(1, 1, 2, 0) == 1
    assert led_by_most(1, 1, 2, 2, 2) is None, "half of them are not most"
    assert led_by_most(1, 2, -1, 1) is None, "of its own word there is no need"
    assert led_by_most(7, 7, 7, 7) is None, "it has gone"
    assert led_by_most(-1, -1, 1, 1) is None
    assert membership.led_by_most({3: status(3)}, "a", me=3) is None


def test_a_peer_that_holds_the_lineage_and_waits_is_expected_one_that_leaves_is_not():
    view = {
        0: status(0),
        1: status(1, state="waiting"),
        2: status(2, state="leaving"),
        3: status(3, state="joining"),
    }
    assert membership.trainers_of(view, "a") == [0, 1]


def test_the_leader_of_a_ballot_wraps_around():
    view = {2: status(2), 5: status(5)}
    assert [membership.leader_of(view, "a", ballot) for ballot in range(3)] == [2, 5, 2]
    assert membership.leader_of(view, "b", 0) is None


def test_of_two_forks_the_one_with_more_committed_tokens_wins_then_the_smaller_digest():
    view = {0: status(0, lineage="a", tokens=5), 1: status(1, lineage="b", tokens=7)}
    assert membership.ahead_of(view, 0).world_rank == 1
    assert membership.ahead_of(view, 1) is None
    even = {0: status(0, lineage="b", tokens=7), 1: status(1, lineage="a", tokens=7)}
    assert membership.ahead_of(even, 0).world_rank == 1
    assert membership.ahead_of(even, 1) is None


def test_a_peer_that_only_waits_is_ahead_of_nobody():
    view = {0: status(0, tokens=1), 1: status(1, lineage="b", tokens=10**9, state="waiting")}
    assert membership.ahead_of(view, 0) is None


def test_a_few_donors_are_asked_and_other_ones_by_others_and_for_other_states():
    view = {rank: status(rank, lineage="b") for rank in range(40)}
    asked = {(me, lineage): membership.donors_of({r: status(r, lineage=lineage) for r in view}, lineage, me)
             for me in range(20) for lineage in "bcd"}  # fmt: skip
    assert all(len(set(donors)) == membership.MAX_DONORS for donors in asked.values())
    assert all(f"peer{me}" not in donors for (me, _), donors in asked.items())
    counts = Counter(peer_id for donors in asked.values() for peer_id in donors)
    assert len(counts) == 40 and max(counts.values()) < 30
    few = {rank: view[rank] for rank in range(5)}
    assert membership.donors_of(few, "b", 2) == ["peer0", "peer1", "peer3", "peer4"]
