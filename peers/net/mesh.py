"""The mesh: how the peers of a run exchange statuses and round messages, and learn early that one of them is lost.

Peers find each other in the DHT and stay connected here. Among few, each has a channel with every other (channels.py);
among many, with its neighbours (overlay.py), which pass on the announcements of others (gossip.py). A channel to any
other peer is opened when there is a message for it, or one is expected, and closed when it has been idle. Both ends of
a channel send their announcement, signed, at every heartbeat and change, so a channel that breaks or falls silent shows
a loss long before the DHT record expires.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from peers.core import events
from peers.errors import ProtocolError
from peers.net.channels import Channels, Introduced, Reached
from peers.net.gate import Gate
from peers.net.gossip import Gossip
from peers.net.live_peer import silence_s
from peers.net.paths.paths import Paths
from peers.protocol.admission import Bans
from peers.protocol.mesh import (
    Announced,
    Carried,
    Known,
    Manifest,
    News,
    Parting,
    Ping,
    Pong,
    Said,
    Told,
    WantManifest,
)
from peers.protocol.records import Announcement, Lost, Spoken, Untimely
from peers.protocol.refusal import Refused, Why
from peers.timing import ANSWER_S, OFTEN_S, SLICE_S, START_S, status_s

log = logging.getLogger(__name__)

_NEWS_S, _PROGRESS = SLICE_S, 0.25
"""How long news is collected before it is passed on, so that many announcements travel in one message; and, as a share
of the time between two statuses, how long news is collected that no decision depends on."""
_ASKS = 8
"""The most questions for missed announcements between two statuses. A question holds 20 bytes for each peer."""
_IDLE_S = START_S
"""How long a channel to a peer that is no neighbour may be unused (LivePeer.used_at) before it is closed."""
MAX_WAITING = 64
"""Messages kept for a peer while a channel to it is opened."""

OwnRecord = Callable[[int, tuple[Lost, ...]], bytes]
"""This peer's announcement, signed, with this number and these losses."""


def mesh_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/mesh"


