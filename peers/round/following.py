"""Whom a member of a round follows, and when it turns to another leader. Pure: the view of the swarm is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from peers import membership
from peers.membership import View

TOLERATED_OF_LEADER = 1
"""Attempts of one round that a member loses to its leader before it looks for another."""
_LEFT_OUT = 3
"""After so many rounds without it a ready peer follows whom the others have followed: they may know better."""
_MOST_COUNTED, _MORE_ATTEMPTS = 16, 2
"""A leader may make two attempts for each member, of so many, and so many more: from the second failure on it leaves
somebody out."""


class Following:
    """Of one member, in one round. `excluded`: whom it leaves out of this round, as that becomes known.

    `num_left_out`: rounds in a row that the others have committed without it, which was ready, or with another leader
    than it would have followed.
    """

    def __init__(self, *, me: int, lineage: str, excluded: Collection[int], num_left_out: int) -> None:
        self._me, self._lineage, self._excluded = me, lineage, excluded
        self._heeds_others = num_left_out >= _LEFT_OUT
        self.leader: int | None = None
        self.is_first = True
        """The leader is the first of all that may lead."""
        self.ballot = 0
        self.patient_with: int | None = None
        """Whom it has waited for since it last began to wait, if for no other."""
        self.is_called = False
        """Most of the others follow this peer."""
        # Leaders of this ballot, one after the other: all that have this peer's join and may make a group of it.
        self._told: set[int] = set()
        self._num_led: Counter[int] = Counter()
        self._most_members = 0
        self._num_lost: Counter[int] = Counter()

    def first_choice(self, view: View, quiet: Collection[int]) -> int | None:
        """Who leads this ballot as far as this peer can tell."""
        if self.is_called:
            return self._me
        candidates = self._candidates(view, quiet)
        if self._heeds_others and self.ballot == 0:
            heeded = membership.led_by_most(candidates, self._lineage, self._me)
            if heeded is not None:
                return heeded
        return membership.leader_of(candidates, self._lineage, self.ballot)

    def choose(self, view: View, quiet: Collection[int]) -> int:
        """The leader, who is told that this peer is ready."""
        chosen = self.first_choice(view, quiet)
        self.leader = self._me if chosen is None else chosen
        if self.patient_with != self.leader:
            self.patient_with = None
        self._told.add(self.leader)
        self.is_first = self.leader == membership.leader_of(
            self._candidates(view, quiet), self._lineage, ballot=0
        )
        return self.leader

    def is_outranked(self, view: View, quiet: Collection[int]) -> bool:
        """Whether the leader has fallen quiet, or one of a lower rank has come."""
        if self.leader is None:
            return False
        # The rest takes longer, and views change often.
        may_be = self.leader in quiet or any(rank < self.leader for rank in view)
        return may_be and self.first_choice(view, quiet) not in (None, self.leader)

    def has_lost_leader(self, view: View, gone: Collection[int]) -> bool:
        """Whether the leader is gone, or has gone on without this peer hearing how the attempt ended."""
        leader = None if self.leader is None else view.get(self.leader)
        return leader is None or leader.world_rank in gone or leader.lineage != self._lineage

    def begin_to_wait(self) -> None:
        """For a group of the leader that there is."""
        self.patient_with = self.leader

    def may_lead(self, rank: int) -> bool:
        """Whether this peer has told it that it is ready, and nothing has come up against it."""
        return rank in self._told and rank not in self._excluded

    def follow(self, rank: int, num_members: int) -> bool:
        """Into an attempt with so many members that there are. False: it leads from one attempt to the next."""
        self._num_led[rank] += 1
        self._most_members = max(self._most_members, min(num_members, _MOST_COUNTED))
        if rank != self._me and self._num_led[rank] > 2 * self._most_members + _MORE_ATTEMPTS:
            return False
        self.leader = rank
        return True

    def tolerates_loss_to(self, rank: int) -> bool:
        """Counts an attempt that was lost to it while it led."""
        self._num_lost[rank] += 1
        return self._num_lost[rank] <= TOLERATED_OF_LEADER

    def drop_leader(self, *, next_ballot: bool = False) -> None:
        """What it makes of this peer's join from now on is not followed."""
        self.ballot += next_ballot
        self.is_called = False
        self._told.clear()

    def _candidates(self, view: View, quiet: Collection[int]) -> View:
        passed_over = {*self._excluded, *quiet} - {self._me}
        return {rank: peer for rank, peer in view.items() if rank not in passed_over}
