"""The group rule: which peers are in the next commit on a head, whom it waits for, and how many are enough.

A commit waits, within the grace (round.py), for every peer that trains on the head. A quorum of the roster is enough.
Fewer are enough if every other roster member is gone or off this head for long and not further (`can_do_without`).
Every member evaluates this for itself, and checks the leader's plan against it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from peers.core.chain import Chain
from peers.core.health import Swarm
from peers.core.plans import (
    ABSENT_COMMITS,
    MAX_CLAIMED_RANK,
    SPARE_BLOCKS,
    Entry,
    fault_in,
    is_quorum,
    plan_of,
)
from peers.core.settings import Settings
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.certificates import Certificate, Keys, Plan, Verify

_TAKING_PART = ("training", "ready", "fetching")
"""Phases of a peer that is in the next commit, or may be."""


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """What all rounds of one peer have in common."""

    keys: Keys
    verify: Verify
    settings: Settings
    timing: Timing
    swarm: Swarm
    chain: Chain


class Group:
    """The group rule for the commit that follows `parent`, as this peer evaluates it.

    `absent`: for each roster member, how many commits in a row it has missed. `recent`: the heads just before this one.
    """

    def __init__(
        self,
        context: RoundContext,
        parent: Certificate,
        *,
        now: float,
        absent: Mapping[str, int],
        recent: Collection[str],
    ) -> None:
        self._parent, self._absent, self._recent = parent, absent, recent
        self._me = context.keys.peer_id
        self._swarm, self._chain, self._settings = context.swarm, context.chain, context.settings
        goes_on_as_minority = self._me in parent.plan.signer_set and not self.is_quorum(parent.plan.signers)
        self._heads_due_at = now + (0.0 if goes_on_as_minority else context.timing.last_resort_s)
        """Until then a minority waits for peers that may be further (`_may_be_further`). If it made the last commit as
        a minority, it has waited already, and does not wait again."""

    @property
    def roster(self) -> frozenset[str]:
        return self._parent.plan.roster_set

    def ready_and_expected(
        self,
        turn: Turn,
        entry: Entry | None,
        *,
        is_training: bool,
        attempt: int,
        suspects: frozenset[str],
        last_suspects: frozenset[str],
    ) -> tuple[set[str], set[str]]:
        """The peers that are ready to commit on this head, and those to wait for. `entry`: this peer's own work.

        Peers that made attempts fail are excluded from both if the rest is enough (`is_enough`). The first of these
        exclusions that leaves enough applies: peers left out for strikes, all `suspects` of attempts on this head and,
        after the first attempt, newcomers, since any stranger can claim to be ready; left out and suspects, since a
        robust rule may need the newcomers; left out and newcomers; only the suspects of the last attempt; nobody.
        """
        here, epoch = self._swarm.live_at(self._parent.head), self._parent.plan.epoch
        expected = {peer_id for peer_id, status in here.items() if status.phase in _TAKING_PART}
        ready = {p for p, s in here.items() if s.work is not None and s.work.based_on <= epoch} & expected
        for recent in self._recent:
            # Peers on a recent head are about to receive the last commit, or are applying it.
            expected |= {
                p for p, status in self._swarm.live_at(recent).items() if status.phase in _TAKING_PART
            }
        if self._parent.is_genesis:
            # Founders that have not received the genesis yet.
            expected |= self._swarm.live_at("").keys() & self.roster
        if entry is not None:
            ready.add(self._me)
        if is_training or entry is not None:
            expected.add(self._me)
        others = expected - {self._me}
        out = self._swarm.left_out(epoch) & others
        newcomers = others - self.roster if attempt > 0 else set()
        exclusions = [out | newcomers | suspects, out | newcomers, last_suspects]
        if sum(divmod(attempt, len(self.roster))) % 2 == 0:
            # In every second attempt of each leader.
            exclusions.insert(1, out | suspects)
        for excluded in exclusions:
            if self.is_enough(turn, rest := ready - excluded):
                return rest, expected - excluded
        return ready, expected

    def relies_on(self, peer_id: str) -> bool:
        """Whether a commit waits more than the least grace for `peer_id`: it contributed to one of the last commits, or
        has come since. A peer that only claims to train is not relied on for long. All peers agree which members are
        relied on, because certificates say who contributed."""
        is_member = peer_id in self.roster
        num_missed = self._absent.get(peer_id, 0) if is_member else self._swarm.num_missed(peer_id)
        return num_missed < ABSENT_COMMITS

    def is_enough(self, turn: Turn, ready: Collection[str]) -> bool:
        """Whether these peers may commit."""
        if not ready or len(ready) < self._settings.aggregation.least_group:
            return False
        if self.is_quorum(ready):
            return True
        others = self.roster.difference(ready)
        return self._me not in others and self.can_do_without(turn, others)

    def is_quorum(self, present: Collection[str]) -> bool:
        return is_quorum(present, self._parent, self._settings.quorum)

    def can_do_without(self, turn: Turn, others: Collection[str]) -> bool:
        """Whether each of these peers is gone, or is off this head and not further."""
        return all(
            self._swarm.is_gone(peer_id)
            or (self._swarm.is_off_head(peer_id, turn) and not self._may_be_further(turn, peer_id))
            for peer_id in others
        )

    def _may_be_further(self, turn: Turn, peer_id: str) -> bool:
        """Whether `peer_id` is at a later head of this chain, or at one whose certificate has yet to arrive. False
        after `_heads_due_at`: the certificate or the state may never arrive."""
        status = self._swarm.status(peer_id)
        if status is None or not status.head or turn.passed(self._heads_due_at):
            return False
        return self._chain.get(status.head) is None or self._chain.follows(status.head, self._parent.head)

    # Plans

    def plan_of(self, attempt: int, ready: Collection[str], entry: Entry | None) -> Plan:
        """The plan that this peer proposes as the leader of this attempt. `entry`: its own work."""
        here = self._swarm.live_at(self._parent.head)
        entries = {
            p: Entry(here[p].world_rank, work)
            for p in sorted(ready)
            if p in here and (work := here[p].work) is not None
        }
        if entry is not None:
            entries[self._me] = entry
        return plan_of(
            self._parent,
            attempt,
            entries,
            # Members may disagree on who is gone: after a failed attempt nobody is removed for that.
            off=self._off(entries) if attempt == 0 else (),
            data_width=self.data_width(entries),
            settings=self._settings,
        )

    def fault_in(self, plan: Plan) -> str:
        """Why this peer declines another peer's plan; empty: it is acceptable."""
        entries = {c.peer_id: Entry(c.world_rank, c.work) for c in plan.contributors}
        return fault_in(
            plan,
            self._parent,
            off_allowed=self._off(entries),
            data_width=self.data_width(entries),
            settings=self._settings,
        )

    def removed_by(self, plan: Plan) -> frozenset[str]:
        """Members that the plan removes, that do not contribute to it, and that were absent from few commits. Peers
        learn at different times that a member has left or is gone: a disagreement about that is nobody's fault, unless
        it lasts."""
        removed = self.roster - plan.roster_set - plan.signer_set
        return frozenset(p for p in removed if self._absent.get(p, 0) < 2 * ABSENT_COMMITS)

    def would_remove(self, removed: Collection[str], contributors: Collection[str]) -> bool:
        """Whether this peer would remove all of `removed`, too."""
        return self._off(contributors).issuperset(removed)

    def _off(self, contributors: Collection[str]) -> set[str]:
        """Roster members to remove: those that left, and those that are gone and missed the last commits."""
        return {
            peer_id
            for peer_id in self.roster - set(contributors) - {self._me}
            if self._swarm.has_left(peer_id)
            or (self._swarm.is_gone(peer_id) and self._absent.get(peer_id, 0) + 1 >= ABSENT_COMMITS)
        }

    def data_width(self, entries: Mapping[str, Entry]) -> int:
        """How many data blocks the epoch hands out: one per rank up to the roster's highest and per newcomer that is
        here or has an entry, and no fewer than the highest claimed rank needs. An honest newcomer claims the next free
        rank, so the width that workers who go ahead expect stays the same when its entry arrives."""
        highest = max(member.world_rank for member in self._parent.plan.roster)
        here = self._swarm.live_at(self._parent.head).keys() | {self._me}
        newcomers = (here | entries.keys()) - self.roster
        claimed = [min(entry.claimed_rank, MAX_CLAIMED_RANK) for entry in entries.values()]
        return 1 + max(highest + min(len(newcomers), SPARE_BLOCKS // 2), *claimed, 0)
