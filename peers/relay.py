"""Streams through a third peer, for two that reach it but not each other.

    caller                     relay                      called
    want {to}            ->                                        protocol diloco/<run_id>/relay
                         <-    offer {rate, load} | no {reason}
    go                   ->
                               deliver {from}      ->              protocol diloco/<run_id>/relayed
                         <-    ready
    <---- the greeting, TLS 1.3 from end to end, the stream ----->

The relay sees ciphertext; the ends are sure of each other by the same greeting as on a direct connection. It forwards
only between peers that it is connected with itself, so never through another relay, and only within bounds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from peers.errors import PeersError, PeerUnreachable, ProtocolError
from peers.forwarding import Forwarder
from peers.maddrs import is_peer_id
from peers.messages import Channel
from peers.reception import Handler, Reception

log = logging.getLogger(__name__)

MAX_ASKED = 4
"""Peers that are asked to relay one stream; the fastest of those that can is taken."""
MAX_FORWARDED = 64
"""Streams that one peer forwards at once."""
MAX_FORWARDED_PER_PAIR = 8
"""A pair needs one for control, two for data and a few for the state."""
_MAX_MESSAGE_BYTES = 1024
_ANSWER_TIMEOUT_S = 3.0
_MAX_RATE = 1e15


class Libp2p(Protocol):
    async def open(
        self, peer_id: str, protocol: str, *, timeout_s: float, maddrs: Sequence[str] = ()
    ) -> socket.socket: ...

    async def serve(self, protocol: str, handler: Handler) -> None: ...

    async def connected_peers(self) -> set[str]: ...


@dataclass
class _Offer:
    relay: str
    channel: Channel
    sock: socket.socket
    rate: float
    """Bytes/s on the slower of its two legs; 0: not known."""
    load: int
    """Streams it forwards already."""


class Relay:
    """Asks others to forward, and forwards for others. `peers` gives the ids of the run's live peers."""

    def __init__(
        self,
        *,
        run_id: str,
        libp2p: Libp2p,
        reception: Reception,
        peers: Callable[[], Collection[str]],
        rate_to: Callable[[str], float],
    ) -> None:
        self._asking, self._delivering = f"diloco/{run_id}/relay", f"diloco/{run_id}/relayed"
        self._libp2p, self._reception = libp2p, reception
        self._peers, self._rate_to = peers, rate_to
        self._forwarder = Forwarder()
        self._forwarded: Counter[tuple[str, str]] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._libp2p.serve(self._asking, self._asked)
        await self._libp2p.serve(self._delivering, self._delivered)

    async def close(self) -> None:
        """Forward nothing more: what still goes through here breaks off."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._forwarder.close)

    # The caller

    async def open(self, peer_id: str, protocol: str, *, timeout_s: float) -> socket.socket:
        """A non-blocking TLS stream to this peer through whichever peer relays it best. Raises PeerUnreachable."""
        deadline = time.monotonic() + timeout_s
        candidates = await self._candidates(peer_id)
        asked = await asyncio.gather(*(self._ask(relay, peer_id) for relay in candidates))
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

    async def _candidates(self, peer_id: str) -> list[str]:
        live = set(self._peers()) & await self._libp2p.connected_peers() - {peer_id}
        return sorted(live, key=lambda relay: (-self._rate_to(relay), relay))[:MAX_ASKED]

    async def _ask(self, relay: str, peer_id: str) -> _Offer | str:
        """The offer, or why there is none."""
        try:
            sock = await self._libp2p.open(relay, self._asking, timeout_s=_ANSWER_TIMEOUT_S)
            channel = Channel(sock, max_message_bytes=_MAX_MESSAGE_BYTES)
            try:
                await channel.send({"kind": "want", "to": peer_id}, _ANSWER_TIMEOUT_S)
                answer = await _expect(channel, "offer")
                rate, load = answer.get("rate"), answer.get("load")
                if type(rate) is not float or not 0 <= rate <= _MAX_RATE or type(load) is not int:
                    raise ProtocolError("an offer without figures")
            except BaseException:
                channel.close()
                raise
        except PeersError as error:
            return f"{relay}: {error}"
        return _Offer(relay, channel, sock, rate, load)

    def _merit(self, offer: _Offer) -> tuple[float, int, str]:
        """By bandwidth, shared with what it forwards already; legs that nobody has measured count as fast."""
        slower_leg = min(rate or math.inf for rate in (offer.rate, self._rate_to(offer.relay)))
        return slower_leg / (1 + max(offer.load, 0)), -offer.load, offer.relay

    async def _accept(self, offer: _Offer, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        try:
            await offer.channel.send({"kind": "go"}, _ANSWER_TIMEOUT_S)
            await _expect(offer.channel, "ready", timeout_s=2 * _ANSWER_TIMEOUT_S)
        except BaseException:
            offer.channel.close()
            raise
        stream = await self._reception.call(
            offer.sock, peer_id, protocol, timeout_s=max(timeout_s, 0.001), plain=False
        )
        log.debug("a stream to %s goes through %s", peer_id, offer.relay)
        return stream

    # The relay

    async def _asked(self, caller: str, sock: socket.socket) -> None:
        channel = Channel(sock, max_message_bytes=_MAX_MESSAGE_BYTES)
        wanted = await _expect(channel, "want")
        to = wanted.get("to")
        if not isinstance(to, str) or not is_peer_id(to):
            raise ProtocolError("wants a stream to nobody")
        if reason := await self._why_not(caller, to):
            await channel.send({"kind": "no", "reason": reason}, _ANSWER_TIMEOUT_S)
            channel.close()
            return
        pair = caller, to
        self._forwarded[pair] += 1
        try:
            load = self._forwarded.total() - 1
            offer = {"kind": "offer", "rate": float(self._rate_to(to)), "load": load}
            await channel.send(offer, _ANSWER_TIMEOUT_S)
            await _expect(channel, "go", timeout_s=2 * _ANSWER_TIMEOUT_S)
            leg = await self._libp2p.open(to, self._delivering, timeout_s=_ANSWER_TIMEOUT_S)
            try:
                onward = Channel(leg, max_message_bytes=_MAX_MESSAGE_BYTES)
                await onward.send({"kind": "deliver", "from": caller}, _ANSWER_TIMEOUT_S)
                await channel.send({"kind": "ready"}, _ANSWER_TIMEOUT_S)
            except BaseException:
                leg.close()
                raise
        except BaseException:
            self._released(pair)
            raise
        loop = asyncio.get_running_loop()
        log.debug("forwarding from %s to %s", caller, to)
        self._forwarder.forward(sock, leg, lambda: loop.call_soon_threadsafe(self._released, pair))

    async def _why_not(self, caller: str, to: str) -> str:
        peers = self._peers()
        if caller not in peers or to not in peers or to == caller:
            return "not both of you are peers of this run that I know"
        if to not in await self._libp2p.connected_peers():
            return "I have no connection with it"
        if self._forwarded.total() >= MAX_FORWARDED or self._forwarded[caller, to] >= MAX_FORWARDED_PER_PAIR:
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
        message = await _expect(Channel(sock, max_message_bytes=_MAX_MESSAGE_BYTES), "deliver")
        caller = message.get("from")
        if not isinstance(caller, str):
            raise ProtocolError("relays from nobody")
        # Not awaited: a stream that lasts is none of the few that libp2p's side works on at once.
        greeting = asyncio.create_task(
            self._reception.receive(
                sock, source=f"relay {relay}", expected=caller, plain=False, strangers=True
            )
        )
        self._tasks.add(greeting)
        greeting.add_done_callback(self._tasks.discard)


async def _expect(channel: Channel, kind: str, *, timeout_s: float = _ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """The next message, of this kind. Raises PeerUnreachable where it is a refusal, ProtocolError for any other."""
    message = await channel.receive(timeout_s)
    if message.get("kind") == "no":
        raise PeerUnreachable(f"it says no: {message.get('reason')!r:.80}")
    if message.get("kind") != kind:
        raise ProtocolError(f"expected {kind!r}, got {message.get('kind')!r:.40}")
    return message
