"""Whom a member of a round follows."""

from __future__ import annotations

import dataclasses

from peers.round.following import Following
from tests.support.round_world import status

# The others have barred peer 0, and 1 has led them.
VIEW = {rank: dataclasses.replace(status(rank), led_by=1) for rank in range(4)}


def following(num_left_out: int) -> Following:
    return Following(me=3, lineage="a", excluded=set(), num_left_out=num_left_out)


def test_who_was_left_out_three_times_follows_whom_the_others_have_followed():
    assert following(2).choose(VIEW, quiet=()) == 0
    member = following(3)
    assert member.choose(VIEW, quiet=()) == 1 and not member.is_first
    # What this peer has followed itself says nothing.
    others = {**VIEW, 3: dataclasses.replace(status(3), led_by=2)}
    assert following(3).choose(others, quiet=()) == 1


def test_once_whom_the_others_followed_has_failed_the_next_leads():
    member = following(3)
    member.choose(VIEW, quiet=())
    member.drop_leader(next_ballot=True)
    assert member.choose(VIEW, quiet=()) == 1  # The second of the four.
    member.drop_leader(next_ballot=True)
    assert member.choose(VIEW, quiet=()) == 2


def test_who_is_called_leads_until_its_attempt_is_given_up():
    member = following(0)
    member.is_called = True
    assert member.choose(VIEW, quiet=()) == 3 and not member.is_first
    member.drop_leader()
    assert member.choose(VIEW, quiet=()) == 0 and member.is_first