class Mesh:
    """Used from one event loop. `peers` holds the newest announcement of every other peer that is here."""

    def __init__(
        self,
        *,
        run_id: str,
        peer_id: str,
        transport: Paths,
        own_record: OwnRecord,
        on_change: Callable[[], None],
        post: Callable[[events.Event], None],
        on_manifest: Callable[[Announcement, Manifest | WantManifest], None],
        gate: Gate,
    ) -> None:
        """`post` takes events for the core, `on_manifest` messages about the manifest."""
        self._peer_id, self._own_record = peer_id, own_record
        self._on_change, self._post, self._on_manifest = on_change, post, on_manifest
        self._number, self._signed, self._signed_at = 0, b"", float("-inf")
        self._gossip = Gossip(peer_id)
        self._passing_on: asyncio.TimerHandle | None = None
        self._passes_on_at = math.inf
        self._left_to_them: set[str] = set()
        self._expected = frozenset[str]()
        self._waiting: dict[str, list[Carried]] = {}
        """Messages for peers to which a channel is being opened."""
        self._gate = gate
        gate.on_bans.append(self._spread_bans)
        self._channels = Channels(
            peer_id=peer_id,
            protocol=mesh_protocol(run_id),
            transport=transport,
            gate=gate,
            run_id=run_id,
            mesh=self,
        )

    @property
    def turned_away(self) -> Why | None:
        """Why the other peers refuse this one; None while any of them admits it, or none is there."""
        return self._channels.turned_away

    @property
    def peers(self) -> Sequence[Spoken]:
        """The newest announcement of every other peer that is here, even if several claim the same world rank."""
        return list(self._gossip.here.values())

    @property
    def neighbours(self) -> Sequence[Spoken]:
        """The newest announcements of this peer's neighbours."""
        return [self._gossip.here[peer_id] for peer_id in self._gossip.neighbours]

    @property
    def num_peers(self) -> int:
        return len(self._gossip.here)

    def newest(self, peer_id: str) -> Spoken | None:
        """The newest announcement of `peer_id`, whether it is here or not."""
        return self._gossip.newest(peer_id)

    async def start(self) -> None:
        await self._channels.start()
        self._channels.tasks.spawn(self._tend())

    async def close(self) -> None:
        await self._channels.close()

    # Whom to talk to

    def neighbours_among(self, peer_ids: Collection[str]) -> frozenset[str]:
        """The neighbours that this peer would have if these announced peers were here too."""
        self._gossip.announced(peer_ids)
        return self._gossip.neighbours_with(peer_ids)

    async def reach(self, record: Announcement) -> Reached:
        """Whether this peer answers; a channel to it is kept."""
        return await self._channels.reach(record)

    def expect(self, peer_ids: frozenset[str]) -> None:
        """There will be messages for these peers: open channels to them now, and keep them until the next call. Among
        few peers there are channels to all."""
        new, self._expected, channels = peer_ids - self._expected, peer_ids, self._channels
        if self._gossip.is_full_mesh:
            return
        for peer_id in new - channels.open.keys() - channels.dialling.keys():
            if (record := self._gossip.here.get(peer_id)) is not None:
                channels.dial(record)

    def discovered(self, records: Mapping[str, Announcement]) -> None:
        """Dial announced peers that are not here, and neighbours without a channel: those with larger ids at once.
        Those with smaller ids should dial this peer; they are dialled if they have not done so by the next call."""
        self._gossip.announced(records.keys())
        self._left_to_them = self._dial_missing(records)

    def _dial_missing(self, records: Mapping[str, Announcement]) -> set[str]:
        """Returns the peers that are left to dial this one."""
        here, channels = self._gossip.here, self._channels
        missing = {peer_id: record for peer_id, record in records.items() if peer_id not in here}
        missing |= {peer_id: here[peer_id] for peer_id in self._gossip.neighbours}
        for peer_id in channels.open.keys() | channels.dialling.keys() | {self._peer_id}:
            missing.pop(peer_id, None)
        for peer_id, record in missing.items():
            if self._peer_id < peer_id or peer_id in self._left_to_them:
                channels.dial(record)
        return missing.keys() - channels.dialling.keys()

    async def _tend(self) -> None:
        """Among many peers, at intervals: dial neighbours without a channel, close channels that nobody needs, give up
        peers of which nothing new comes, and ask one neighbour after another for missed announcements."""
        asked_at, num_asked = time.monotonic(), 0
        while True:
            await asyncio.sleep(OFTEN_S)
            if self._gossip.is_full_mesh:
                continue
            now, channels = time.monotonic(), self._channels
            neighbours = sorted(self._gossip.neighbours & channels.open.keys())
            if neighbours and now > asked_at + status_s(self.num_peers) / _ASKS:
                asked = channels.open[neighbours[num_asked % len(neighbours)]]
                asked_at, num_asked = now, num_asked + 1
                asked.enqueue(Known(versions=self._gossip.versions()))
            silent = self._gossip.silent(now, silence_s(self.num_peers, status_s))
            for peer_id in silent - channels.open.keys():
                self._lose(peer_id, by_own_channel=False)
            self._post(events.StillHere(frozenset(self._gossip.here)))
            self._left_to_them |= self._dial_missing({})
            for peer_id in channels.open.keys() - self._gossip.neighbours - self._expected:
                channel = channels.open[peer_id]
                if channel.caller == self._peer_id and now > channel.used_at + _IDLE_S:
                    channels.part(peer_id)

    # What this peer says

    def send_to(self, peer_id: str, message: Carried) -> None:
        """Queue a message. If the peer is not here the message is dropped, as by a broken channel."""
        if (channel := self._channels.open.get(peer_id)) is not None:
            channel.used_at = time.monotonic()
            channel.enqueue(message)
        elif (record := self._gossip.here.get(peer_id)) is not None:
            if peer_id not in self._channels.dialling:
                self._waiting[peer_id] = []
                self._channels.dial(record)
            if len(waiting := self._waiting.setdefault(peer_id, [])) < MAX_WAITING:
                waiting.append(message)

    def broadcast(self, message: Carried) -> None:
        """Send to every peer with a channel. A leader has one with each member that it has proposed a group to."""
        for channel in self._channels.open.values():
            channel.enqueue(message)

    def send_status(self, peer_id: str) -> None:
        """Send this peer's status to a peer with a channel. Other peers get it from those that pass it on."""
        if (channel := self._channels.open.get(peer_id)) is not None:
            channel.enqueue(Announced(record=self.recent_record()))

    def broadcast_status(self) -> None:
        said = Announced(record=self._sign())
        for channel in self._channels.open.values():
            channel.enqueue(said)

    def recent_record(self) -> bytes:
        """The announcement that was signed last, or a new one if it is older than the time between two statuses.
        Several heartbeats carry the same one, since each new one is passed on to all peers."""
        is_recent = time.monotonic() <= self._signed_at + status_s(self.num_peers)
        return self._signed if is_recent else self._sign()

    def _sign(self) -> bytes:
        now = time.monotonic()
        self._number += 1
        self._signed, self._signed_at = self._own_record(self._number, self._gossip.lost_lately(now)), now
        return self._signed

    # What happens on the channels

    def opened(self, peer_id: str, introduced: Introduced) -> None:
        self._heard(introduced.spoken, introduced.record, time.monotonic(), by=peer_id)
        self._on_change()
        self._learn_from([introduced.spoken], is_urgent=True)
        for message in self._waiting.pop(peer_id, ()):
            self.send_to(peer_id, message)

    def measured(self, peer_id: str, round_trip_s: float) -> None:
        """A message to this peer and its answer take this long; longer than a late answer, it says nothing."""
        if round_trip_s < ANSWER_S:
            self._post(events.RoundTrip(peer_id, round_trip_s))

    def received(self, peer_id: str, said: Said) -> None:
        """Raises ProtocolError, which closes the channel."""
        match said:
            case Announced(record):
                self._take([(self._channels.decode(peer_id, record), record)], by=peer_id)
            case News(told):
                self._take(self._new_of(told), by=peer_id)
            case Known(versions):
                before = time.monotonic() - status_s(self.num_peers)
                told = self._gossip.missing(peer_id, versions, before)
                if told and peer_id in self._channels.open:
                    self._channels.open[peer_id].enqueue(News(told=told))
            case Bans(signed):
                self._gate.learn(signed)
            case Ping() | Pong() | Parting():
                pass
            case _:
                if peer_id in self._channels.open:
                    self._channels.open[peer_id].used_at = time.monotonic()
                if (sender := self._gossip.newest(peer_id)) is None:
                    return
                if isinstance(said, Manifest | WantManifest):
                    self._on_manifest(sender, said)
                else:
                    self._post(events.Received(peer_id, said))

    def broken(self, peer_id: str) -> None:
        """The channel has ended without a Parting from either end."""
        self._lose(peer_id, by_own_channel=True)

    def _new_of(self, told: Sequence[Told]) -> list[tuple[Spoken, bytes]]:
        """The announcements that are new here. Raises ProtocolError for one that is not what it is said to be."""
        found = []
        for one in told:
            version = one.incarnation, one.number
            if one.peer_id in self._channels.open or not self._gossip.is_news(one.peer_id, version):
                continue
            try:
                spoken = self._channels.decode(one.peer_id, one.record)
            except (Refused, Untimely):
                continue
            if spoken.version != version:
                raise ProtocolError(f"forwards an announcement of {one.peer_id} under a wrong number")
            found.append((spoken, one.record))
        return found

    def _take(self, words: Sequence[tuple[Spoken, bytes]], by: str) -> None:
        """Take announcements with verified signatures; `by`: who has made them or passed them on."""
        now, is_changed, is_urgent, news = time.monotonic(), False, False, list[Spoken]()
        for spoken, record in words:
            before = self._gossip.here.get(spoken.peer_id)
            if self._heard(spoken, record, now, by):
                news.append(spoken)
                is_changed = is_changed or before is None or _essence(spoken) != _essence(before)
                is_urgent = is_urgent or before is None or _decisive(spoken) != _decisive(before)
        if is_changed:
            self._on_change()
        self._learn_from(news, is_urgent=is_urgent)

    def _heard(self, spoken: Spoken, record: bytes, now: float, by: str) -> bool:
        """As Gossip.heard. Tells the core of a peer that is here now and was not before."""
        was_here = spoken.peer_id in self._gossip.here
        is_news = self._gossip.heard(spoken, record, now, by)
        if not was_here and spoken.peer_id in self._gossip.here:
            self._post(events.Connected(spoken.peer_id))
        return is_news

    def _learn_from(self, news: Sequence[Spoken], *, is_urgent: bool) -> None:
        """Tell the core, give up the peers that are reported lost, and pass the news on."""
        if statuses := tuple((one.peer_id, one.status) for one in news if one.status is not None):
            self._post(events.StatusesReceived(statuses))
        for one in news:
            for peer_id in self._gossip.rumoured(one) - self._channels.open.keys():
                self._lose(peer_id, by_own_channel=False)
        if not self._gossip.is_full_mesh and any(map(self._is_said_to_be_lost, news)):
            self.broadcast_status()
        if news:
            self._pass_on_soon(is_urgent=is_urgent)

    def _is_said_to_be_lost(self, spoken: Spoken) -> bool:
        """Whether this announcement reports this peer lost, although its sender has heard this peer's newest one."""
        return any(lost.peer_id == self._peer_id and lost.number == self._number for lost in spoken.lost)

    def _lose(self, peer_id: str, *, by_own_channel: bool) -> None:
        if not self._gossip.lose(peer_id, time.monotonic(), by_own_channel=by_own_channel):
            return
        self._post(events.Disconnected(peer_id))
        self._on_change()
        if by_own_channel and not self._gossip.is_full_mesh:
            self.broadcast_status()

    def _pass_on_soon(self, *, is_urgent: bool) -> None:
        if self._gossip.is_full_mesh:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + (_NEWS_S if is_urgent else _PROGRESS * status_s(self.num_peers))
        if at < self._passes_on_at:
            if self._passing_on is not None:
                self._passing_on.cancel()
            self._passes_on_at, self._passing_on = at, loop.call_at(at, self._pass_on)

    def _pass_on(self) -> None:
        self._passes_on_at, self._passing_on = math.inf, None
        channels = self._channels.open
        for peer_id, told in self._gossip.due(self._gossip.neighbours & channels.keys()):
            channels[peer_id].enqueue(News(told=told))
        if self._gossip.is_owed:
            self._pass_on_soon(is_urgent=True)

    def _spread_bans(self) -> None:
        """Pass the new ban list on, then close the channels to those on it."""
        said = Bans(signed=self._gate.bans_blob)
        banned = self._gate.bans.peer_ids & self._gossip.here.keys()
        for channel in self._channels.open.values():
            channel.enqueue(said)
        for peer_id in banned:
            log.warning("peer %d (%s) is banned", self._gossip.here[peer_id].world_rank, peer_id)
            self._channels.drop(peer_id)
            self._lose(peer_id, by_own_channel=False)


def _essence(status: Announcement) -> tuple[Any, ...]:
    """The fields of a status that decisions depend on; the others only inform people."""
    return (
        status.world_rank,
        status.incarnation,
        status.state,
        status.epoch,
        status.head,
        status.manifest_digest,
    )


def _decisive(spoken: Spoken) -> tuple[Any, ...]:
    """What others wait for: `_essence`, the core's status without the worker's progress, and who is lost."""
    status = spoken.status
    said = status and replace(status, sequence=0, local_step=0, step_s=0.0)
    return *_essence(spoken), said, spoken.lost
