"""What the losing side of a fork has committed, and where the split was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from peers.errors import ProtocolError
from peers.outer_optimizer import OuterOptimizer
from peers.outer_state import OuterState
from peers.state.branch import Branch
from peers.state.header import MAX_ANCESTORS, StateHeader


def after(*averages: float) -> OuterState:
    """A state of one weight, moved by these averages one after the other."""
    state = OuterState.initial([torch.zeros(1)])
    for average in averages:
        step(state, average)
    return state


def step(state: OuterState, average: float) -> None:
    OuterOptimizer(lr=0.5, momentum=0.9).commit(
        state, 0, torch.full((1,), float(average)), tokens=1, data_width=1
    )


def lineages(*averages: float) -> list[str]:
    return [after(*averages[:count]).lineage for count in range(len(averages) + 1)]


def test_the_way_from_a_split_leads_to_the_side_that_is_asked():
    one, other = after(1, 2, 3, 4), after(1, 2, 5)
    assert list(one.header.path_since_split(other.header)) == lineages(1, 2, 3, 4)[2:]
    assert list(other.header.path_since_split(one.header)) == lineages(1, 2, 5)[2:]


@pytest.mark.parametrize("behind", [(), (1.0,), (1.0, 2.0), (1.0, 2.0, 3.0)])
def test_a_state_that_only_trails_has_no_split(behind: Sequence[float]):
    old, new = after(*behind), after(1, 2, 3)
    assert old.header.path_since_split(new.header) == new.header.path_since_split(old.header) == ()


def test_a_split_that_is_too_long_ago_is_not_known():
    shared = [float(number) for number in range(3)]
    many = [float(number) for number in range(10, 12 + MAX_ANCESTORS)]
    assert after(*shared, *many).header.path_since_split(after(*shared, 5.0).header) == ()
    assert len(after(*shared, *many).header.ancestors) == MAX_ANCESTORS


def test_ancestors_cross_the_network_within_bounds():
    header = after(1, 2, 3).header
    assert StateHeader.from_message(header.to_message(), (1,)).ancestors == header.ancestors
    for wrong in ([1], ["x"], ["0" * 64] * (MAX_ANCESTORS + 1), 7):
        with pytest.raises(ProtocolError):
            StateHeader.from_message({**header.to_message(), "ancestors": wrong}, (1,))


def test_ancestors_cannot_be_made_up():
    header = after(1, 2, 3, 4).header
    forged = StateHeader.from_message({**header.to_message(), "ancestors": []}, (1,))
    assert forged.lineage != header.lineage


def test_a_split_of_unknown_age_is_told_from_one_that_is_none():
    many = [float(number) for number in range(10, 12 + MAX_ANCESTORS)]
    one, other = after(1, *many), after(2, *many)
    assert one.header.has_unknown_split_from(other.header)
    for trailing in (after(1), after(1, *many[:5]), after()):
        assert not trailing.header.has_unknown_split_from(one.header)


class Peer:
    """Commits with whom it is told to."""

    def __init__(self) -> None:
        self.state, self.branch = after(), Branch()

    def commit(self, average: float, *ranks: int, tokens: int = 10) -> None:
        values = torch.full((1,), average)
        self.branch.committing(ranks, self.state.lineage, 0, values, tokens=tokens)
        step(self.state, average)

    def adopt(self, state: OuterState, *members: int) -> None:
        self.state = state
        self.branch.moved(state.lineage, members)

    def brought_to(self, other: OuterState) -> tuple[int, int, int, float]:
        """Commits since the split, how many of them come along, own tokens in those, and the work."""
        aside = self.branch.set_aside(self.state.header.path_since_split(other.header))
        work = float(sum(values.sum() for values in aside.sums.values()))
        return aside.num_commits, aside.num_brought, aside.tokens[0], work


def test_what_was_committed_without_the_others_comes_along():
    peer = Peer()
    peer.commit(1.0, 0, 1, 2)
    peer.commit(2.0, 0, 1)
    peer.commit(4.0, 0, 1, tokens=7)
    assert peer.brought_to(after(1.0, 9.0, 9.0, 9.0)) == (2, 2, 17, 6.0)


def test_somebody_else_who_is_missed_later_leaves_what_came_before_behind():
    peer = Peer()
    peer.commit(1.0, 0, 1, 2)
    peer.commit(2.0, 0, 1)
    peer.commit(4.0, 0)
    # Now nobody can tell whether 1 or 2 was on the other side, so only the last is sure to be of this one alone.
    assert peer.brought_to(after(1.0, 9.0)) == (2, 1, 10, 4.0)
    # Where 1 has the second commit, too, the split was there.
    assert peer.brought_to(after(1.0, 2.0, 9.0)) == (1, 1, 10, 4.0)


def test_a_sum_that_begins_before_the_split_counts_for_nothing():
    peer = Peer()
    peer.commit(1.0, 0, 1, 2, 3)
    peer.commit(2.0, 0, 1, 2)
    peer.commit(4.0, 0, 1, 2)
    assert peer.brought_to(after(1.0, 2.0, 9.0)) == (1, 0, 0, 0.0)


def test_whoever_misses_a_commit_of_its_own_side_brings_what_comes_after_it():
    peer = Peer()
    peer.commit(1.0, 0, 1, 2)
    peer.commit(2.0, 0, 1)
    peer.adopt(after(1.0, 2.0, 3.0), 0, 1)
    peer.commit(4.0, 0, 1)
    assert peer.brought_to(after(1.0, 9.0)) == (3, 1, 10, 4.0)
    # All are here again: nobody is missed.
    peer.adopt(after(1.0, 9.0), 0, 1, 2)
    peer.commit(8.0, 0, 1, 2)
    assert not peer.branch._sums


def test_a_split_right_after_others_were_met_is_noticed():
    peer = Peer()
    peer.adopt(after(1.0), 0, 1, 2)
    peer.commit(2.0, 0, 1)
    assert peer.brought_to(after(1.0, 9.0)) == (1, 1, 10, 2.0)


def test_who_comes_back_or_has_taken_leave_is_not_missed():
    peer = Peer()
    peer.commit(1.0, 0, 1, 2)
    peer.commit(2.0, 0, 1)
    peer.commit(4.0, 0, 1, 2)
    peer.branch.left([2])
    peer.commit(8.0, 0, 1)
    assert not peer.branch._sums
    peer.commit(8.0, 0)
    assert peer.branch._sums


def test_a_sum_ends_where_ancestors_do():
    peer = Peer()
    peer.commit(1.0, 0, 1)
    for number in range(MAX_ANCESTORS + 2):
        peer.commit(float(number), 0)
    assert not peer.branch._sums
