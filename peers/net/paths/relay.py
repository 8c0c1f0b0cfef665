"""Streams through a relay, a third peer that forwards them: as the caller, as the relay, and as the called peer.

The messages are those of peers/protocol/relays.py. A relay forwards only between live peers of the run with which it
has a libp2p connection, so never through another relay, and only a limited number of streams.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerUnreachable, ProtocolError
from peers.net.back_off import BackOff
from peers.net.channel import Channel, call
from peers.net.dht.descriptors import raise_limit
from peers.net.offers import collect_offers
from peers.net.overlay import Ring, is_full_mesh
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.forwarding import Forwarder
from peers.net.socket_io import closed_on_error
from peers.net.transport import Libp2p
from peers.protocol.relays import (
    MAX_MESSAGE_BYTES,
    Deliver,
    Go,
    No,
    Offer,
    Ready,
    Want,
    asking,
    delivering,
)
from peers.tasks import Tasks
from peers.timing import FORGET_S, FULL_MESH, PROBE_S, START_S

log = logging.getLogger(__name__)

ASKED_AT_ONCE, MAX_ASKED = 4, 16
"""Peers that are asked to relay one stream. Of several offers the fastest is taken; if all decline, more are asked."""
_MAX_OPENING = 3
"""Streams that this peer requests of one relay at once: a relay's libp2p handles only a few per caller."""
_MAX_BLAMED = 256
MAX_FORWARDED = 3 * FULL_MESH * (FULL_MESH - 1) // 2
"""Streams that one peer forwards at once. One reachable peer may have to connect all others of a full mesh: each two of
them have a channel and, if they exchange values in rounds, a stream for data in each direction."""
MAX_FORWARDED_PER_CALLER = 2 * FULL_MESH
"""So that one caller cannot take all of them. It may have opened a channel and a stream for data to each other peer."""
MAX_FORWARDED_PER_PAIR = 8
"""A pair needs one for control, two for data and a few for the state."""
_ANSWER: Decoder[Offer | No] = Decoder(Offer | No)
_WANT, _GO, _READY, _DELIVER = Decoder(Want), Decoder(Go), Decoder(Ready), Decoder(Deliver)


@dataclass
class _Offered:
    channel: Channel
    offer: Offer
    opening: asyncio.Semaphore
    """Held until the stream is open."""

    def close(self) -> None:
        self.channel.close()
        self.opening.release()


