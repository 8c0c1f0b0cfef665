"""A live channel to every other peer of the run: statuses, round messages, and the first word of a death.

Peers are found in the DHT; here they are kept. Each pair shares one channel, opened by the smaller peer id (by the
other when that does not come about): where both have opened one, that of the smaller id is kept. Both ends send what
they say of themselves, signed, at every heartbeat and change of it, so a channel that breaks or falls silent tells of a
loss long before the DHT record expires.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerSilent, PeerUnreachable, ProtocolError
from peers.net.channel import Channel
from peers.net.dht.bootstrap import is_nobody_there
from peers.net.gate import Gate
from peers.net.live_peer import LivePeer, heartbeat_s, silence_s
from peers.net.rate_limit import RateLimits
from peers.net.transport import StreamTransport
from peers.protocol.admission import Bans
from peers.protocol.mesh import Announced, Carried, Introduction, Said
from peers.protocol.messages import Ask, Status
from peers.protocol.records import Announcement, Spoken
from peers.protocol.refusal import Refusal, Refused, Why
from peers.timing import ANSWER_S, BEAT_S, GRACE_S, OFTEN_S, RETRY_S

log = logging.getLogger(__name__)

_FRESH_S = BEAT_S / 2
"""A signed status is used again in the heartbeats to other peers for so long: among fifty, signing takes time."""
_LAST_WORD_S = RETRY_S
"""For a refused peer to read the reason before this end closes."""
MESSAGES_PER_S, MESSAGES_AT_ONCE, BYTES_PER_MESSAGE = 200.0, 1000.0, 20_000
"""What a peer may send per second: this many small messages, or 4 MB; longer messages count as several. Many times
what an honest peer sends. Not reading would be no remedy: the end of the stream would stay hidden behind what a
flood leaves in the buffers.
"""
ANSWER_BYTES = 256 << 10
"""What a question counts for beside its own bytes: about as much as the answer, which costs this peer as much."""
MAX_DIALLED = 32
"""Dials at once: anybody can put records into the DHT of peers that do not exist."""


def mesh_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/mesh"


T = TypeVar("T")
_INTRODUCTION: Decoder[Introduction] = Decoder(Introduction)
_SAID: Decoder[Said] = Decoder(Said)
Reached = Literal["here", "gone", "silent"]
"""Nobody listens at its addresses, or it has refused this peer."""


class NotAdmitted(PeerUnreachable):
    """A peer that was reached says that this one is not admitted."""

    def __init__(self, why: Why) -> None:
        super().__init__(f"turned away: {why}")
        self.why = why


class StreamOpener(StreamTransport, Protocol):
    """The part of peers/net/paths/paths.py that the mesh needs."""

    def no_answer(self, peer_id: str) -> None: ...


class Mesh:
    """Used from one event loop. `peers` holds the newest status of every live peer but this one."""

    def __init__(
        self,
        *,
        run_id: str,
        peer_id: str,
        transport: StreamOpener,
        status: Callable[[], bytes],
        on_change: Callable[[], None],
        on_message: Callable[[Announcement, Carried | Status], None],
        on_lost: Callable[[str], None] = lambda peer_id: None,
        gate: Gate | None = None,
    ) -> None:
        """`gate`: who may be here; default: everybody. `on_lost` hears of each channel that ends, by peer id."""
        self._protocol = mesh_protocol(run_id)
        self._run_id, self._peer_id, self._transport = run_id, peer_id, transport
        self._status, self._on_change, self._on_message = status, on_change, on_message
        self._on_lost = on_lost
        self._signed, self._signed_at = b"", float("-inf")
        self._peers: dict[str, LivePeer] = {}
        self._dialling: dict[str, asyncio.Task[Reached]] = {}
        self._dials = asyncio.Semaphore(MAX_DIALLED)
        self._left_to_them: set[str] = set()
        # Kept when channels close, so that reconnecting does not reset a flood's limit.
        self._limits = RateLimits(MESSAGES_PER_S, MESSAGES_AT_ONCE)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gate = gate or Gate.open(run_id)
        self._gate.on_bans.append(self._spread_bans)
        self._turned_away: Why | None = None

    @property
    def turned_away(self) -> Why | None:
        """Why the other peers refuse this one; None while any of them admits it, or none is there."""
        return None if self._peers else self._turned_away

    @property
    def peers(self) -> Sequence[Announcement]:
        """The newest status of every live peer, also of several that claim one world rank."""
        return [peer.status for peer in self._peers.values()]

    async def start(self) -> None:
        await self._transport.serve(self._protocol, self._accepted)

    def discovered(self, records: Mapping[str, Announcement]) -> None:
        """Dial whoever is in the DHT and has no channel yet; larger peer ids at once, smaller ones, which are to dial
        this peer, when they have not done so by the next look."""
        known = self._peers.keys() | self._dialling.keys() | {self._peer_id}
        missing = {peer_id: record for peer_id, record in records.items() if peer_id not in known}
        for peer_id, record in missing.items():
            if self._peer_id < peer_id or peer_id in self._left_to_them:
                self._dialling[peer_id] = self._spawn(self._dial(record))
        self._left_to_them = missing.keys() - self._dialling.keys()

    async def reach(self, record: Announcement) -> Reached:
        """Whether this peer answers; a channel to it is kept."""
        peer_id = record.peer_id
        if peer_id not in self._peers and peer_id not in self._dialling:
            self._dialling[peer_id] = self._spawn(self._dial(record))
        task = self._dialling.get(peer_id)
        if task is not None:
            await asyncio.wait({task}, timeout=ANSWER_S + 1)
        if peer_id in self._peers:
            return "here"
        return task.result() if task is not None and task.done() and not task.cancelled() else "silent"

    def send_to(self, peer_id: str, message: Carried | Announced) -> None:
        """Queue a message; one to a peer that is gone is dropped, as a broken channel would drop it."""
        if (peer := self._peers.get(peer_id)) is not None:
            peer.enqueue(message)

    def broadcast(self, message: Carried | Announced) -> None:
        for peer in self._peers.values():
            peer.enqueue(message)

    def send_status(self, peer_id: str) -> None:
        self.send_to(peer_id, Announced(record=self._recent_status()))

    def broadcast_status(self) -> None:
        self._signed, self._signed_at = self._status(), time.monotonic()
        self.broadcast(Announced(record=self._signed))

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

    async def _dial(self, record: Announcement) -> Reached:
        peer_id = record.peer_id
        try:
            async with self._dials:
                channel, status, told = await self._introduced(record)
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
        self._keep(peer_id, channel, status, told, caller=self._peer_id)
        return "here"

    async def _redial(self, record: Announcement) -> None:
        """The peer may be alive and only the connection broken: dial again. The larger peer id lets the other dial
        first.
        """
        if self._peer_id > record.peer_id:
            await asyncio.sleep(GRACE_S)
        await self.reach(record)

    async def _introduced(self, record: Announcement) -> tuple[Channel, Spoken, bytes]:
        """The channel, how the other stands, and the ban list that it has heard."""
        sock = await self._transport.open(
            record.peer_id, self._protocol, timeout_s=ANSWER_S, maddrs=record.maddrs
        )
        channel = Channel(sock)
        try:
            told = await self._introduce(channel)
            return channel, await self._hear_introduction(channel, record.peer_id), told
        except BaseException:
            channel.close()
            raise

    async def _accepted(self, peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            status = await self._hear_introduction(channel, peer_id)
            told = await self._introduce(channel)
        except Refused as error:
            await self._turn_away(channel, error.why)
            return
        except (PeerUnreachable, ProtocolError) as error:
            log.info("refused a channel from %s: %s", peer_id, error)
            channel.close()
            return
        self._keep(peer_id, channel, status, told, caller=peer_id)

    async def _introduce(self, channel: Channel) -> bytes:
        """Say who is here, after the ban list, which is returned."""
        bans = await self._tell_bans(channel)
        await channel.send(Announced(record=self._status()), timeout_s=ANSWER_S)
        return bans

    async def _turn_away(self, channel: Channel, why: Why) -> None:
        """Tell a refused peer the reason, and a banned one the signed ban list."""
        try:
            await self._tell_bans(channel)
            await channel.send(Refusal(why=why), timeout_s=ANSWER_S)
            await channel.let_the_other_close(_LAST_WORD_S)
        except PeerUnreachable as error:
            log.debug("a refused peer did not hear why: %s", error)
        finally:
            channel.close()

    async def _tell_bans(self, channel: Channel) -> bytes:
        if bans := self._gate.bans_blob:
            await channel.send(Bans(signed=bans), timeout_s=ANSWER_S)
        return bans

    def _recent_status(self) -> bytes:
        """Never older than the status that was broadcast last."""
        now = time.monotonic()
        if now - self._signed_at > _FRESH_S:
            self._signed, self._signed_at = self._status(), now
        return self._signed

    async def _hear_introduction(self, channel: Channel, peer_id: str) -> Spoken:
        """How the other end stands. Raises Refused, NotAdmitted, PeerUnreachable, ProtocolError."""
        said = await channel.read(_INTRODUCTION, timeout_s=ANSWER_S)
        if isinstance(said, Bans):
            self._gate.learn(said.signed)
            said = await channel.read(_INTRODUCTION, timeout_s=ANSWER_S)
        match said:
            case Announced(record):
                return self._decode(peer_id, record)
            case Refusal(why):
                raise NotAdmitted(why)
        raise ProtocolError("two ban lists in one introduction")

    def _decode(self, peer_id: str, record: bytes) -> Spoken:
        status = Spoken.decode(peer_id, record, run_id=self._run_id, now=time.time())
        self._gate.check(peer_id, status.token, "mesh")
        return status

    def _spread_bans(self) -> None:
        """Pass the new ban list on to every peer, then close the channels to those on it."""
        message = Bans(signed=self._gate.bans_blob)
        banned = self._gate.bans.peer_ids & self._peers.keys()
        for peer in self._peers.values():
            peer.enqueue(message)
        for peer_id in banned:
            log.warning("peer %d (%s) is banned", self._peers[peer_id].status.world_rank, peer_id)
            self._peers.pop(peer_id).enqueue(None)
        if banned:
            self._on_change()

    def _keep(
        self, peer_id: str, channel: Channel, status: Spoken, told: bytes, *, caller: str
    ) -> None:
        """From now on this is the channel to the peer. `told`: the ban list that it has heard of from here.

        A newer channel replaces an older one, but where both have called each other, both ends keep that of the smaller
        peer id, unless it is silent or that of a process that has been started anew.
        """
        if (older := self._peers.get(peer_id)) is not None:
            is_well = not older.is_silent and older.status.incarnation == status.incarnation
            if is_well and older.caller < caller:
                channel.close()
                return
            older.enqueue(None)
        peer = self._peers[peer_id] = LivePeer(channel, status, caller)
        if self._gate.bans_blob != told:
            peer.enqueue(Bans(signed=self._gate.bans_blob))
        self._on_change()
        self._hear(peer)
        self._spawn(self._listen(peer, peer_id))

    async def _listen(self, peer: LivePeer, peer_id: str) -> None:
        """Own the channel until it breaks."""

        def fell_silent() -> None:
            # If many peers are silent at once, it is this peer's connection that is bad.
            if sum(other.is_silent for other in self._peers.values()) <= max(1, len(self._peers) // 4):
                self._transport.no_answer(peer_id)

        sender = asyncio.create_task(
            peer.send_forever(
                self._recent_status,
                lambda: heartbeat_s(len(self._peers)),
                on_silence=fell_silent,
            )
        )
        read_bytes, stood_since = 0, time.monotonic()
        broken_by: PeersError | None = None
        try:
            while True:
                message = await peer.channel.read(_SAID, timeout_s=silence_s(len(self._peers)))
                peer.heard()
                size, read_bytes = peer.channel.received_bytes - read_bytes, peer.channel.received_bytes
                size += ANSWER_BYTES if isinstance(message, Ask) else 0
                if not self._limits.take(peer_id, time.monotonic(), 1 + size / BYTES_PER_MESSAGE):
                    raise ProtocolError("sends more messages than anybody has reason to")
                self._received(peer, peer_id, message)
                # Reading what has arrived already does not yield to other tasks.
                await asyncio.sleep(0)
        except (PeerUnreachable, ProtocolError) as error:
            log.debug("lost the channel to peer %d: %s", peer.status.world_rank, error)
            broken_by = error
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            peer.channel.close()
            if self._peers.get(peer_id) is peer:
                del self._peers[peer_id]
                may_be_back = (
                    isinstance(broken_by, PeerUnreachable)
                    and peer.status.state != "leaving"
                    and time.monotonic() > stood_since + OFTEN_S
                )
                self._on_lost(peer_id)
                self._on_change()
                if isinstance(broken_by, PeerSilent) and peer.is_silent:
                    self._transport.no_answer(peer_id)
                if may_be_back:
                    self._spawn(self._redial(peer.status))

    def _received(self, peer: LivePeer, peer_id: str, message: Said) -> None:
        match message:
            case Announced(record):
                before, peer.status = peer.status, self._decode(peer_id, record)
                if _essence(peer.status) != _essence(before):
                    self._on_change()
                self._hear(peer)
            case Bans(signed):
                self._gate.learn(signed)
            case _:
                self._on_message(peer.status, message)

    def _hear(self, peer: LivePeer) -> None:
        if peer.status.status is not None:
            self._on_message(peer.status, peer.status.status)


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
