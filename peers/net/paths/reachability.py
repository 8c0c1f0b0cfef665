"""Answers machines that ask whether they can be reached; the messages are those of peers/protocol/reach.py.

Dialling any address that a caller names would make this peer a reflector. So callers name none: only the host that the
caller's own connection comes from is dialled, which cannot be forged over TCP. Only peers that the gate admits may ask,
and only so often.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.msgpack import Decoder

from peers.errors import PeerUnreachable, ProtocolError, UserError
from peers.net.channel import Channel
from peers.net.gate import Gate
from peers.net.identity import Identity
from peers.net.paths.acceptor import Acceptor
from peers.net.paths.direct import Direct, source_of
from peers.net.paths.reachability_request import (
    DIALLED_PROTOCOL,
    receive_bytes,
    send_bytes,
)
from peers.net.paths.tls import Credentials
from peers.net.rate_limit import RateLimits
from peers.protocol import reach
from peers.protocol.maddrs import Maddr, parse_maddr
from peers.protocol.refusal import Refusal, Refused
from peers.timing import ANSWER_S, COMMIT_S, PROBE_S

if TYPE_CHECKING:
    from peers.net.libp2p.transport import Transport

MAX_DIALS = 4
"""In one conversation: a peer has two ports."""
MAX_AT_ONCE = 8
_CONVERSATIONS_PER_S, _CONVERSATIONS_AT_ONCE = 1 / 15, 8
"""Of one host."""
_HELLO = Decoder(reach.Hello)
_QUESTION: Decoder[reach.Dial | reach.Speed] = Decoder(reach.Dial | reach.Speed)

log = logging.getLogger(__name__)


class Reachability:
    """One member's answers. Used from one event loop."""

    def __init__(self, run_id: str, identity: Identity, transport: Transport, gate: Gate) -> None:
        self._run_id, self._transport, self._gate = run_id, transport, gate
        self._acceptor = Acceptor(Credentials.of(identity), allows=lambda _: False)
        self._conversations = RateLimits(_CONVERSATIONS_PER_S, _CONVERSATIONS_AT_ONCE)
        self._num_asking = 0
        self._is_measuring = False

    async def start(self) -> None:
        await self._transport.serve(reach.reach_protocol(self._run_id), self._asked)

    async def _asked(self, peer_id: str, sock: socket.socket) -> None:
        channel = Channel(sock, max_message_bytes=reach.MAX_MESSAGE_BYTES)
        self._num_asking += 1
        try:
            async with asyncio.timeout(COMMIT_S):
                hello = await channel.read(_HELLO, ANSWER_S)
                try:
                    self._gate.check(peer_id, hello.token, "door for questions")
                except Refused as error:
                    await channel.send_last(Refusal(why=error.why), ANSWER_S)
                    return
                caller = caller_of(await self._transport.addresses_of(peer_id))
                source = source_of(caller.host) if caller else "a third peer"
                if self._num_asking > MAX_AT_ONCE or not self._conversations.take(source, time.monotonic()):
                    await channel.send_last(reach.Busy(), ANSWER_S)
                    return
                host = caller.host if caller else ""
                await channel.send(reach.Here(host=host, time=time.time()), ANSWER_S)
                await self._answer(channel, peer_id, caller)
        finally:
            self._num_asking -= 1
            channel.close()

    async def _answer(self, channel: Channel, peer_id: str, caller: Maddr | None) -> None:
        """Until the caller hangs up, which is the end of the conversation and no fault."""
        num_dials, has_measured = 0, False
        while True:
            try:
                question = await channel.read(_QUESTION, COMMIT_S)
            except PeerUnreachable:
                return
            if isinstance(question, reach.Dial) and num_dials < MAX_DIALS:
                num_dials += 1
                error = await self._dial(peer_id, caller, question.port)
                await channel.send(reach.Dialled(error=error), ANSWER_S)
            elif isinstance(question, reach.Speed) and not has_measured:
                has_measured = True
                await self._measure(channel)
            else:
                raise ProtocolError(f"one question too many: {question!r:.80}")

    async def _dial(self, peer_id: str, caller: Maddr | None, port: int) -> str:
        """Why no peer with the caller's key answers at that port; empty if one does."""
        if caller is None:
            return "you come here through a third peer"
        endpoint = str(Maddr(caller.kind, caller.host, port, None))
        direct = Direct(self._acceptor, lambda _: (endpoint,))
        try:
            stream = await direct.open(peer_id, DIALLED_PROTOCOL, timeout_s=PROBE_S)
        except PeerUnreachable as error:
            return _plain(str(error))
        stream.close()
        return ""

    async def _measure(self, channel: Channel) -> None:
        if self._is_measuring:
            await channel.send(reach.Busy(), ANSWER_S)
            return
        self._is_measuring = True
        try:
            await send_bytes(channel)
            num_bytes, seconds = await receive_bytes(channel)
        finally:
            self._is_measuring = False
        await channel.send(reach.Took(num_bytes=num_bytes, seconds=seconds), ANSWER_S)


def caller_of(addresses: Iterable[str]) -> Maddr | None:
    """The address that the caller's connection comes from; none if all its connections are relayed."""
    for text in addresses:
        # A relayed connection has the relay's address, which must not be dialled for somebody else.
        if "p2p-circuit" in text:
            continue
        try:
            maddr = parse_maddr(text)
        except UserError:
            continue
        if maddr.kind in ("ip4", "ip6"):
            return maddr
    return None


def _plain(error: str) -> str:
    """Only whether the call succeeded: an answer must not tell what else listens there."""
    if "Errno 111" in error:
        return "connection refused"
    return "no answer in time" if "no answer in time" in error else "this machine does not answer there"
