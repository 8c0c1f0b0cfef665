"""Failure detection: which peers are live, and which are left out of groups. One record per peer, from this peer's own
evidence only.

A peer is *live* while it is heard, *lost* once its channel breaks or it misses heartbeats for `silence_s`, and *gone*
once it has left or been lost for `regain_s` (timing.py). It is *left out* of groups for some epochs after `STRIKES`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.messages import Status

STRIKES = 2.0
"""A peer with this many strikes is left out of groups."""
FADE_EPOCHS = 8
"""Strikes decay by one in this many epochs."""
FIRST_TERM_EPOCHS = 4
MAX_OUT_EPOCHS = 256
"""Each term of being left out is twice as long as the last, up to this."""
LEFT_TO_NEXT_TERM = 0.5
"""Strikes that a peer still lacks, after a term, until it is left out again."""
MAX_PEERS_HEARD = 4096
FOUNDERS = 64
"""Before there is a roster, heartbeats are slowed down for at most this many peers, so that strangers cannot do it."""


_UNHEARD = Status(incarnation=0, sequence=0, world_rank=-1, phase="waiting")


@dataclass
class Health:
    """What this peer knows of another one."""

    status: Status
    heard_at: float
    lost_at: float = math.inf
    """When its channel broke or its silence became too long; infinite: it is live."""
    in_started_run: bool = False
    """It has announced a head whose certificate this peer holds: its run exists."""
    is_gone: bool = False
    """It has been lost for longer than `regain_s`."""
    at_head_at: float = 0.0
    """When it was last seen training on this peer's head; reset when this peer's head moves (`head_moved`)."""
    missed: int = 0
    """Commits in a row that it did not contribute to, since it came (back)."""
    round_trip_s: float = 0.0
    """0: not measured."""
    strikes: float = 0.0
    fades_from: int = 0
    """The epoch from which strikes decay."""
    out_until: int = 0
    """The epoch up to which it is left out."""
    term: int = 0
    """How many epochs it was left out the last time; 0: never, or its strikes have decayed since."""

    def trains_at(self, head: str) -> bool:
        """By its last status."""
        return self.status.head == head and self.status.phase in ("training", "ready")


class Swarm:
    """The records of all peers that this one has heard, without itself."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._peers: dict[str, Health] = {}
        self._live: list[tuple[str, Status]] | None = None
        """Cache of `live`; None: stale."""
        self.roster: frozenset[str] = frozenset()
        """Heartbeats and timeouts scale with its size and round trips; while it is empty, with those of all peers."""

    def heard(self, peer_id: str, status: Status | None, now: float) -> bool:
        """A message came from `peer_id`. False if its status is older than the one held."""
        health = self._peers.get(peer_id)
        if health is None:
            if status is None or not self._make_room():
                return False
            self._peers[peer_id] = Health(status, now, at_head_at=now)
            self._live = None
            return True
        if health.lost_at != math.inf:
            self._live = None
        if health.is_gone:
            health.missed = 0
        health.heard_at, health.lost_at, health.is_gone = now, math.inf, False
        if status is None:
            return True
        old = health.status
        if (status.incarnation, status.sequence) <= (old.incarnation, old.sequence):
            return False
        health.status, self._live = status, None
        return True

    def heard_again(self, peer_id: str, status: Status, now: float) -> bool:
        """Record a status that differs from the last one in progress alone, and return True. Else do nothing."""
        health = self._peers.get(peer_id)
        if health is None or math.isfinite(health.lost_at):
            return False
        old = health.status
        if (status.phase, status.head, status.attempt) != (old.phase, old.head, old.attempt):
            return False
        same = replace(old, sequence=status.sequence, local_step=status.local_step, step_s=status.step_s)
        if status != same or status.sequence <= old.sequence:
            return False
        health.status, health.heard_at, self._live = status, now, None
        return True

    def _make_room(self) -> bool:
        """Make room for one more record, if need be in place of a peer that is gone. False: there is none."""
        if len(self._peers) >= MAX_PEERS_HEARD:
            gone = next((p for p in self._peers if self.is_gone(p) and p not in self.roster), None)
            if gone is None:
                return False
            del self._peers[gone]
            self._live = None
        return True

    def certificate_arrived(self, head: str) -> None:
        """This peer now holds the certificate of this head."""
        for health in self._peers.values():
            health.in_started_run = health.in_started_run or health.status.head == head

    def has_started_run(self) -> bool:
        """Whether any live peer is in a run that exists."""
        return any(
            health.in_started_run and health.status.head and math.isinf(health.lost_at)
            for health in self._peers.values()
        )

    def expect(self, peer_id: str, now: float) -> None:
        """Record a roster member that was never heard. It is lost only after `silence_s` from now."""
        if peer_id not in self._peers:
            self._peers[peer_id] = Health(_UNHEARD, now, at_head_at=now)
            self._live = None

    def connected(self, peer_id: str, now: float) -> None:
        """A channel to `peer_id` is open. If it has sent no status yet, it gets `silence_s` to do so, once only."""
        if peer_id not in self._peers and self._make_room():
            self.expect(peer_id, now)
        elif not self._is_unheard(peer_id):
            self.heard(peer_id, None, now)

    def has_unheard(self) -> bool:
        """Whether any live peer has not sent its first status yet."""
        return any(self._is_unheard(peer_id) for peer_id, _ in self.live())

    def _is_unheard(self, peer_id: str) -> bool:
        return self._peers[peer_id].status is _UNHEARD if peer_id in self._peers else True

    def measured(self, peer_id: str, round_trip_s: float) -> None:
        if (health := self._peers.get(peer_id)) is not None:
            health.round_trip_s = round_trip_s

    def disconnected(self, peer_id: str, now: float) -> None:
        if (health := self._peers.get(peer_id)) is not None and math.isinf(health.lost_at):
            health.lost_at, self._live = now, None

    def excuse_own_freeze(self, seconds: float) -> None:
        """This process was frozen for `seconds`: do not count that as silence of the others."""
        for health in self._peers.values():
            health.heard_at += seconds
            health.at_head_at += seconds
            health.lost_at += seconds

    def notice_silence(self, turn: Turn, head: str) -> None:
        """Mark peers as lost and gone, and update what timeouts depend on. `head`: this peer's own."""
        now, silence_s, regain_s = turn.now, self._timing.silence_s, self._timing.regain_s
        roster, round_trips, first_silent_at = self.roster, list[float](), math.inf
        for peer_id, health in self._peers.items():
            if health.lost_at == math.inf:
                silent_at = health.heard_at + silence_s
                if now >= silent_at:
                    health.lost_at, self._live = silent_at, None
                elif silent_at < first_silent_at:
                    first_silent_at = silent_at
            if health.lost_at < math.inf:
                if turn.passed(health.lost_at + regain_s):
                    health.is_gone = True
                continue
            if health.trains_at(head):
                health.at_head_at = now
            if not roster or peer_id in roster:
                round_trips.append(health.round_trip_s)
        turn.passed(first_silent_at)
        self._timing.num_peers = len(self.roster) or min(FOUNDERS, 1 + len(round_trips))
        self._timing.round_trip_s = statistics.median(round_trips) if round_trips else 0.0

    def head_moved(self, now: float, head: str, signers: Collection[str], *, is_first: bool) -> None:
        """This peer has moved to a new head by commits of these signers; `is_first`: it had none before.

        Peers that were not off the old head (`is_off_head`) get the same time again to reach the new one. So do those
        whose last status was at the new head already, even if they are lost: they may come back.
        """
        off_head_s = self._timing.silence_s + self._timing.regain_s
        for health in self._peers.values():
            if is_first or now < health.at_head_at + off_head_s or health.status.head == head:
                health.at_head_at = now
        for peer_id, health in self._peers.items():
            if is_first or peer_id in signers:
                health.missed = 0
            elif health.status.head:
                health.missed += 1

    def num_missed(self, peer_id: str) -> int:
        """How many commits have been made without `peer_id` since it came, or since its last contribution."""
        health = self._peers.get(peer_id)
        return health.missed if health else 0

    def live(self) -> Sequence[tuple[str, Status]]:
        """All live peers that have not announced that they leave, with their last statuses."""
        if self._live is None:
            self._live = [
                (peer_id, health.status)
                for peer_id, health in self._peers.items()
                if health.lost_at == math.inf and health.status.phase != "leaving"
            ]
        return self._live

    def is_live(self, peer_id: str) -> bool:
        health = self._peers.get(peer_id)
        return health is not None and math.isinf(health.lost_at) and health.status.phase != "leaving"

    def is_gone(self, peer_id: str) -> bool:
        """Whether `peer_id` has left, or has been lost for `regain_s`: even a minority may commit without it."""
        health = self._peers.get(peer_id)
        return health is not None and (health.is_gone or health.status.phase == "leaving")

    def is_off_head(self, peer_id: str, turn: Turn) -> bool:
        """Whether `peer_id` has not been seen training on this peer's head for a while: it is elsewhere, or dead. A
        commit may do without it."""
        health = self._peers.get(peer_id)
        if health is None:
            return False
        return turn.passed(health.at_head_at + self._timing.silence_s + self._timing.regain_s)

    def has_left(self, peer_id: str) -> bool:
        health = self._peers.get(peer_id)
        return health is not None and health.status.phase == "leaving"

    def status(self, peer_id: str) -> Status | None:
        health = self._peers.get(peer_id)
        return health.status if health else None

    def age_s(self, peer_id: str, now: float) -> float:
        return now - self._peers[peer_id].heard_at

    def genesis(self, peer_id: str) -> str:
        """Head of the genesis of the run that `peer_id` says it is in."""
        health = self._peers.get(peer_id)
        return health.status.genesis if health else ""

    def strikes(self, peer_id: str) -> float:
        health = self._peers.get(peer_id)
        return health.strikes if health else 0.0

    def strike(self, peer_id: str, epoch: int, weight: float = 1.0) -> bool:
        """Count a fault of `peer_id`. True: it is left out from now on, for twice as long as the last time."""
        health = self._peers.get(peer_id)
        if health is None or self.is_left_out(peer_id, epoch):
            return False
        health.strikes = max(0.0, health.strikes - max(0, epoch - health.fades_from) / FADE_EPOCHS)
        health.term = health.term if health.strikes else 0
        health.strikes, health.fades_from = health.strikes + weight, epoch
        if health.strikes < STRIKES:
            return False
        health.term = min(MAX_OUT_EPOCHS, 2 * health.term or FIRST_TERM_EPOCHS)
        health.out_until = health.fades_from = epoch + health.term
        # Another half a strike soon after its return leaves it out again.
        health.strikes = STRIKES - LEFT_TO_NEXT_TERM
        return True

    def term(self, peer_id: str) -> int:
        """How many epochs `peer_id` was left out the last time."""
        health = self._peers.get(peer_id)
        return health.term if health else 0

    def is_left_out(self, peer_id: str, epoch: int) -> bool:
        health = self._peers.get(peer_id)
        return health is not None and epoch < health.out_until

    def left_out(self, epoch: int) -> set[str]:
        """All peers that are left out."""
        return {peer_id for peer_id, health in self._peers.items() if epoch < health.out_until}
