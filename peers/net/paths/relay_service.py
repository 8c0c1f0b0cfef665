"""Forwards streams between two peers that do not reach each other, and accepts streams that others forward to this one.

The messages are those of peers/protocol/relays.py. A relay forwards only between live peers of the run with which it
has a libp2p connection, so never through another relay, and only so many streams.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection

from msgspec.msgpack import Decoder

from peers.errors import ProtocolError
from peers.net.channel import Channel
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.forwarding import Forwarder
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
from peers.timing import PROBE_S

log = logging.getLogger(__name__)

MAX_FORWARDED = 128
"""Streams that one peer forwards at once."""
MAX_FORWARDED_PER_CALLER = MAX_FORWARDED // 2
"""So that one caller cannot take every place."""
MAX_FORWARDED_PER_PAIR = 8
"""A pair needs one for control, two for data and a few for the state."""
_WANT, _GO, _DELIVER = Decoder(Want), Decoder(Go), Decoder(Deliver)


class RelayService:
    """`peers` gives the ids of the run's live peers, `rate_to` what is known of the bandwidth to one of them."""

    def __init__(
        self,
        *,
        run_id: str,
        libp2p: Libp2p,
        acceptor: Acceptor,
        peers: Callable[[], Collection[str]],
        rate_to: Callable[[str], float],
    ) -> None:
        self._run_id, self._libp2p, self._acceptor = run_id, libp2p, acceptor
        self._peers, self._rate_to = peers, rate_to
        self._forwarder = Forwarder()
        self._forwarded: Counter[tuple[str, str]] = Counter()
        self._tasks = Tasks()

    async def start(self) -> None:
        await self._libp2p.serve(asking(self._run_id), self._asked)
        await self._libp2p.serve(delivering(self._run_id), self._delivered)

    @property
    def forwarded_bytes(self) -> int:
        """For others, so far: each of them has come in on this peer's link, and gone out."""
        return self._forwarder.num_bytes

    async def close(self) -> None:
        """Forward nothing more; open streams are cut."""
        await self._tasks.close()
        await asyncio.to_thread(self._forwarder.close)

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
            leg = await self._libp2p.open(to, delivering(self._run_id), timeout_s=PROBE_S)
            try:
                onward = Channel(leg, max_message_bytes=MAX_MESSAGE_BYTES)
                await onward.send(Deliver(caller=caller), PROBE_S)
                await channel.send(Ready(), PROBE_S)
                loop = asyncio.get_running_loop()
                self._forwarder.forward(sock, leg, lambda: loop.call_soon_threadsafe(self._released, pair))
            except BaseException:
                leg.close()
                raise
        except BaseException:
            self._released(pair)
            raise
        log.debug("forwarding from %s to %s", caller, to)

    async def _why_not(self, caller: str, to: str) -> str:
        peers = self._peers()
        if caller not in peers or to not in peers or to == caller:
            return "not both of you are peers of this run that I know"
        if to not in await self._libp2p.connected_peers():
            return "I have no connection with it"
        of_caller = sum(number for (one, _), number in self._forwarded.items() if one == caller)
        if (
            self._forwarded.total() >= MAX_FORWARDED
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
