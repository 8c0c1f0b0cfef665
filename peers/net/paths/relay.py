"""Has others forward streams to a peer that is not reached; the messages are those of peers/protocol/relays.py."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from msgspec.msgpack import Decoder

from peers.errors import PeersError, PeerUnreachable
from peers.net.channel import Channel
from peers.net.libp2p.streams import Libp2p
from peers.net.paths.acceptor import Reception
from peers.net.paths.choice import BackOff
from peers.protocol.relays import ANSWER_TIMEOUT_S, MAX_MESSAGE_BYTES, Go, No, Offer, Ready, Want, asking

log = logging.getLogger(__name__)

MAX_ASKED = 4
"""Peers that are asked to relay one stream; the fastest of those that can is taken."""
GRACE_S = 0.5
"""What the others may take to answer once one has made an offer."""
_MAX_OPENING = 3
"""Streams that one peer asks for at once: libp2p's side works on a few per caller only."""
_MAX_BLAMED = 256
_ANSWER: Decoder[Offer | No] = Decoder(Offer | No)
_READY = Decoder(Ready)


@dataclass
class _Offered:
    relay: str
    channel: Channel
    sock: socket.socket
    offer: Offer


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
        offers, failures = await self._ask_all(candidates, peer_id)
        offers.sort(key=lambda offered: self._merit(offered, peer_id))
        try:
            while offers:
                offer, left_s = offers.pop(), deadline - time.monotonic()
                try:
                    # One that does not keep its word leaves time for another, or at least for taking note of it.
                    async with asyncio.timeout(left_s * (0.5 if offers else 0.9)):
                        return await self._accept(offer, peer_id, protocol, left_s)
                except (PeersError, TimeoutError) as error:
                    self._blame(offer.relay, peer_id)
                    failures.append(f"{offer.relay}: {str(error) or 'offers what it does not do'}")
        finally:
            for offer in offers:
                offer.channel.close()
        raise PeerUnreachable(f"nobody relays to {peer_id}: {'; '.join(failures) or 'no peer to ask'}")

    def blame(self, stream: socket.socket) -> None:
        """A round was lost on this stream: whoever relayed it comes last for a while, to that peer."""
        if (way := self._way_of.get(stream)) is not None:
            self._blame(*way)

    def _blame(self, relay: str, peer_id: str) -> None:
        # For this pair only: it may have been the called, who is not to spoil the relay's name with others.
        self._blamed.setdefault((relay, peer_id), BackOff()).failed(time.monotonic())
        while len(self._blamed) > _MAX_BLAMED:
            del self._blamed[next(iter(self._blamed))]

    def _is_blamed(self, relay: str, peer_id: str) -> bool:
        blame = self._blamed.get((relay, peer_id))
        return blame is not None and time.monotonic() < blame.until

    async def _candidates(self, peer_id: str) -> list[str]:
        live = set(self._peers()) & await self._libp2p.connected_peers() - {peer_id}
        by_merit = sorted(live, key=lambda r: (self._is_blamed(r, peer_id), -self._rate_to(r), r))
        return by_merit[:MAX_ASKED]

    async def _ask_all(self, relays: Sequence[str], peer_id: str) -> tuple[list[_Offered], list[str]]:
        """Those who offer, and why others do not. One that says nothing holds up no offer for long."""
        asked = {asyncio.create_task(self._ask(relay, peer_id)): relay for relay in relays}
        pending, patience_s = set(asked), ANSWER_TIMEOUT_S * 2
        try:
            while pending:
                before = time.monotonic()
                done, pending = await asyncio.wait(
                    pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                patience_s -= time.monotonic() - before
                if any(isinstance(task.result(), _Offered) for task in done):
                    patience_s = min(patience_s, GRACE_S)
        except BaseException:
            await _withdraw(asked)
            raise
        await _withdraw(pending)
        answers = [
            f"{relay}: no answer" if task in pending else task.result() for task, relay in asked.items()
        ]
        offers = [answer for answer in answers if isinstance(answer, _Offered)]
        return offers, [answer for answer in answers if isinstance(answer, str)]

    async def _ask(self, relay: str, peer_id: str) -> _Offered | str:
        """The offer, or why there is none."""
        try:
            sock = await self._libp2p.open(relay, self._protocol, timeout_s=ANSWER_TIMEOUT_S)
            channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
            try:
                await channel.send(Want(to=peer_id), ANSWER_TIMEOUT_S)
                answer = await channel.read(_ANSWER, ANSWER_TIMEOUT_S)
                if isinstance(answer, No):
                    raise PeerUnreachable(f"it says no: {answer.reason}")
            except BaseException:
                channel.close()
                raise
        except PeersError as error:
            return f"{relay}: {error}"
        return _Offered(relay, channel, sock, answer)

    def _merit(self, offered: _Offered, peer_id: str) -> tuple[bool, float, int, str]:
        """By bandwidth, shared with what it forwards already; legs that nobody has measured count as fast."""
        relay, offer = offered.relay, offered.offer
        slower_leg = min(rate or math.inf for rate in (offer.rate, self._rate_to(relay)))
        return not self._is_blamed(relay, peer_id), slower_leg / (1 + offer.load), -offer.load, relay

    async def _accept(self, offer: _Offered, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        try:
            await offer.channel.send(Go(), ANSWER_TIMEOUT_S)
            await offer.channel.read(_READY, 2 * ANSWER_TIMEOUT_S)
        except BaseException:
            offer.channel.close()
            raise
        stream = await self._reception.call(
            offer.sock, peer_id, protocol, timeout_s=max(timeout_s, 0.001), plain=False
        )
        self._way_of[stream] = offer.relay, peer_id
        log.debug("a stream to %s goes through %s", peer_id, offer.relay)
        return stream


async def _withdraw(asked: Iterable[asyncio.Task[_Offered | str]]) -> None:
    """Ask no further, and turn down what has been offered."""
    for task in (tasks := list(asked)):
        task.cancel()
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(answer, _Offered):
            answer.channel.close()
