"""How this peer and the others of the run hear from one another: statuses, round messages, the first word of a death.

Peers are found in the DHT; here they are kept. Among few, everybody has a channel with everybody, among many with its
neighbours (overlay.py), who pass on what others say of themselves (gossip.py); a channel to anybody else is opened when
there is something to say to it, and closed when it has been idle. A channel is opened by the smaller peer id (by the
other when that does not come about): where both have opened one, that of the smaller id is kept. Both ends send what
they say of themselves, signed, at every heartbeat and change of it, so a channel that breaks or falls silent tells of a
loss long before the DHT record expires.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerSilent, PeerUnreachable, ProtocolError
from peers.net.channel import Channel
from peers.net.dht.bootstrap import is_nobody_there
from peers.net.gate import Gate
from peers.net.gossip import Gossip
from peers.net.introduction import Introduced, Introductions, NotAdmitted
from peers.net.live_peer import LivePeer, heartbeat_s, silence_s
from peers.net.rate_limit import RateLimits
from peers.net.transport import StreamTransport
from peers.protocol.admission import Bans
from peers.protocol.mesh import Announced, Carried, News, Parting, Said, Told
from peers.protocol.messages import Ask, Status
from peers.protocol.records import NO_RANK, Announcement, Lost, Spoken
from peers.protocol.refusal import Refused, Why
from peers.timing import ANSWER_S, GRACE_S, OFTEN_S, SLICE_S, START_S

log = logging.getLogger(__name__)

_FRESH_BEATS = 0.5
"""A signed status is used again in the heartbeats to other peers for so long: each new one is passed on to all."""
_NEWS_S = SLICE_S
"""News are gathered for so long before they are passed on, so that many travel in one message."""
_IDLE_S = START_S
"""A channel that no neighbour needs is closed after so long without a message for anybody."""
MESSAGES_PER_S, MESSAGES_AT_ONCE, BYTES_PER_MESSAGE = 200.0, 1000.0, 20_000
"""What a peer may send per second: this many small messages, or 4 MB; longer messages count as several. Many times
what an honest peer sends. Not reading would be no remedy: the end of the stream would stay hidden behind what a
flood leaves in the buffers.
"""
ANSWER_BYTES = 256 << 10
"""What a question counts for beside its own bytes: about as much as the answer, which costs this peer as much."""
MAX_DIALLED = 32
"""Dials at once: anybody can put records into the DHT of peers that do not exist."""
MAX_WAITING = 64
"""Messages kept for a peer while a channel to it is opened."""


def mesh_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/mesh"


T = TypeVar("T")
_SAID: Decoder[Said] = Decoder(Said)
Reached = Literal["here", "gone", "silent"]
"""Nobody listens at its addresses, or it has refused this peer."""
OwnRecord = Callable[[int, tuple[Lost, ...]], bytes]
"""What this peer says of itself, signed, with this number and these losses."""


class StreamOpener(StreamTransport, Protocol):
    """The part of peers/net/paths/paths.py that the mesh needs."""

    def no_answer(self, peer_id: str) -> None: ...


class Mesh:
    """Used from one event loop. `peers` holds the newest word of every peer that is here, but this one."""

    def __init__(
        self,
        *,
        run_id: str,
        peer_id: str,
        transport: StreamOpener,
        own_record: OwnRecord,
        on_change: Callable[[], None],
        on_message: Callable[[Announcement, Carried], None],
        on_statuses: Callable[[Sequence[tuple[str, Status]]], None] = lambda statuses: None,
        on_lost: Callable[[str], None] = lambda peer_id: None,
        gate: Gate | None = None,
    ) -> None:
        """`gate`: who may be here; default: everybody. `on_statuses` hears what cores say of themselves, by peer id,
        `on_lost` of each peer that is lost."""
        self._protocol = mesh_protocol(run_id)
        self._peer_id, self._transport = peer_id, transport
        self._own_record, self._on_change, self._on_message = own_record, on_change, on_message
        self._on_statuses, self._on_lost = on_statuses, on_lost
        self._number, self._signed, self._signed_at = 0, b"", float("-inf")
        self._channels: dict[str, LivePeer] = {}
        self._gossip = Gossip(peer_id)
        self._waiting: dict[str, list[Carried]] = {}
        """Messages for peers to which a channel is being opened."""
        self._is_news_due = False
        self._dialling: dict[str, asyncio.Task[Reached]] = {}
        self._dials = asyncio.Semaphore(MAX_DIALLED)
        self._left_to_them: set[str] = set()
        # Kept when channels close, so that reconnecting does not reset a flood's limit.
        self._limits = RateLimits(MESSAGES_PER_S, MESSAGES_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gate = gate or Gate.open(run_id)
        self._gate.on_bans.append(self._spread_bans)
        self._introductions = Introductions(run_id, self._gate, self._recent_record)
        self._turned_away: Why | None = None

    @property
    def turned_away(self) -> Why | None:
        """Why the other peers refuse this one; None while any of them admits it, or none is there."""
        return None if self._channels else self._turned_away

    @property
    def peers(self) -> Sequence[Spoken]:
        """The newest word of every peer that is here, also of several that claim one world rank."""
        return list(self._gossip.here.values())

    async def start(self) -> None:
        await self._transport.serve(self._protocol, self._accepted)
        self._spawn(self._tend())

    def neighbours_among(self, peer_ids: Collection[str]) -> frozenset[str]:
        """The neighbours that this peer would have, if these, which are announced, were here too."""
        self._gossip.announced(peer_ids)
        return self._gossip.neighbours_with(peer_ids)

    def discovered(self, records: Mapping[str, Announcement]) -> None:
        """Dial whoever is in the DHT and not here, and the neighbours to which there is no channel; larger peer ids at
        once, smaller ones, which are to dial this peer, when they have not done so by the next look."""
        self._gossip.announced(records.keys())
        self._dial_missing(records)

    def _dial_missing(self, records: Mapping[str, Announcement]) -> None:
        here = self._gossip.here
        missing = {peer_id: record for peer_id, record in records.items() if peer_id not in here}
        missing |= {peer_id: here[peer_id] for peer_id in self._gossip.neighbours}
        for peer_id in self._channels.keys() | self._dialling.keys() | {self._peer_id}:
            missing.pop(peer_id, None)
        for peer_id, record in missing.items():
            if self._peer_id < peer_id or peer_id in self._left_to_them:
                self._begin_dialling(record)
        self._left_to_them = missing.keys() - self._dialling.keys()

    async def reach(self, record: Announcement) -> Reached:
        """Whether this peer answers; a channel to it is kept."""
        peer_id = record.peer_id
        if peer_id not in self._channels and peer_id not in self._dialling:
            self._begin_dialling(record)
        task = self._dialling.get(peer_id)
        if task is not None:
            await asyncio.wait({task}, timeout=ANSWER_S + 1)
        if peer_id in self._channels:
            return "here"
        return task.result() if task is not None and task.done() and not task.cancelled() else "silent"

    def send_to(self, peer_id: str, message: Carried) -> None:
        """Queue a message; one to a peer that is gone is dropped, as a broken channel would drop it."""
        if (channel := self._channels.get(peer_id)) is not None:
            channel.used_at = time.monotonic()
            channel.enqueue(message)
        elif (record := self._gossip.here.get(peer_id)) is not None:
            waiting = self._waiting.setdefault(peer_id, [])
            if len(waiting) < MAX_WAITING:
                waiting.append(message)
            if peer_id not in self._dialling:
                self._begin_dialling(record)

    def broadcast(self, message: Carried) -> None:
        """To all with whom there is a channel, as a leader has with all whom it has proposed a group to."""
        for channel in self._channels.values():
            channel.enqueue(message)

    def send_status(self, peer_id: str) -> None:
        """To a peer with which there is a channel: others hear it from those who pass it on."""
        if (channel := self._channels.get(peer_id)) is not None:
            channel.enqueue(Announced(record=self._recent_record()))

    def broadcast_status(self) -> None:
        said = Announced(record=self._sign())
        for channel in self._channels.values():
            channel.enqueue(said)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # What this peer says of itself

    def _sign(self) -> bytes:
        now = time.monotonic()
        self._number += 1
        self._signed, self._signed_at = self._own_record(self._number, self._gossip.lost_lately(now)), now
        return self._signed

    def _recent_record(self) -> bytes:
        """Never older than the status that was broadcast last."""
        is_recent = time.monotonic() <= self._signed_at + _FRESH_BEATS * self._heartbeat_s()
        return self._signed if is_recent else self._sign()

    # Channels

    def _begin_dialling(self, record: Announcement) -> None:
        self._dialling[record.peer_id] = self._spawn(self._dial(record))

    async def _dial(self, record: Announcement) -> Reached:
        peer_id = record.peer_id
        try:
            async with self._dials:
                sock = await self._transport.open(
                    peer_id, self._protocol, timeout_s=ANSWER_S, maddrs=record.maddrs
                )
                channel = Channel(sock)
                try:
                    introduced = await self._introductions.as_caller(channel, peer_id)
                except BaseException:
                    channel.close()
                    raise
        except NotAdmitted as error:
            self._turned_away = error.why
            return "gone"
        except (PeerUnreachable, ProtocolError) as error:
            log.debug("cannot reach %s: %s", peer_id, error)
            if isinstance(error, PeerSilent):
                self._transport.no_answer(peer_id)
            return "gone" if is_nobody_there(str(error)) else "silent"
        finally:
            self._dialling.pop(peer_id, None)
            waiting = self._waiting.pop(peer_id, [])
        self._keep(peer_id, channel, introduced, caller=self._peer_id)
        for message in waiting:
            self.send_to(peer_id, message)
        return "here"

    async def _redial(self, record: Announcement) -> None:
        """The peer may be alive and only the connection broken: dial again. The larger peer id lets the other dial
        first.
        """
        if self._peer_id > record.peer_id:
            await asyncio.sleep(GRACE_S)
        await self.reach(record)

    async def _accepted(self, peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            introduced = await self._introductions.as_called(channel, peer_id)
        except Refused as error:
            await self._introductions.turn_away(channel, error.why)
            return
        except (PeerUnreachable, ProtocolError) as error:
            log.info("refused a channel from %s: %s", peer_id, error)
            channel.close()
            return
        self._keep(peer_id, channel, introduced, caller=peer_id)

    def _keep(self, peer_id: str, channel: Channel, introduced: Introduced, *, caller: str) -> None:
        """From now on this is the channel to the peer.

        A newer channel replaces an older one, but where both have called each other, both ends keep that of the smaller
        peer id, unless it is silent or that of a process that has been started anew.
        """
        spoken, known = introduced.spoken, self._gossip.newest(peer_id)
        if (older := self._channels.get(peer_id)) is not None:
            is_same = known is not None and known.incarnation == spoken.incarnation
            if is_same and not older.is_silent and older.caller < caller:
                channel.close()
                return
            older.enqueue(None)
        newer = self._channels[peer_id] = LivePeer(channel, caller)
        if self._gate.bans_blob != introduced.told_bans:
            newer.enqueue(Bans(signed=self._gate.bans_blob))
        self._gossip.heard(spoken, introduced.record, time.monotonic(), by=peer_id)
        self._on_change()
        self._say_on([spoken])
        self._spawn(self._listen(newer, peer_id))

    async def _listen(self, channel: LivePeer, peer_id: str) -> None:
        """Own the channel until it breaks."""

        def fell_silent() -> None:
            # If many peers are silent at once, it is this peer's connection that is bad.
            if sum(other.is_silent for other in self._channels.values()) <= max(1, len(self._channels) // 4):
                self._transport.no_answer(peer_id)

        sender = asyncio.create_task(
            channel.send_forever(self._recent_record, self._heartbeat_s, on_silence=fell_silent)
        )
        read_bytes, stood_since = 0, time.monotonic()
        broken_by: PeersError | None = None
        try:
            while True:
                said = await channel.channel.read(_SAID, timeout_s=self._silence_s())
                channel.heard()
                size, read_bytes = channel.channel.received_bytes - read_bytes, channel.channel.received_bytes
                size += ANSWER_BYTES if isinstance(said, Ask) else 0
                if not self._limits.take(peer_id, time.monotonic(), 1 + size / BYTES_PER_MESSAGE):
                    raise ProtocolError("sends more messages than anybody has reason to")
                self._received(channel, peer_id, said)
                # Reading what has arrived already does not yield to other tasks.
                await asyncio.sleep(0)
        except (PeerUnreachable, ProtocolError) as error:
            log.debug("lost the channel to peer %d: %s", self._rank_of(peer_id), error)
            broken_by = error
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            channel.channel.close()
            if self._channels.get(peer_id) is channel:
                del self._channels[peer_id]
                self._lost_channel(channel, peer_id, broken_by, stood_since)

    def _lost_channel(
        self, channel: LivePeer, peer_id: str, broken_by: PeersError | None, stood_since: float
    ) -> None:
        spoken = self._gossip.newest(peer_id)
        self._lose(peer_id, by_own_channel=True)
        if isinstance(broken_by, PeerSilent) and channel.is_silent:
            self._transport.no_answer(peer_id)
        may_be_back = (
            isinstance(broken_by, PeerUnreachable)
            and spoken is not None
            and spoken.state != "leaving"
            and time.monotonic() > stood_since + OFTEN_S
        )
        if may_be_back and spoken is not None:
            self._spawn(self._redial(spoken))

    async def _tend(self) -> None:
        """Look now and then for neighbours to dial, channels that nobody needs, and peers that say nothing new."""
        while True:
            await asyncio.sleep(OFTEN_S)
            if self._gossip.is_full_mesh:
                continue
            now = time.monotonic()
            for peer_id in self._gossip.silent(now, self._silence_s()) - self._channels.keys():
                self._lose(peer_id, by_own_channel=False)
            self._dial_missing({})
            for peer_id in self._channels.keys() - self._gossip.neighbours:
                channel = self._channels[peer_id]
                if channel.caller == self._peer_id and now > channel.used_at + _IDLE_S:
                    del self._channels[peer_id]
                    channel.enqueue(Parting())
                    channel.enqueue(None)

    def _rank_of(self, peer_id: str) -> int:
        spoken = self._gossip.newest(peer_id)
        return NO_RANK if spoken is None else spoken.world_rank

    def _heartbeat_s(self) -> float:
        return heartbeat_s(len(self._gossip.here))

    def _silence_s(self) -> float:
        return silence_s(len(self._gossip.here))

    # What others say

    def _received(self, channel: LivePeer, peer_id: str, said: Said) -> None:
        match said:
            case Announced(record):
                self._take([(self._introductions.decode(peer_id, record), record)], by=peer_id)
            case News(told):
                self._take(self._new_of(told), by=peer_id)
            case Parting():
                if self._channels.get(peer_id) is channel:
                    del self._channels[peer_id]
            case Bans(signed):
                self._gate.learn(signed)
            case _:
                channel.used_at = time.monotonic()
                if (sender := self._gossip.newest(peer_id)) is not None:
                    self._on_message(sender, said)

    def _new_of(self, told: Sequence[Told]) -> list[tuple[Spoken, bytes]]:
        """Those that this peer does not know yet. Raises ProtocolError for one that is not what it is said to be."""
        found = []
        for one in told:
            if one.peer_id in self._channels or not self._gossip.is_news(
                one.peer_id, (one.incarnation, one.number)
            ):
                continue
            try:
                spoken = self._introductions.decode(one.peer_id, one.record)
            except Refused:
                continue
            if spoken.version != (one.incarnation, one.number):
                raise ProtocolError(f"passes on words of {one.peer_id} under a false number")
            found.append((spoken, one.record))
        return found

    def _take(self, words: Sequence[tuple[Spoken, bytes]], by: str) -> None:
        """What peers say of themselves, whose signatures have been checked; `by`: who has said or passed it on."""
        now, is_changed, news = time.monotonic(), False, list[Spoken]()
        for spoken, record in words:
            before = self._gossip.here.get(spoken.peer_id)
            if self._gossip.heard(spoken, record, now, by):
                news.append(spoken)
                is_changed = is_changed or before is None or _essence(spoken) != _essence(before)
        if is_changed:
            self._on_change()
        self._say_on(news)

    def _say_on(self, news: Sequence[Spoken]) -> None:
        """To the core, and to the neighbours."""
        if statuses := [(one.peer_id, one.status) for one in news if one.status is not None]:
            self._on_statuses(statuses)
        for one in news:
            for peer_id in self._gossip.rumoured(one) - self._channels.keys():
                self._lose(peer_id, by_own_channel=False)
            if any(lost.peer_id == self._peer_id and lost.number >= self._number for lost in one.lost):
                self.broadcast_status()
        self._pass_on_soon()

    def _lose(self, peer_id: str, *, by_own_channel: bool) -> None:
        if not self._gossip.lose(peer_id, time.monotonic(), by_own_channel=by_own_channel):
            return
        self._on_lost(peer_id)
        self._on_change()
        if by_own_channel and not self._gossip.is_full_mesh:
            self.broadcast_status()

    def _pass_on_soon(self) -> None:
        if not self._is_news_due and not self._gossip.is_full_mesh:
            self._is_news_due = True
            asyncio.get_running_loop().call_later(_NEWS_S, self._pass_on)

    def _pass_on(self) -> None:
        self._is_news_due = False
        for peer_id, told in self._gossip.due(self._gossip.neighbours & self._channels.keys()):
            self._channels[peer_id].enqueue(News(told=told))
        if self._gossip.is_owed:
            self._pass_on_soon()

    def _spread_bans(self) -> None:
        """Pass the new ban list on, then close the channels to those on it."""
        said = Bans(signed=self._gate.bans_blob)
        banned = self._gate.bans.peer_ids & self._gossip.here.keys()
        for channel in self._channels.values():
            channel.enqueue(said)
        for peer_id in banned:
            log.warning("peer %d (%s) is banned", self._rank_of(peer_id), peer_id)
            if peer_id in self._channels:
                self._channels.pop(peer_id).enqueue(None)
            self._gossip.lose(peer_id, time.monotonic(), by_own_channel=False)
        if banned:
            self._on_change()


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
