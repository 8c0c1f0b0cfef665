"""A live channel to every other peer of the run: statuses, round messages, and the first word of a death.

Peers are found in the DHT; here they are kept. Each pair shares one channel, opened by the smaller peer id (by the
other when that does not come about). Both ends send their signed status on every change and at every heartbeat, so a
channel that breaks or falls silent tells of a loss long before the DHT record expires.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerSilent, PeerUnreachable, ProtocolError
from peers.net.allowance import Allowance
from peers.net.channel import Channel
from peers.net.dht.bootstrap import is_nobody_there
from peers.net.gate import Gate
from peers.net.live_peer import LivePeer, heartbeat_s, silence_s
from peers.protocol.admission import Bans
from peers.protocol.mesh import Announced, Carried, Introduction, Said
from peers.protocol.messages import Ask
from peers.protocol.records import Announcement
from peers.protocol.refusal import Refusal, Refused, Why

log = logging.getLogger(__name__)

_FRESH_S = 0.25
"""For so long a signed status is good for another peer's heartbeat."""
_LAST_WORD_S = 0.3
"""For a refused peer to read why, before this end closes."""
DIAL_TIMEOUT_S = 5.0
REDIAL_AFTER_S = 1.0
"""A channel that has stood for so long is made anew as soon as it breaks; others wait for the next look at the DHT."""
LET_THE_OTHER_DIAL_S, LET_THE_OTHER_REDIAL_S = 3.0, 0.5
LET_OURS_BE_ANSWERED_S = 1.0
"""For so long a call is not answered that has crossed our own."""
ANSWER_BYTES = 256 << 10
"""What a question counts for beside its own bytes: the answer is about as long, and who asks pays for it."""
MAX_DIALLED = 32
"""Peers that are dialled at once: anybody can put records of peers into the DHT that do not exist."""


def mesh_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/mesh"


T = TypeVar("T")
_INTRODUCTION: Decoder[Introduction] = Decoder(Introduction)
_SAID: Decoder[Said] = Decoder(Said)
Reached = Literal["here", "gone", "silent"]
"""Gone: nobody listens at its addresses, or it has turned this peer away."""


class TurnedAway(PeerUnreachable):
    """A peer that was reached says that this one may not be here."""

    def __init__(self, why: Why) -> None:
        super().__init__(f"turned away: {why}")
        self.why = why