class Relay:
    """Used from one event loop. `peers` returns the ids of the run's other live peers and their libp2p addresses,
    `rate_to` the bandwidth to one of them as far as it is known."""

    def __init__(
        self,
        *,
        run_id: str,
        peer_id: str,
        libp2p: Libp2p,
        acceptor: Acceptor,
        peers: Callable[[], Mapping[str, Sequence[str]]],
        rate_to: Callable[[str], float],
    ) -> None:
        self._run_id, self._peer_id, self._libp2p, self._acceptor = run_id, peer_id, libp2p, acceptor
        self._peers, self._rate_to = peers, rate_to
        self._opening: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By relay."""
        self._way_of: WeakKeyDictionary[socket.socket, tuple[str, str]] = WeakKeyDictionary()
        self._blamed: dict[tuple[str, str], BackOff] = {}
        self._forwarder = Forwarder()
        self._forwarded: Counter[tuple[str, str]] = Counter()
        self._max_forwarded = 0
        self._tasks = Tasks()

    async def start(self) -> None:
        """Forward for others, and accept what others forward, from now on."""
        # Each takes two descriptors here and two in p2pd: half of either's are left for all else.
        self._max_forwarded = min(MAX_FORWARDED, raise_limit() // 4)
        await self._libp2p.serve(asking(self._run_id), self._asked)
        await self._libp2p.serve(delivering(self._run_id), self._delivered)

    @property
    def forwarded_bytes(self) -> int:
        """Bytes forwarded for others so far: each has come in on this peer's link and gone out again."""
        return self._forwarder.num_bytes

    async def close(self) -> None:
        """Forward nothing more; open streams are cut."""
        await self._tasks.close()
        await asyncio.to_thread(self._forwarder.close)

    # The caller

    async def open(self, peer_id: str, protocol: str, *, timeout_s: float) -> socket.socket:
        """A non-blocking TLS stream to this peer through whichever peer relays it best. Raises PeerUnreachable."""
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._open(peer_id, protocol, deadline)
        except TimeoutError as error:
            raise PeerUnreachable(f"nobody relays to {peer_id} within {timeout_s:g} s") from error

    async def _open(self, peer_id: str, protocol: str, deadline: float) -> socket.socket:
        candidates, refusals = await self._candidates(peer_id), dict[str, str]()
        for first in range(0, len(candidates), ASKED_AT_ONCE):
            asked = {relay: self._ask(relay, peer_id) for relay in candidates[first : first + ASKED_AT_ONCE]}
            offers, declined = await collect_offers(asked)
            refusals |= declined
            stream = await self._take(offers, peer_id, protocol, deadline, refusals)
            if stream is not None:
                return stream
        reasons = "; ".join(f"{relay}: {reason}" for relay, reason in refusals.items())
        raise PeerUnreachable(f"nobody relays to {peer_id}: {reasons or 'no peer to ask'}")

    async def _take(
        self,
        offers: dict[str, _Offered],
        peer_id: str,
        protocol: str,
        deadline: float,
        refusals: dict[str, str],
    ) -> socket.socket | None:
        """A stream by the best offer that is kept. Closes the others."""
        try:
            while offers:
                relay = max(offers, key=lambda relay: self._merit(relay, offers[relay].offer, peer_id))
                offered, left_s = offers.pop(relay), deadline - time.monotonic()
                try:
                    # A relay that breaks its promise must leave time for the next one.
                    async with asyncio.timeout(left_s * (0.5 if offers else 0.9)):
                        stream = await self._accept(offered.channel, peer_id, protocol, left_s)
                    self._way_of[stream] = relay, peer_id
                    log.debug("a stream to %s goes through %s", peer_id, relay)
                    return stream
                except (PeersError, TimeoutError) as error:
                    self._blame(relay, peer_id)
                    refusals[relay] = str(error) or "it offered to relay, but did not"
                finally:
                    offered.opening.release()
        finally:
            for offered in offers.values():
                offered.close()
        return None

    def blame(self, stream: socket.socket) -> None:
        """A round was lost on this stream: for streams to that peer, its relay is tried last for a while."""
        if (way := self._way_of.get(stream)) is not None:
            self._blame(*way)

    def _blame(self, relay: str, peer_id: str) -> None:
        # For this called peer only, which may itself be at fault.
        self._blamed.setdefault((relay, peer_id), BackOff(START_S, FORGET_S)).failed(time.monotonic())
        while len(self._blamed) > _MAX_BLAMED:
            del self._blamed[next(iter(self._blamed))]

    def _is_blamed(self, relay: str, peer_id: str) -> bool:
        blame = self._blamed.get((relay, peer_id))
        return blame is not None and not blame.is_over(time.monotonic())

    async def _candidates(self, peer_id: str) -> list[str]:
        """The peers to ask, in this order. Among many peers, `peer_id` keeps channels with its neighbours only; of the
        others a few may have a connection with it for other reasons."""
        peers = self._peers()
        everybody = {self._peer_id, peer_id, *peers}
        neighbours = Ring(everybody).neighbours_of(peer_id)

        def by_merit(relays: Collection[str]) -> list[str]:
            return sorted(relays, key=lambda relay: (-self._rate_to(relay), relay))

        connected = peers.keys() & await self._libp2p.connected_peers() - {peer_id}
        order = [*by_merit(connected & neighbours), *by_merit(connected - neighbours)[:ASKED_AT_ONCE]]
        if not is_full_mesh(len(everybody)):
            # In a full mesh, this peer has tried to connect with everybody already.
            order += by_merit(peers.keys() & neighbours - connected)
        return sorted(order, key=lambda relay: self._is_blamed(relay, peer_id))[:MAX_ASKED]

    async def _ask(self, relay: str, peer_id: str) -> _Offered:
        """Raises PeersError if the relay offers nothing."""
        opening = self._opening.setdefault(relay, asyncio.Semaphore(_MAX_OPENING))
        await opening.acquire()
        try:
            channel = await call(
                self._libp2p,
                relay,
                asking(self._run_id),
                timeout_s=PROBE_S,
                maddrs=self._peers().get(relay, ()),
                max_message_bytes=MAX_MESSAGE_BYTES,
            )
            with closed_on_error(channel):
                await channel.send(Want(to=peer_id), PROBE_S)
                answer = await channel.read(_ANSWER, PROBE_S)
                if isinstance(answer, No):
                    raise PeerUnreachable(f"it declines: {answer.reason}")
                return _Offered(channel, answer, opening)
        except BaseException:
            opening.release()
            raise

    def _merit(self, relay: str, offer: Offer, peer_id: str) -> tuple[bool, float, int, str]:
        """By bandwidth, divided by the streams that it forwards already; unmeasured links count as fast."""
        slower_leg = min(rate or math.inf for rate in (offer.rate, self._rate_to(relay)))
        return not self._is_blamed(relay, peer_id), slower_leg / (1 + offer.load), -offer.load, relay

    async def _accept(self, channel: Channel, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        """Take the offer: the stream with `peer_id` over this channel's socket."""
        with closed_on_error(channel):
            await channel.send(Go(), PROBE_S)
            await channel.read(_READY, 2 * PROBE_S)
        return await self._acceptor.call(channel.sock, peer_id, protocol, timeout_s=timeout_s, plain=False)

    # The relay

    async def _asked(self, caller: str, sock: socket.socket) -> None:
        channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
        to = (await channel.read(_WANT, PROBE_S)).to
        if reason := await self._why_not(caller, to):
            await channel.send_last(No(reason=reason), PROBE_S)
            channel.close()
            return
        pair = caller, to
        self._forwarded[pair] += 1
        try:
            offer = Offer(rate=self._rate_to(to), load=self._forwarded.total() - 1)
            await channel.send(offer, PROBE_S)
            await channel.read(_GO, 2 * PROBE_S)
            with closed_on_error(
                await self._libp2p.open(to, delivering(self._run_id), timeout_s=PROBE_S)
            ) as leg:
                onward = Channel(leg, max_message_bytes=MAX_MESSAGE_BYTES)
                await onward.send(Deliver(caller=caller), PROBE_S)
                await channel.send(Ready(), PROBE_S)
                loop = asyncio.get_running_loop()
                self._forwarder.forward(sock, leg, lambda: loop.call_soon_threadsafe(self._released, pair))
        except BaseException:
            self._released(pair)
            raise
        log.debug("forwarding from %s to %s", caller, to)

    async def _why_not(self, caller: str, to: str) -> str:
        peers = self._peers()
        if caller not in peers or to not in peers or to == caller:
            return "I do not know both of you as peers of this run"
        if to not in await self._libp2p.connected_peers():
            return "I have no connection with it"
        of_caller = sum(number for (one, _), number in self._forwarded.items() if one == caller)
        if (
            self._forwarded.total() >= self._max_forwarded
            or of_caller >= MAX_FORWARDED_PER_CALLER
            or self._forwarded[caller, to] >= MAX_FORWARDED_PER_PAIR
        ):
            return "I forward as much as I can"
        return ""

    def _released(self, pair: tuple[str, str]) -> None:
        self._forwarded[pair] -= 1
        if self._forwarded[pair] <= 0:
            del self._forwarded[pair]

    # The called

    async def _delivered(self, relay: str, sock: socket.socket) -> None:
        if relay not in self._peers():
            raise ProtocolError(f"{relay} is no peer of this run, so it relays nothing to here")
        channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
        caller = (await channel.read(_DELIVER, PROBE_S)).caller
        # In the background: libp2p's transport runs few handlers per peer at once, and this one may take long.
        self._tasks.spawn(
            self._acceptor.receive(
                sock,
                source=f"relay {relay}",
                expected=caller,
                plain=False,
                strangers=True,
            )
        )
