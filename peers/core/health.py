"""Who is there, and who is well: one record per peer, from this peer's own evidence only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from peers.core.plans import ABSENT_COMMITS
from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.messages import Status

STRIKES = 2.0
"""A peer that has spoilt so many rounds is left out for a while."""
FADE_EPOCHS = 8
"""One strike is forgotten in so many epochs."""
FIRST_TERM_EPOCHS = 4
MAX_OUT_EPOCHS = 256
MOST_AT_ONCE = 0.5
"""What is left to the next term of who has been left out."""
MAX_PEERS_HEARD = 4096
FOUNDERS = 64
"""So many founders are believed to be there: strangers slow down nobody's heartbeat for long."""


_UNHEARD = Status(incarnation=0, sequence=0, world_rank=-1, phase="waiting")


@dataclass
class Health:
    """What this peer knows of another."""

    status: Status
    heard_at: float
    lost_at: float = math.inf
    """When its channel broke or its silence became too long; infinite: it is there."""
    in_started_run: bool = False
    """The certificate of a head that it has announced is here: it is in a run that has begun."""
    is_gone: bool = False
    """It has been lost for longer than the time to regain it."""
    at_head_at: float = 0.0
    """When it was last heard to train on this peer's head, or this peer came to it."""
    missed: int = 0
    """Commits that it is not in, since it came or was last in one."""
    round_trip_s: float = 0.0
    """0: not measured."""
    strikes: float = 0.0
    fades_from: int = 0
    """The epoch from which strikes fade."""
    out_until: int = 0
    """The epoch up to which it is left out."""
    term: int = 0
    """For how many epochs it was left out the last time; 0: that is forgotten."""

    def trains_at(self, head: str) -> bool:
        """As far as it has said."""
        return self.status.head == head and self.status.phase in ("training", "ready")


class Swarm:
    """All peers that this one has heard, itself aside."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._peers: dict[str, Health] = {}
        self._live: list[tuple[str, Status]] | None = None
        """What `live` says; None: something has changed since."""
        self.roster: frozenset[str] = frozenset()
        """By whom waiting times are scaled; before there is one, by everybody."""

    def heard(self, peer_id: str, status: Status | None, now: float) -> bool:
        """Anything from this peer; False where the status is older than one that is here."""
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
        """Whether this peer says no more than before, but for its progress; it is heard then."""
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
        """For one more; who is gone gives way."""
        if len(self._peers) >= MAX_PEERS_HEARD:
            gone = next((p for p in self._peers if self.is_gone(p) and p not in self.roster), None)
            if gone is None:
                return False
            del self._peers[gone]
            self._live = None
        return True

    def certificate_arrived(self, head: str) -> None:
        """The certificate of this head is here."""
        for health in self._peers.values():
            health.in_started_run = health.in_started_run or health.status.head == head

    def has_started_run(self) -> bool:
        """Whether anybody who is there is in a run that has begun."""
        return any(
            health.in_started_run and health.status.head and math.isinf(health.lost_at)
            for health in self._peers.values()
        )

    def expect(self, peer_id: str, now: float) -> None:
        """A member of the roster, which has its time to be heard."""
        if peer_id not in self._peers:
            self._peers[peer_id] = Health(_UNHEARD, now, at_head_at=now)
            self._live = None

    def connected(self, peer_id: str, now: float) -> None:
        """A peer to which there is a channel, and that may have said nothing yet: it has its time to, once."""
        if peer_id not in self._peers and self._make_room():
            self.expect(peer_id, now)
        elif not self._is_unheard(peer_id):
            self.heard(peer_id, None, now)

    def has_unheard(self) -> bool:
        """Whether anybody is there who has yet to say where it stands."""
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
        """This peer itself was frozen for so long: nobody else has been silent meanwhile."""
        for health in self._peers.values():
            health.heard_at += seconds
            health.at_head_at += seconds
            health.lost_at += seconds

    def notice_silence(self, turn: Turn, head: str) -> None:
        """`head`: this peer's own."""
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
        """By commits of these signers. Who was on the one before has its time to come to this peer's new head; where it
        is the first, everybody.

        Who was there already when it was lost has not gone on: it may be back."""
        its_time_s = self._timing.silence_s + self._timing.regain_s
        for health in self._peers.values():
            if is_first or now < health.at_head_at + its_time_s or health.trains_at(head):
                health.at_head_at = now
        for peer_id, health in self._peers.items():
            if is_first or peer_id in signers:
                health.missed = 0
            elif health.status.head:
                health.missed += 1

    def relies_on(self, peer_id: str) -> bool:
        """Whether a commit waits for it as for all others: it has come, or was in one of the last commits. Who only
        says that it trains may say so for ever."""
        health = self._peers.get(peer_id)
        return health is not None and health.missed < ABSENT_COMMITS

    def live(self) -> Sequence[tuple[str, Status]]:
        """Everybody who is there, and has not said that it leaves."""
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
        """It has left, or was lost so long ago that nobody waits for it any more."""
        health = self._peers.get(peer_id)
        return health is not None and (health.is_gone or health.status.phase == "leaving")

    def is_off_head(self, peer_id: str, turn: Turn) -> bool:
        """It does not train on this peer's head, and has had its time to: the others may go on without it."""
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
        """Of the run that it says to be in."""
        health = self._peers.get(peer_id)
        return health.status.genesis if health else ""

    def strikes(self, peer_id: str) -> float:
        health = self._peers.get(peer_id)
        return health.strikes if health else 0.0

    def strike(self, peer_id: str, epoch: int, weight: float = 1.0) -> bool:
        """It has spoilt something. True: it is left out from now on, for twice as long as the last time."""
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
        # One more, soon after it is back, and it is out again.
        health.strikes = STRIKES - MOST_AT_ONCE
        return True

    def term(self, peer_id: str) -> int:
        """For how many epochs it was left out the last time."""
        health = self._peers.get(peer_id)
        return health.term if health else 0

    def is_left_out(self, peer_id: str, epoch: int) -> bool:
        health = self._peers.get(peer_id)
        return health is not None and epoch < health.out_until

    def left_out(self, epoch: int) -> set[str]:
        """All of them."""
        return {peer_id for peer_id, health in self._peers.items() if epoch < health.out_until}