class StreamOpener(Protocol):
    """The part of peers/net/paths/paths.py that the mesh needs."""

    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket: ...

    def missed(self, peer_id: str) -> None: ...

    async def serve(
        self, protocol: str, handler: Callable[[str, socket.socket], Awaitable[None]]
    ) -> None: ...


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
        on_message: Callable[[Announcement, Carried], None],
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
        # Who has our status and owes its own; whose status has come and who gets ours.
        self._introducing: set[str] = set()
        self._answering: set[str] = set()
        self._dials = asyncio.Semaphore(MAX_DIALLED)
        self._first_heard_of: dict[str, float] = {}
        self._allowances: dict[str, Allowance] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gate = gate or Gate.open(run_id)
        self._gate.on_bans.append(self._spread_bans)
        self._turned_away: Why | None = None

    @property
    def turned_away(self) -> Why | None:
        """Why the others do not let this peer in; None while any of them does, or nobody is there."""
        return None if self._peers else self._turned_away

    @property
    def peers(self) -> list[Announcement]:
        """The newest status of every live peer, also of several that claim one world rank."""
        return [peer.status for peer in self._peers.values()]

    async def start(self) -> None:
        await self._transport.serve(self._protocol, self._accepted)

    def discovered(self, records: Mapping[str, Announcement]) -> None:
        """Dial whoever is in the DHT and has no channel yet."""
        now = time.monotonic()
        self._first_heard_of = {p: at for p, at in self._first_heard_of.items() if p in records}
        for record in records.values():
            self._approach(record, now)

    def _approach(self, record: Announcement, now: float) -> None:
        """Dial it, unless that is its part; it may be slow to play it."""
        peer_id = record.peer_id
        if peer_id == self._peer_id or peer_id in self._peers or peer_id in self._dialling:
            return
        heard = self._first_heard_of.setdefault(peer_id, now)
        if self._peer_id < peer_id or now - heard > LET_THE_OTHER_DIAL_S:
            self._dialling[peer_id] = self._spawn(self._dial(record))

    async def reach(self, record: Announcement) -> Reached:
        """Whether this peer answers; a channel to it is kept."""
        peer_id = record.peer_id
        if peer_id not in self._peers and peer_id not in self._dialling:
            self._dialling[peer_id] = self._spawn(self._dial(record))
        task = self._dialling.get(peer_id)
        if task is not None:
            await asyncio.wait({task}, timeout=DIAL_TIMEOUT_S + 1)
        if peer_id in self._peers:
            return "here"
        return task.result() if task is not None and task.done() and not task.cancelled() else "silent"

    def send_to(self, peer_id: str, message: Carried) -> None:
        """Queue a message; one to a peer that is gone is dropped, as a broken channel would drop it."""
        if (peer := self._peers.get(peer_id)) is not None:
            peer.enqueue(message)

    def broadcast(self, message: Carried) -> None:
        for peer in self._peers.values():
            peer.enqueue(message)

    def broadcast_status(self) -> None:
        self._signed, self._signed_at = self._status(), time.monotonic()
        for peer in self._peers.values():
            peer.enqueue(Announced(record=self._signed))

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
                introduced = await self._introduced(record)
        except TurnedAway as error:
            self._turned_away = error.why
            return "gone"
        except (PeerUnreachable, ProtocolError) as error:
            log.debug("cannot reach %s: %s", peer_id, error)
            if isinstance(error, PeerSilent):
                self._transport.missed(peer_id)
            return "gone" if is_nobody_there(str(error)) else "silent"
        finally:
            self._dialling.pop(peer_id, None)
        self._keep(peer_id, *introduced)
        return "here"

    async def _redial(self, record: Announcement) -> None:
        """Perhaps only the connection is gone. The larger peer id waits a little, and tries where the other cannot."""
        if self._peer_id > record.peer_id:
            await asyncio.sleep(LET_THE_OTHER_REDIAL_S)
        await self.reach(record)

    async def _introduced(self, record: Announcement) -> tuple[Channel, Announcement, bytes]:
        """The channel, how the other stands, and the ban list that it has heard."""
        sock = await self._transport.open(
            record.peer_id, self._protocol, timeout_s=DIAL_TIMEOUT_S, maddrs=record.maddrs
        )
        channel = Channel(sock)
        try:
            if record.peer_id in self._answering or record.peer_id in self._peers:
                raise PeerUnreachable("it has called meanwhile")
            self._introducing.add(record.peer_id)
            told = await self._introduce(channel)
            return channel, await self._hear_introduction(channel, record.peer_id), told
        except BaseException:
            channel.close()
            raise
        finally:
            self._introducing.discard(record.peer_id)

    async def _accepted(self, peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock)
        try:
            status = await self._hear_introduction(channel, peer_id)
            if await self._has_called(peer_id):
                channel.close()
                return
            self._answering.add(peer_id)
            told = await self._introduce(channel)
        except Refused as error:
            await self._turn_away(channel, error.why)
            return
        except (PeerUnreachable, ProtocolError) as error:
            log.info("refused a channel from %s: %s", peer_id, error)
            channel.close()
            return
        finally:
            self._answering.discard(peer_id)
        self._keep(peer_id, channel, status, told)
        if self._peer_id > peer_id and (task := self._dialling.get(peer_id)) is not None:
            # Theirs stands; ours is not to come after it.
            task.cancel()

    async def _has_called(self, peer_id: str) -> bool:
        """Of two calls that cross the one by the smaller peer id stands, if it gets through: else each end would hang
        up on the other's. True: that is ours, and the other has answered it."""
        task = self._dialling.get(peer_id)
        if task is None or peer_id not in self._introducing or self._peer_id > peer_id:
            return False
        await asyncio.wait({task}, timeout=LET_OURS_BE_ANSWERED_S)
        return peer_id in self._peers

    async def _introduce(self, channel: Channel) -> bytes:
        """Say who is here, after the ban list, which is returned."""
        bans = await self._tell_bans(channel)
        await channel.send(Announced(record=self._status()), timeout_s=DIAL_TIMEOUT_S)
        return bans

    async def _turn_away(self, channel: Channel, why: Why) -> None:
        """Say why, and to a banned peer by whose word."""
        try:
            await self._tell_bans(channel)
            await channel.send(Refusal(why=why), timeout_s=DIAL_TIMEOUT_S)
            await channel.let_the_other_close(_LAST_WORD_S)
        except PeerUnreachable as error:
            log.debug("a refused peer did not hear why: %s", error)
        finally:
            channel.close()

    async def _tell_bans(self, channel: Channel) -> bytes:
        if bans := self._gate.bans_blob:
            await channel.send(Bans(signed=bans), timeout_s=DIAL_TIMEOUT_S)
        return bans

    def _recent_status(self) -> bytes:
        """Never older than the last that was broadcast."""
        now = time.monotonic()
        if now - self._signed_at > _FRESH_S:
            self._signed, self._signed_at = self._status(), now
        return self._signed

    async def _hear_introduction(self, channel: Channel, peer_id: str) -> Announcement:
        """How the other end stands. Raises Refused, TurnedAway, PeerUnreachable, ProtocolError."""
        said = await channel.read(_INTRODUCTION, timeout_s=DIAL_TIMEOUT_S)
        if isinstance(said, Bans):
            self._gate.learn(said.signed)
            said = await channel.read(_INTRODUCTION, timeout_s=DIAL_TIMEOUT_S)
        match said:
            case Announced(record):
                return self._decode(peer_id, record)
            case Refusal(why):
                raise TurnedAway(why)
        raise ProtocolError("two ban lists in one introduction")

    def _decode(self, peer_id: str, record: bytes) -> Announcement:
        status = Announcement.decode(peer_id, record, run_id=self._run_id, now=time.time())
        self._gate.check(peer_id, status.token, "mesh")
        return status

    def _spread_bans(self) -> None:
        """Pass the new list on to everybody, then have nothing to do any more with those on it."""
        message = Bans(signed=self._gate.bans_blob)
        banned = self._gate.bans.peer_ids & self._peers.keys()
        for peer in self._peers.values():
            peer.enqueue(message)
        for peer_id in banned:
            log.warning("peer %d (%s) is banned", self._peers[peer_id].status.world_rank, peer_id)
            self._peers.pop(peer_id).enqueue(None)
        if banned:
            self._on_change()

    def _keep(self, peer_id: str, channel: Channel, status: Announcement, told: bytes) -> None:
        """From now on this is the channel to the peer; a newer one replaces an older one. `told`: the ban list that it
        has heard of from here."""
        if (older := self._peers.get(peer_id)) is not None:
            older.channel.break_off()
        peer = self._peers[peer_id] = LivePeer(channel, status)
        if self._gate.bans_blob != told:
            peer.enqueue(Bans(signed=self._gate.bans_blob))
        self._on_change()
        self._spawn(self._listen(peer, peer_id))

    async def _listen(self, peer: LivePeer, peer_id: str) -> None:
        """Own the channel until it breaks."""

        def doubt() -> None:
            num_silent = sum(other.is_doubted for other in self._peers.values())
            if num_silent <= max(1, len(self._peers) // 4):
                self._transport.missed(peer_id)

        sender = asyncio.create_task(
            peer.send_forever(
                self._recent_status,
                lambda: heartbeat_s(len(self._peers)),
                on_doubt=doubt,
            )
        )
        # It outlives the channel: a flood is not to begin anew with every new one.
        allowance = self._allowances.setdefault(peer_id, Allowance(time.monotonic()))
        read_bytes, stood_since = 0, time.monotonic()
        broken_by: PeersError | None = None
        try:
            while True:
                message = await peer.channel.read(_SAID, timeout_s=silence_s(len(self._peers)))
                peer.heard()
                size, read_bytes = peer.channel.received_bytes - read_bytes, peer.channel.received_bytes
                allowance.spend(size + (ANSWER_BYTES if isinstance(message, Ask) else 0), time.monotonic())
                self._received(peer, peer_id, message)
                # Reading what is there already does not let anybody else run.
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
                self._first_heard_of.pop(peer_id, None)
                may_be_back = (
                    isinstance(broken_by, PeerUnreachable)
                    and peer.status.state != "leaving"
                    and time.monotonic() > stood_since + REDIAL_AFTER_S
                )
                self._on_lost(peer_id)
                self._on_change()
                if isinstance(broken_by, PeerSilent) and peer.is_quiet:
                    # It has left our heartbeats unanswered: whoever was frozen itself has sent none.
                    self._transport.missed(peer_id)
                if may_be_back:
                    self._spawn(self._redial(peer.status))

    def _received(self, peer: LivePeer, peer_id: str, message: Said) -> None:
        match message:
            case Announced(record):
                before, peer.status = peer.status, self._decode(peer_id, record)
                if _essence(peer.status) != _essence(before):
                    self._on_change()
            case Bans(signed):
                self._gate.learn(signed)
            case _:
                self._on_message(peer.status, message)


def _essence(status: Announcement) -> tuple[Any, ...]:
    """What decisions depend on; the rest only informs people."""
    return (
        status.world_rank,
        status.incarnation,
        status.state,
        status.epoch,
        status.head,
        status.manifest_digest,
    )
