"""A peer's answers to observers: one stream for each, on which the peer reports until the observer closes it.

Open to everybody in an open swarm; elsewhere to observers that prove to have the swarm secret. At most MAX_OBSERVERS at
once: they are strangers, and each of them costs a message a second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable
from typing import Any

from msgspec.msgpack import Decoder
from msgspec.structs import replace

from peers.admission.secrets import SwarmSecret
from peers.errors import PeersError
from peers.net.channel import Channel
from peers.net.transport import StreamTransport
from peers.protocol.admission import NONCE_BYTES, Nonce, Proof
from peers.protocol.refusal import Refusal, Why
from peers.protocol.reports import Busy, Hello, Report, report_protocol
from peers.tasks import first_of, is_set_within
from peers.timing import ANSWER_S, OFTEN_S

MAX_OBSERVERS = 16
REPORT_INTERVAL_S = OFTEN_S
LEAST_INTERVAL_S = OFTEN_S / 5
"""Between two reports on one stream, whatever happens."""
_HELLO, _PROOF = Decoder(Hello), Decoder(Proof)

log = logging.getLogger(__name__)


def proof_of(secret: SwarmSecret, run_id: str, observer_id: str, peer_id: str, nonce: bytes) -> bytes:
    """Proof that an observer has the secret. It cannot serve as anything else: no run id contains a slash."""
    return secret.proof(f"{run_id}/report", observer_id, peer_id, nonce)


class ReportService:
    """Used from one event loop. `report(since)` gives the entries after that moment, in Unix seconds."""

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        transport: StreamTransport,
        report: Callable[[float], Report],
        *,
        secret: SwarmSecret | None = None,
        is_banned: Callable[[str], bool] = lambda _peer_id: False,
    ) -> None:
        self._run_id, self._peer_id, self._transport = run_id, peer_id, transport
        self._report, self._secret, self._is_banned = report, secret, is_banned
        self._observers: set[asyncio.Event] = set()

    async def start(self) -> None:
        """Answer from now on."""
        await self._transport.serve(report_protocol(self._run_id), self._accepted)

    def changed(self) -> None:
        """Something changed that observers should hear at once."""
        for news in self._observers:
            news.set()

    async def _accepted(self, observer_id: str, sock: socket.socket) -> None:
        with Channel(sock) as channel:
            try:
                if await self._is_admitted(observer_id, channel):
                    await self._tell(channel)
            except (PeersError, OSError) as error:
                log.debug("observer %s has gone: %s", observer_id, error)

    async def _is_admitted(self, observer_id: str, channel: Channel) -> bool:
        await channel.read(_HELLO, ANSWER_S)
        if len(self._observers) >= MAX_OBSERVERS:
            await channel.send_last(Busy(), ANSWER_S)
            return False
        if self._secret is None:
            return True
        nonce = secrets.token_bytes(NONCE_BYTES)
        await channel.send(Nonce(nonce=nonce), ANSWER_S)
        proof = (await channel.read(_PROOF, ANSWER_S)).proof
        expected = proof_of(self._secret, self._run_id, observer_id, self._peer_id, nonce)
        if secrets.compare_digest(proof, expected) and not self._is_banned(observer_id):
            return True
        await channel.send_last(Refusal(why=Why.WRONG_SECRET), ANSWER_S)
        return False

    async def _tell(self, channel: Channel) -> None:
        # Observers send nothing more: anything that arrives ends the reports, as does the end of the stream.
        await first_of(self._report_forever(channel), channel.read(_HELLO))

    async def _report_forever(self, channel: Channel) -> None:
        news, since = asyncio.Event(), 0.0
        told: tuple[str, ...] | None = None
        self._observers.add(news)
        try:
            while True:
                news.clear()
                report = self._report(since)
                since = newest_of(report, since)
                # Hundreds of peer ids are most of a report.
                await channel.send(replace(report, sees=None) if report.sees == told else report, ANSWER_S)
                told = report.sees
                await asyncio.sleep(LEAST_INTERVAL_S)
                await is_set_within(news, REPORT_INTERVAL_S - LEAST_INTERVAL_S)
        finally:
            self._observers.discard(news)


def newest_of(report: Report, since: float) -> float:
    """The moment up to which the next report need not repeat anything."""
    told: list[Any] = [*report.points, *report.rounds, *report.incidents, *report.evaluations]
    if report.certified is not None:
        told.append(report.certified)
    return max((entry.time for entry in told), default=since)
