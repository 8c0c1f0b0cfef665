"""Streams through a third peer, for two that reach it but not each other.

    caller                     relay                      called
    want {to}            ->                                        protocol diloco/<run_id>/relay
                         <-    offer {rate, load} | no {reason}
    go                   ->
                               deliver {from}      ->              protocol diloco/<run_id>/relayed
                         <-    ready
    <---- the greeting, TLS 1.3 from end to end, the stream ----->

The relay (peers/relay_service.py) sees ciphertext; the ends are sure of each other by the same greeting as on a direct
connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from peers.errors import PeersError, PeerUnreachable, ProtocolError
from peers.libp2p_streams import Libp2p
from peers.messages import Channel
from peers.path_choice import BackOff
from peers.reception import Reception
from peers.relay_messages import ANSWER_TIMEOUT_S, MAX_MESSAGE_BYTES, asking, expect

log = logging.getLogger(__name__)

MAX_ASKED = 4
"""Peers that are asked to relay one stream; the fastest of those that can is taken."""
_MAX_OPENING = 3
"""Streams that one peer asks for at once: libp2p's side works on a few per caller only."""
_MAX_BLAMED = 256
_MAX_RATE = 1e15


@dataclass
class _Offer:
    relay: str
    channel: Channel
    sock: socket.socket
    rate: float
    """Bytes/s that rounds have moved from it to the called; 0: not known."""
    load: int
    """Streams it forwards already."""


class Relay:
    """Asks others to forward. `peers` gives the ids of the run's live peers.

    `rate_to` is what is known of the bandwidth to one of them.
    """

    def __init__(
        self,
        *,
        run_id: str,
        libp2p: Libp2p,
        reception: Reception,
        peers: Callable[[], Collection[str]],
        rate_to: Callable[[str], float],
    ) -> None:
        self._protocol = asking(run_id)
        self._libp2p, self._reception = libp2p, reception
        self._peers, self._rate_to = peers, rate_to
        self._opening = asyncio.Semaphore(_MAX_OPENING)
        self._relay_of: WeakKeyDictionary[socket.socket, str] = WeakKeyDictionary()
        self._blamed: dict[str, BackOff] = {}

    async def open(self, peer_id: str, protocol: str, *, timeout_s: float) -> socket.socket:
        """A non-blocking TLS stream to this peer through whichever peer relays it best. Raises PeerUnreachable."""
        try:
            async with asyncio.timeout(timeout_s), self._opening:
                return await self._open(peer_id, protocol, timeout_s)
        except TimeoutError as error:
            raise PeerUnreachable(f"nobody relays to {peer_id} within {timeout_s:g} s") from error

    async def _open(self, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + timeout_s
        candidates = await self._candidates(peer_id)
        asked = await self._ask_all(candidates, peer_id)
        offers = sorted((offer for offer in asked if isinstance(offer, _Offer)), key=self._merit)
        failures = [reason for reason in asked if isinstance(reason, str)]
        try:
            while offers:
                offer = offers.pop()
                try:
                    return await self._accept(offer, peer_id, protocol, deadline - time.monotonic())
                except PeersError as error:
                    failures.append(f"{offer.relay}: {error}")
        finally:
            for offer in offers:
                offer.channel.close()
        raise PeerUnreachable(f"nobody relays to {peer_id}: {'; '.join(failures) or 'no peer to ask'}")

    def blame(self, stream: socket.socket) -> None:
        """A round was lost on this stream: whoever relayed it comes last for a while."""
        if (relay := self._relay_of.get(stream)) is not None:
            self._blamed.setdefault(relay, BackOff()).failed(time.monotonic())
            while len(self._blamed) > _MAX_BLAMED:
                del self._blamed[next(iter(self._blamed))]

    def _is_blamed(self, relay: str) -> bool:
        return relay in self._blamed and time.monotonic() < self._blamed[relay].until

    async def _candidates(self, peer_id: str) -> list[str]:
        live = set(self._peers()) & await self._libp2p.connected_peers() - {peer_id}
        by_merit = sorted(live, key=lambda relay: (self._is_blamed(relay), -self._rate_to(relay), relay))
        return by_merit[:MAX_ASKED]

    async def _ask_all(self, relays: Sequence[str], peer_id: str) -> list[_Offer | str]:
        asked = [asyncio.create_task(self._ask(relay, peer_id)) for relay in relays]
        try:
            return await asyncio.gather(*asked)
        except BaseException:
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(answer, _Offer):
                    answer.channel.close()
            raise

    async def _ask(self, relay: str, peer_id: str) -> _Offer | str:
        """The offer, or why there is none."""
        try:
            sock = await self._libp2p.open(relay, self._protocol, timeout_s=ANSWER_TIMEOUT_S)
            channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
            try:
                await channel.send({"kind": "want", "to": peer_id}, ANSWER_TIMEOUT_S)
                answer = await expect(channel, "offer")
                rate, load = answer.get("rate"), answer.get("load")
                if type(rate) is not float or not 0 <= rate <= _MAX_RATE or type(load) is not int:
                    raise ProtocolError("an offer without figures")
            except BaseException:
                channel.close()
                raise
        except PeersError as error:
            return f"{relay}: {error}"
        return _Offer(relay, channel, sock, rate, load)

    def _merit(self, offer: _Offer) -> tuple[bool, float, int, str]:
        """By bandwidth, shared with what it forwards already; legs that nobody has measured count as fast."""
        slower_leg = min(rate or math.inf for rate in (offer.rate, self._rate_to(offer.relay)))
        shared = slower_leg / (1 + max(offer.load, 0))
        return not self._is_blamed(offer.relay), shared, -offer.load, offer.relay

    async def _accept(self, offer: _Offer, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        try:
            await offer.channel.send({"kind": "go"}, ANSWER_TIMEOUT_S)
            await expect(offer.channel, "ready", timeout_s=2 * ANSWER_TIMEOUT_S)
        except BaseException:
            offer.channel.close()
            raise
        stream = await self._reception.call(
            offer.sock, peer_id, protocol, timeout_s=max(timeout_s, 0.001), plain=False
        )
        self._relay_of[stream] = offer.relay
        log.debug("a stream to %s goes through %s", peer_id, offer.relay)
        return stream
