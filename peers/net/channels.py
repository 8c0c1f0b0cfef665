"""The channels of the mesh, one with each peer that this one talks to: dialled, introduced, kept, and replaced.

The peer with the smaller id opens the channel; if it does not, the other one does. If both have opened one, that of the
smaller id is kept.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerSilent, PeerUnreachable, ProtocolError
from peers.net.channel import Channel, call
from peers.net.dht.bootstrap import is_nobody_there
from peers.net.gate import Gate
from peers.net.live_peer import LivePeer, silence_s
from peers.net.rate_limit import RateLimits
from peers.net.socket_io import closed_on_error
from peers.protocol.admission import Bans
from peers.protocol.mesh import Announced, Introduction, Known, Parting, Ping, Pong, Said
from peers.protocol.messages import Ask
from peers.protocol.records import NO_RANK, Announcement, Spoken
from peers.protocol.refusal import Refusal, Refused, Why
from peers.tasks import Tasks, cancelled
from peers.timing import ANSWER_S, GRACE_S, OFTEN_S, heartbeat_s

if TYPE_CHECKING:
    from peers.net.mesh import Mesh
    from peers.net.paths.paths import Paths

log = logging.getLogger(__name__)

MESSAGES_PER_S, MESSAGES_AT_ONCE, BYTES_PER_MESSAGE = 200.0, 1000.0, 20_000
"""What a peer may send per second: this many small messages, or 4 MB; longer messages count as several. Many times what
an honest peer sends. To stop reading would not help: behind a flood in the buffers, the end of the stream would go
unnoticed."""
ANSWER_BYTES = 256 << 10
"""What a question counts in addition to its own bytes: about the size of its answer, which costs this peer as much."""
MAX_DIALLED = 32
"""Dials at once: anybody can announce peers in the DHT that do not exist."""

_SAID: Decoder[Said] = Decoder(Said)
_INTRODUCTION: Decoder[Introduction] = Decoder(Introduction)
Reached = Literal["here", "gone", "silent"]
""""gone": nobody listens at the peer's addresses, or it has refused this peer. "silent": it has not answered."""


class NotAdmitted(PeerUnreachable):
    """A peer that was reached refuses this one."""

    def __init__(self, why: Why) -> None:
        super().__init__(f"turned away: {why}")
        self.why = why


class Introduced(NamedTuple):
    """What the other end has announced, and the ban list that it was sent."""

    spoken: Spoken
    record: bytes
    told_bans: bytes


