"""Opens streams through a third peer that forwards them; the messages are those of peers/protocol/relays.py."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerUnreachable
from peers.net.back_off import BackOff
from peers.net.channel import Channel, call
from peers.net.offers import collect_offers
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.choice import path_back_off
from peers.net.transport import Libp2p
from peers.protocol.relays import MAX_MESSAGE_BYTES, Go, No, Offer, Ready, Want, asking
from peers.timing import PROBE_S

log = logging.getLogger(__name__)

MAX_ASKED = 4
"""Peers that are asked to relay one stream; the fastest of those that can is taken."""
_MAX_OPENING = 3
"""Streams that one peer asks for at once: libp2p's side works on a few per caller only."""
_MAX_BLAMED = 256
_ANSWER: Decoder[Offer | No] = Decoder(Offer | No)
_READY = Decoder(Ready)


@dataclass
class _Offered:
    channel: Channel
    offer: Offer

    def close(self) -> None:
        self.channel.close()


class Relay:
    """Asks others to forward. `peers` gives the ids of the run's live peers.

    `rate_to` is what is known of the bandwidth to one of them.
    """

    def __init__(
        self,
        *,
        run_id: str,
        libp2p: Libp2p,
        acceptor: Acceptor,
        peers: Callable[[], Collection[str]],
        rate_to: Callable[[str], float],
    ) -> None:
        self._protocol = asking(run_id)
        self._libp2p, self._acceptor = libp2p, acceptor
        self._peers, self._rate_to = peers, rate_to
        self._opening = asyncio.Semaphore(_MAX_OPENING)
        self._way_of: WeakKeyDictionary[socket.socket, tuple[str, str]] = WeakKeyDictionary()
        self._blamed: dict[tuple[str, str], BackOff] = {}

    async def open(self, peer_id: str, protocol: str, *, timeout_s: float) -> socket.socket:
        """A non-blocking TLS stream to this peer through whichever peer relays it best. Raises PeerUnreachable."""
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._opening:
                return await self._open(peer_id, protocol, deadline)
        except TimeoutError as error:
            raise PeerUnreachable(f"nobody relays to {peer_id} within {timeout_s:g} s") from error

    async def _open(self, peer_id: str, protocol: str, deadline: float) -> socket.socket:
        candidates = await self._candidates(peer_id)
        offers, refusals = await collect_offers({relay: self._ask(relay, peer_id) for relay in candidates})
        try:
            while offers:
                relay = max(offers, key=lambda relay: self._merit(relay, offers[relay].offer, peer_id))
                channel, left_s = offers.pop(relay).channel, deadline - time.monotonic()
                try:
                    # A relay that breaks its promise must leave time for the next one.
                    async with asyncio.timeout(left_s * (0.5 if offers else 0.9)):
                        stream = await self._accept(channel, peer_id, protocol, left_s)
                    self._way_of[stream] = relay, peer_id
                    log.debug("a stream to %s goes through %s", peer_id, relay)
                    return stream
                except (PeersError, TimeoutError) as error:
                    self._blame(relay, peer_id)
                    refusals[relay] = str(error) or "offers what it does not do"
        finally:
            for offered in offers.values():
                offered.close()
        reasons = "; ".join(f"{relay}: {reason}" for relay, reason in refusals.items())
        raise PeerUnreachable(f"nobody relays to {peer_id}: {reasons or 'no peer to ask'}")

    def blame(self, stream: socket.socket) -> None:
        """A round was lost on this stream: for streams to that peer, its relay is tried last for a while."""
        if (way := self._way_of.get(stream)) is not None:
            self._blame(*way)

    def _blame(self, relay: str, peer_id: str) -> None:
        # For this pair only: the fault may be the called peer's.
        self._blamed.setdefault((relay, peer_id), path_back_off()).failed(time.monotonic())
        while len(self._blamed) > _MAX_BLAMED:
            del self._blamed[next(iter(self._blamed))]

    def _is_blamed(self, relay: str, peer_id: str) -> bool:
        blame = self._blamed.get((relay, peer_id))
        return blame is not None and not blame.is_over(time.monotonic())

    async def _candidates(self, peer_id: str) -> list[str]:
        live = set(self._peers()) & await self._libp2p.connected_peers() - {peer_id}
        by_merit = sorted(live, key=lambda r: (self._is_blamed(r, peer_id), -self._rate_to(r), r))
        return by_merit[:MAX_ASKED]

    async def _ask(self, relay: str, peer_id: str) -> _Offered:
        """Raises PeersError if the relay offers nothing."""
        channel = await call(
            self._libp2p,
            relay,
            self._protocol,
            timeout_s=PROBE_S,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )
        try:
            await channel.send(Want(to=peer_id), PROBE_S)
            answer = await channel.read(_ANSWER, PROBE_S)
            if isinstance(answer, No):
                raise PeerUnreachable(f"it says no: {answer.reason}")
            return _Offered(channel, answer)
        except BaseException:
            channel.close()
            raise

    def _merit(self, relay: str, offer: Offer, peer_id: str) -> tuple[bool, float, int, str]:
        """By bandwidth, divided by the streams that it forwards already; unmeasured links count as fast."""
        slower_leg = min(rate or math.inf for rate in (offer.rate, self._rate_to(relay)))
        return not self._is_blamed(relay, peer_id), slower_leg / (1 + offer.load), -offer.load, relay

    async def _accept(self, channel: Channel, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        """Take the offer: the stream with `peer_id` over this channel's socket."""
        try:
            await channel.send(Go(), PROBE_S)
            await channel.read(_READY, 2 * PROBE_S)
        except BaseException:
            channel.close()
            raise
        return await self._acceptor.call(channel.sock, peer_id, protocol, timeout_s=timeout_s, plain=False)
