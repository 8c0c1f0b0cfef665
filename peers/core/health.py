"""Failure detection: which peers are live, and which are left out of groups. One record per peer, from this peer's own
evidence only.

A peer is *live* while it is heard, *lost* once its channel breaks or it misses heartbeats for `silence_s`, and *gone*
once it has left or been lost for `regain_s` (timing.py). It is *left out* of groups for some epochs after `STRIKES`;
for as long, its objections to other chains do not count either (catch_up.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, ItemsView, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from peers.core.timing import Timing
from peers.core.turn import Turn
from peers.protocol.messages import Offer, Status

STRIKES = 2.0
"""A peer with this many strikes is left out of groups."""
FADE_EPOCHS = 8
"""Strikes decay by one in this many epochs, at the peer's next contribution: one that only spoils attempts, however
seldom, is left out in the end."""
FIRST_TERM_EPOCHS = 4
MAX_OUT_EPOCHS = 256
"""Each term of being left out is twice as long as the last, up to this."""
LEFT_TO_NEXT_TERM = 0.5
"""After a term, so many more strikes leave a peer out again."""
MAX_PEERS_HEARD = 4096
FOUNDERS = 64
"""Before there is a roster, timeouts count at most this many peers, so that strangers cannot slow heartbeats down."""


_UNHEARD = Status(incarnation=0, sequence=0, world_rank=-1, phase="waiting")


@dataclass
class Health:
    """What this peer knows of another one."""

    status: Status
    heard_at: float
    told_at: float = 0.0
    """When its status last showed that its worker has come further."""
    lost_at: float = math.inf
    """When its channel broke or its silence became too long; infinite: it is live."""
    is_gone: bool = False
    """It has been lost for longer than `regain_s`."""
    at_head_at: float = 0.0
    """When it last stopped training on this peer's head; reset when this peer's head moves (`head_moved`)."""
    missed: int = 0
    """Commits in a row that it did not contribute to, since it came or came back."""
    round_trip_s: float = 0.0
    """0: not measured."""
    sound_offer: Offer | None = None
    """The last offer of a trained state that was checked, if it is sound."""
    offer_checked_at: float = -math.inf
    strikes: float = 0.0
    fades_from: int = 0
    """The epoch up to which strikes have decayed."""
    out_until: int = 0
    """The epoch up to which it is left out."""
    term: int = 0
    """How many epochs it was left out the last time; 0: never, or its strikes have decayed since."""

    @property
    def is_live(self) -> bool:
        return self.lost_at == math.inf and self.status.phase != "leaving"

    def tell(self, status: Status, now: float) -> None:
        old, self.status = self.status, status
        if (status.head, status.phase, status.local_step) != (old.head, old.phase, old.local_step):
            self.told_at = now

    def fade(self, epoch: int) -> None:
        """It has contributed to the commit that ended this epoch."""
        if epoch > self.fades_from:
            self.strikes = max(0.0, self.strikes - (epoch - self.fades_from) / FADE_EPOCHS)
            self.fades_from = epoch
        if not self.strikes:
            self.term = 0

    def trains_at(self, head: str) -> bool:
        """Whether it is live and trains on this head, by its last status."""
        return self.is_live and self.status.head == head and self.status.phase in ("training", "ready")


class Swarm:
    """The records of all peers that this one has heard, without itself."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._peers: dict[str, Health] = {}
        self._live: dict[str, Status] = {}
        self._live_at: dict[str, dict[str, Status]] = {}
        """`_live` by head."""
        self._struck: set[str] = set()
        """Peers that have been left out at some time."""
        self._head = ""
        """This peer's own head."""
        self._roster: frozenset[str] = frozenset()
        self._look_at = -math.inf
        """No peer becomes lost or gone before then."""

    @property
    def roster(self) -> frozenset[str]:
        """Timeouts scale with its size and the round trips to its members; while it is empty, all live peers count."""
        return self._roster

    @roster.setter
    def roster(self, roster: frozenset[str]) -> None:
        self._roster, self._look_at = roster, -math.inf

    def _changed(self, peer_id: str, health: Health, now: float) -> None:
        """Update the indexes of live peers after this peer's record has changed."""
        old = self._live.get(peer_id)
        new = health.status if health.is_live else None
        if old is not None and old.head == self._head and old.phase in ("training", "ready"):
            health.at_head_at = now
        if old is not None and (new is None or new.head != old.head):
            del self._live_at[old.head][peer_id]
            if not self._live_at[old.head]:
                del self._live_at[old.head]
        if new is not None:
            self._live[peer_id] = new
            self._live_at.setdefault(new.head, {})[peer_id] = new
        elif old is not None:
            del self._live[peer_id]
        if (old is None) != (new is None):
            self._look_at = -math.inf

    def heard(self, peer_id: str, status: Status | None, now: float) -> bool:
        """A message came from `peer_id`. False if its status is not newer than the one held, or none has come yet."""
        health = self._peers.get(peer_id)
        if health is None:
            if status is None or not self._make_room():
                return False
            self._add(peer_id, status, now)
            return True
        if status is None and health.status is _UNHEARD:
            # Other messages of a peer that has sent no status do not count: nobody waits for it for long.
            return False
        if health.is_gone:
            health.missed = 0
        was_lost = health.lost_at != math.inf
        health.heard_at, health.lost_at, health.is_gone = now, math.inf, False
        is_newer = status is not None and _version(status) > _version(health.status)
        if status is not None and is_newer:
            health.tell(status, now)
        if is_newer or was_lost:
            self._changed(peer_id, health, now)
        return status is None or is_newer

    def heard_again(self, peer_id: str, status: Status, now: float) -> bool:
        """Record a status that differs from the last one in progress alone, and return True; else only return False."""
        health = self._peers.get(peer_id)
        if health is None or math.isfinite(health.lost_at):
            return False
        old = health.status
        if (status.phase, status.head, status.attempt) != (old.phase, old.head, old.attempt):
            return False
        same = replace(old, sequence=status.sequence, local_step=status.local_step, step_s=status.step_s)
        if status != same or status.sequence <= old.sequence:
            return False
        health.heard_at = now
        health.tell(status, now)
        if peer_id in self._live:
            self._live[peer_id] = self._live_at[status.head][peer_id] = status
        return True

    def still_here(self, peer_ids: Collection[str], now: float) -> None:
        """The mesh hears these peers, itself or through their neighbours: they are not silent."""
        for peer_id in self._live.keys() & peer_ids:
            if self._live[peer_id] is not _UNHEARD:
                self._peers[peer_id].heard_at = now

    def _add(self, peer_id: str, status: Status, now: float) -> None:
        health = self._peers[peer_id] = Health(status, now, told_at=now, at_head_at=now)
        self._changed(peer_id, health, now)

    def _make_room(self) -> bool:
        """Make room for one more record, if need be in place of a peer that is gone. False: there is none."""
        if len(self._peers) >= MAX_PEERS_HEARD:
            gone = next((p for p in self._peers if self.is_gone(p) and p not in self.roster), None)
            if gone is None:
                return False
            del self._peers[gone]
            self._struck.discard(gone)
        return True

    def hears_a_head(self) -> bool:
        """Whether any peer that is not lost announces a head, also one that leaves."""
        return any(health.status.head and math.isinf(health.lost_at) for health in self._peers.values())

    def expect(self, peer_id: str, now: float) -> None:
        """Record a roster member that was never heard. It is lost only after `silence_s` from now."""
        if peer_id not in self._peers:
            self._add(peer_id, _UNHEARD, now)

    def connected(self, peer_id: str, now: float) -> None:
        """A channel to `peer_id` is open. If it has sent no status yet, it gets `silence_s` to do so, once only."""
        if peer_id not in self._peers and self._make_room():
            self.expect(peer_id, now)
        else:
            self.heard(peer_id, None, now)

    def has_unheard(self) -> bool:
        """Whether any live peer has not sent its first status yet."""
        return not all(self.was_heard(peer_id) for peer_id, _ in self.live())

    def was_heard(self, peer_id: str) -> bool:
        """Whether `peer_id` has ever sent a status."""
        return peer_id in self._peers and self._peers[peer_id].status is not _UNHEARD

    def measured(self, peer_id: str, round_trip_s: float) -> None:
        if (health := self._peers.get(peer_id)) is not None:
            health.round_trip_s, self._look_at = round_trip_s, -math.inf

    def disconnected(self, peer_id: str, now: float) -> None:
        if (health := self._peers.get(peer_id)) is not None and math.isinf(health.lost_at):
            health.lost_at = now
            self._changed(peer_id, health, now)

    def excuse_own_freeze(self, seconds: float) -> None:
        """This process was frozen for `seconds`: do not count that as silence of the others."""
        for health in self._peers.values():
            health.heard_at += seconds
            health.told_at += seconds
            health.at_head_at += seconds
            health.lost_at += seconds

    def notice_silence(self, turn: Turn) -> None:
        """Mark peers as lost and gone, and update what timeouts depend on."""
        while turn.now >= self._look_at:
            self._look(turn.now)
        turn.passed(self._look_at)

    def _look(self, now: float) -> None:
        silence_s, regain_s = self._timing.silence_s, self._timing.regain_s
        roster, round_trips, num_live, look_at = self.roster, list[float](), 0, math.inf
        for peer_id, health in self._peers.items():
            silent_at = health.heard_at + silence_s
            if health.lost_at == math.inf and now >= silent_at:
                health.lost_at = silent_at
                self._changed(peer_id, health, now)
            if health.lost_at == math.inf:
                look_at = min(look_at, silent_at)
                if not roster or peer_id in roster:
                    num_live += 1
                    # Among many peers, only the round trips to this peer's neighbours are known.
                    round_trips += [health.round_trip_s] if health.round_trip_s else []
            elif not health.is_gone:
                health.is_gone = now >= health.lost_at + regain_s
                look_at = look_at if health.is_gone else min(look_at, health.lost_at + regain_s)
        num_peers = len(self.roster) or min(FOUNDERS, 1 + num_live)
        # Before there is a roster, strangers that answer late could make up most of the peers.
        usual = statistics.median_low if self.roster else min
        round_trip_s = usual(round_trips) if round_trips else 0.0
        is_same = (num_peers, round_trip_s) == (self._timing.num_peers, self._timing.round_trip_s)
        self._timing.num_peers, self._timing.round_trip_s = num_peers, round_trip_s
        # If timeouts changed, look again: other peers may be lost or gone by the new ones.
        self._look_at = look_at if is_same else -math.inf

    def head_moved(
        self, now: float, head: str, epoch: int, signers: Collection[str], *, is_first: bool
    ) -> None:
        """This peer has moved to a new head by commits of these signers. `is_first`: it had no head before. `roster` is
        the new head's already.

        The time after which a peer counts as off the head (`is_off_head`) begins anew for peers that were not off the
        old head; for peers whose last status was at the new head, even if they are lost: they may come back; and for
        the signers if they are a majority of the roster: they may have moved on by a commit whose certificate has yet
        to arrive. A minority's signers get no new time: this peer follows them only once they are off its head.
        """
        off_head_s = self._timing.silence_s + self._timing.regain_s
        is_majority = 2 * len(self.roster.intersection(signers)) > len(self.roster)
        for peer_id, health in self._peers.items():
            is_off = now >= health.at_head_at + off_head_s and not health.trains_at(self._head)
            was_there = health.status.head == head or (is_majority and peer_id in signers)
            if is_first or not is_off or was_there:
                health.at_head_at = now
        self._head = head
        for peer_id, health in self._peers.items():
            if peer_id in signers:
                health.fade(epoch)
            if is_first or peer_id in signers:
                health.missed = 0
            elif health.status.head:
                health.missed += 1

    def num_missed(self, peer_id: str) -> int:
        """How many commits have been made without `peer_id` since it came, or since its last contribution."""
        health = self._peers.get(peer_id)
        return health.missed if health else 0

    def live(self) -> ItemsView[str, Status]:
        """All live peers that have not announced that they leave, with their last statuses."""
        return self._live.items()

    def live_at(self, head: str) -> Mapping[str, Status]:
        """The live peers that announce this head."""
        return self._live_at.get(head, {})

    @property
    def heads(self) -> Collection[str]:
        """The heads that live peers announce, among them the empty string if a live peer has no head."""
        return self._live_at.keys()

    def is_live(self, peer_id: str) -> bool:
        return peer_id in self._live

    def is_here(self, peer_id: str) -> bool:
        """Whether `peer_id` has been heard, and is not gone."""
        return self.was_heard(peer_id) and not self.is_gone(peer_id)

    def is_gone(self, peer_id: str) -> bool:
        """Whether `peer_id` has left, or has been lost for `regain_s`: even a minority may commit without it."""
        health = self._peers.get(peer_id)
        return health is not None and (health.is_gone or health.status.phase == "leaving")

    def is_off_head(self, peer_id: str, turn: Turn) -> bool:
        """Whether `peer_id` was not seen training on this peer's head for `silence_s` + `regain_s`: it is elsewhere or
        dead, and a commit may do without it."""
        health = self._peers.get(peer_id)
        if health is None or health.trains_at(self._head):
            return False
        return turn.passed(health.at_head_at + self._timing.silence_s + self._timing.regain_s)

    def has_left(self, peer_id: str) -> bool:
        health = self._peers.get(peer_id)
        return health is not None and health.status.phase == "leaving"

    def status(self, peer_id: str) -> Status | None:
        health = self._peers.get(peer_id)
        return health.status if health else None

    def is_sound(self, peer_id: str, offer: Offer, check: Callable[[Offer], bool], now: float) -> bool:
        """Whether this offer of a trained state is sound by `check`, which verifies up to a thousand signatures.
        Another offer of the same peer is checked only after `silence_s`, and counts as unsound until then."""
        health = self._peers.get(peer_id)
        if health is None:
            return check(offer)
        if offer != health.sound_offer and now >= health.offer_checked_at + self._timing.silence_s:
            health.offer_checked_at = now
            health.sound_offer = offer if check(offer) else None
        return offer == health.sound_offer

    def told_at(self, peer_id: str) -> float:
        """When its status last showed that its worker has come further."""
        return self._peers[peer_id].told_at

    def age_s(self, peer_id: str, now: float) -> float:
        return now - self._peers[peer_id].heard_at

    def is_silent_for(self, peer_id: str, seconds: float, now: float) -> bool:
        """Whether `peer_id` is lost, or has sent nothing for so long."""
        return not self.is_live(peer_id) or self.age_s(peer_id, now) >= seconds

    def strikes(self, peer_id: str) -> float:
        health = self._peers.get(peer_id)
        return health.strikes if health else 0.0

    def strike(self, peer_id: str, epoch: int, weight: float = 1.0) -> bool:
        """Count a fault of `peer_id`. True: it is left out from now on, for twice as long as the last time."""
        health = self._peers.get(peer_id)
        if health is None or self.is_left_out(peer_id, epoch):
            return False
        health.fades_from = epoch if not health.strikes else min(epoch, health.fades_from)
        health.strikes += weight
        if health.strikes < STRIKES:
            return False
        health.term = min(MAX_OUT_EPOCHS, 2 * health.term or FIRST_TERM_EPOCHS)
        health.out_until = health.fades_from = epoch + health.term
        self._struck.add(peer_id)
        # Half a strike more, soon after the term, leaves the peer out again.
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
        return {peer_id for peer_id in self._struck if epoch < self._peers[peer_id].out_until}


def _version(status: Status) -> tuple[int, int]:
    return status.incarnation, status.sequence