class Channels:
    """Used from one event loop. `open` holds the channels by peer id. The mesh is told what happens on them, and
    provides this peer's announcement."""

    def __init__(
        self,
        *,
        peer_id: str,
        protocol: str,
        transport: Paths,
        gate: Gate,
        run_id: str,
        mesh: Mesh,
    ) -> None:
        self._peer_id, self._protocol, self._transport = peer_id, protocol, transport
        self._run_id, self._gate, self._mesh = run_id, gate, mesh
        self.open: dict[str, LivePeer] = {}
        self.dialling: dict[str, asyncio.Task[Reached]] = {}
        self._dials = asyncio.Semaphore(MAX_DIALLED)
        # Kept when channels close, so that reconnecting does not reset a flood's limit.
        self._limits = RateLimits(MESSAGES_PER_S, MESSAGES_AT_ONCE)
        self.tasks, self._listening = Tasks(), Tasks()
        self._turned_away: Why | None = None

    @property
    def turned_away(self) -> Why | None:
        """Why the other peers refuse this one; None while any of them admits it, or none is there."""
        return None if self.open else self._turned_away

    async def start(self) -> None:
        await self._transport.serve(self._protocol, self._accepted)

    async def close(self) -> None:
        """Close all channels, once everything queued is sent or OFTEN_S is over."""
        for peer_id in list(self.open):
            self.drop(peer_id)
        await self._listening.ended_within(OFTEN_S)
        await self._listening.close()
        await self.tasks.close()

    def dial(self, record: Announcement) -> None:
        self.dialling[record.peer_id] = self.tasks.spawn(self._dial(record))

    async def reach(self, record: Announcement) -> Reached:
        """Whether this peer answers; a channel to it is kept."""
        peer_id = record.peer_id
        if peer_id not in self.open and peer_id not in self.dialling:
            self.dial(record)
        task = self.dialling.get(peer_id)
        if task is not None:
            await asyncio.wait({task}, timeout=ANSWER_S + 1)
        if peer_id in self.open:
            return "here"
        return task.result() if task is not None and task.done() and not task.cancelled() else "silent"

    def part(self, peer_id: str) -> None:
        """Close a channel that is not needed any more. The Parting tells the other end that this peer is not lost."""
        channel = self.open.pop(peer_id)
        channel.enqueue(Parting())
        channel.enqueue(None)

    def drop(self, peer_id: str) -> None:
        """Close the channel to this peer, if there is one, once everything queued is sent."""
        if (channel := self.open.pop(peer_id, None)) is not None:
            channel.enqueue(None)

    # Opening

    async def _dial(self, record: Announcement) -> Reached:
        peer_id = record.peer_id
        try:
            async with self._dials:
                channel, introduced = await self._called(record)
        except NotAdmitted as error:
            self._turned_away = error.why
            return "gone"
        except (PeerUnreachable, ProtocolError) as error:
            log.debug("cannot reach %s: %s", peer_id, error)
            if isinstance(error, PeerSilent):
                self._transport.no_answer(peer_id)
            return "gone" if is_nobody_there(str(error)) else "silent"
        finally:
            self.dialling.pop(peer_id, None)
        self._keep(peer_id, channel, introduced, caller=self._peer_id)
        return "here"

    async def _called(self, record: Announcement) -> tuple[Channel, Introduced]:
        channel = await call(
            self._transport, record.peer_id, self._protocol, timeout_s=ANSWER_S, maddrs=record.maddrs
        )
        with closed_on_error(channel):
            return channel, await self.introduced_as_caller(channel, record.peer_id)

    async def _redial(self, record: Announcement) -> None:
        """The peer may be alive and only the connection broken: dial again. The peer with the larger id lets the other
        one dial first."""
        if self._peer_id > record.peer_id:
            await asyncio.sleep(GRACE_S)
        await self.reach(record)

    async def _accepted(self, peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            introduced = await self.introduced_as_called(channel, peer_id)
        except Refused as error:
            await self.turn_away(channel, error.why)
            return
        except (PeerUnreachable, ProtocolError) as error:
            log.info("refused a channel from %s: %s", peer_id, error)
            channel.close()
            return
        self._keep(peer_id, channel, introduced, caller=peer_id)

    def _keep(self, peer_id: str, channel: Channel, introduced: Introduced, *, caller: str) -> None:
        """Make this the channel to the peer.

        A newer channel replaces an older one. But if both peers have called each other, both keep the channel that the
        smaller id opened, unless it is silent or belongs to a process that has restarted since.
        """
        known = self._mesh.newest(peer_id)
        if (older := self.open.get(peer_id)) is not None:
            is_same = known is not None and known.incarnation == introduced.spoken.incarnation
            if is_same and not older.is_silent and older.caller < caller:
                channel.close()
                return
            older.enqueue(None)
        newer = self.open[peer_id] = LivePeer(channel, caller)
        if self._gate.bans_blob != introduced.told_bans:
            newer.enqueue(Bans(signed=self._gate.bans_blob))
        self._mesh.opened(peer_id, introduced)
        self._listening.spawn(self._listen(newer, peer_id))

    # Introductions: each end sends the ban list that it has, then its announcement (protocol/mesh.py)

    async def introduced_as_caller(self, channel: Channel, peer_id: str) -> Introduced:
        """Raises NotAdmitted, Refused, PeerUnreachable, ProtocolError."""
        told = await self._say(channel)
        return Introduced(*await self._hear(channel, peer_id), told)

    async def introduced_as_called(self, channel: Channel, peer_id: str) -> Introduced:
        """Raises as `introduced_as_caller`."""
        spoken, record = await self._hear(channel, peer_id)
        return Introduced(spoken, record, await self._say(channel))

    async def turn_away(self, channel: Channel, why: Why) -> None:
        """Tell a refused peer the reason, and a banned one the signed ban list."""
        try:
            await self._tell_bans(channel)
            await channel.send_last(Refusal(why=why), ANSWER_S)
        except PeerUnreachable as error:
            log.debug("a refused peer did not hear why: %s", error)
        finally:
            channel.close()

    def decode(self, peer_id: str, record: bytes) -> Spoken:
        """The announcement in `record`, of this peer. Raises ProtocolError, and Refused if the peer is not admitted."""
        spoken = Spoken.decode(peer_id, record, run_id=self._run_id, now=time.time())
        self._gate.check(peer_id, spoken.token, "mesh")
        return spoken

    async def _say(self, channel: Channel) -> bytes:
        """Send the ban list, then this peer's announcement. Returns the ban list."""
        bans = await self._tell_bans(channel)
        await channel.send(Announced(record=self._mesh.recent_record()), timeout_s=ANSWER_S)
        return bans

    async def _tell_bans(self, channel: Channel) -> bytes:
        if bans := self._gate.bans_blob:
            await channel.send(Bans(signed=bans), timeout_s=ANSWER_S)
        return bans

    async def _hear(self, channel: Channel, peer_id: str) -> tuple[Spoken, bytes]:
        said = await channel.read(_INTRODUCTION, timeout_s=ANSWER_S)
        if isinstance(said, Bans):
            self._gate.learn(said.signed)
            said = await channel.read(_INTRODUCTION, timeout_s=ANSWER_S)
        match said:
            case Announced(record):
                return self.decode(peer_id, record), record
            case Refusal(why):
                raise NotAdmitted(why)
        raise ProtocolError("two ban lists in one introduction")

    # While a channel is open

    async def _listen(self, channel: LivePeer, peer_id: str) -> None:
        """Own the channel until it breaks."""

        def fell_silent() -> None:
            # If many peers are silent at once, this peer's own connection is at fault.
            if sum(other.is_silent for other in self.open.values()) <= max(1, len(self.open) // 4):
                self._transport.no_answer(peer_id)

        sender = asyncio.create_task(
            channel.send_forever(
                self._mesh.recent_record,
                lambda: heartbeat_s(self._mesh.num_peers),
                on_silence=fell_silent,
            )
        )
        stood_since = time.monotonic()
        broken_by: PeersError | None = None
        try:
            await self._read(channel, peer_id)
        except (PeerUnreachable, ProtocolError) as error:
            log.debug("lost the channel to peer %d: %s", self._rank_of(peer_id), error)
            broken_by = error
        finally:
            await cancelled([sender])
            channel.channel.close()
            if self.open.get(peer_id) is channel:
                del self.open[peer_id]
                self._broken(channel, peer_id, broken_by, stood_since)

    async def _read(self, channel: LivePeer, peer_id: str) -> None:
        read_bytes = 0
        while True:
            said = await channel.channel.read(_SAID, timeout_s=silence_s(self._mesh.num_peers))
            channel.heard()
            size, read_bytes = channel.channel.received_bytes - read_bytes, channel.channel.received_bytes
            size += ANSWER_BYTES if isinstance(said, Ask | Known) else 0
            if not self._limits.take(peer_id, time.monotonic(), 1 + size / BYTES_PER_MESSAGE):
                raise ProtocolError("sends more messages than the protocol allows")
            if isinstance(said, Parting):
                if self.open.get(peer_id) is channel:
                    del self.open[peer_id]
                return
            if isinstance(said, Ping):
                channel.enqueue(Pong())
            elif isinstance(said, Pong):
                if (round_trip_s := channel.ponged()) is not None:
                    self._mesh.measured(peer_id, round_trip_s)
            else:
                self._mesh.received(peer_id, said)
            # Reading what has already arrived does not yield to other tasks.
            await asyncio.sleep(0)

    def _broken(
        self, channel: LivePeer, peer_id: str, broken_by: PeersError | None, stood_since: float
    ) -> None:
        self._mesh.broken(peer_id)
        if isinstance(broken_by, PeerSilent) and channel.is_silent:
            self._transport.no_answer(peer_id)
        spoken = self._mesh.newest(peer_id)
        if spoken is None or spoken.state == "leaving" or not isinstance(broken_by, PeerUnreachable):
            return
        if time.monotonic() > stood_since + OFTEN_S:
            self.tasks.spawn(self._redial(spoken))

    def _rank_of(self, peer_id: str) -> int:
        spoken = self._mesh.newest(peer_id)
        return NO_RANK if spoken is None else spoken.world_rank
