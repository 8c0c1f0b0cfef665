"""How a peer asks for its token; the messages are in peers/protocol/admission.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.msgpack import Decoder

from peers.admission.secrets import SwarmSecret
from peers.errors import PeerUnreachable, ProtocolError
from peers.net.channel import call
from peers.net.dht.node import Dht, announced
from peers.protocol.admission import Issued, Join, Nonce, Proof
from peers.protocol.records import COORDINATOR_KEY, CoordinatorRecord
from peers.protocol.refusal import Refusal, Refused, unless_refused
from peers.protocol.tokens import Token
from peers.tasks import cancelled
from peers.timing import ANSWER_S, RETRY_S

MAX_MESSAGE_BYTES = 1024
MAX_ASKED = 16
"""Issuers at once; those with the newest announcements."""
_NONCE = Decoder(Nonce)
_ANSWER: Decoder[Issued | Refusal] = Decoder(Issued | Refusal)

log = logging.getLogger(__name__)


def admission_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/admission"


def ISSUERS_KEY(run_id: str) -> str:
    """The DHT key under which whoever issues tokens announces itself; the subkeys are peer ids."""
    return f"diloco/{run_id}/issuers"


@dataclass(frozen=True)
class Applicant:
    """The peer that wants a token, and its credentials."""

    run_id: str
    peer_id: str
    secret: SwarmSecret


class NoIssuer(PeerUnreachable):
    """No issuer answers. What answers instead: `others`, issuers with another admission key; `coordinators` without
    one.
    """

    def __init__(self, *, others: bool, coordinators: bool) -> None:
        super().__init__("nobody issues tokens here")
        self.others, self.coordinators = others, coordinators


async def request_token(dht: Dht, applicant: Applicant, *, timeout_s: float) -> bytes:
    """A new token from whichever issuer grants it first: all are asked at once, so none can hold this peer up.

    Raises Refused when all that answer refuse, NoIssuer when none answers within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    run_id = applicant.run_id
    others = coordinators = False
    while (left_s := deadline - time.monotonic()) > 0:
        records = (await issuers(dht, applicant))[:MAX_ASKED]
        if (token := await _ask_all(dht, records, applicant, left_s)) is not None:
            return token
        # A single look-up may miss records.
        found = await announced(dht, ISSUERS_KEY(run_id), CoordinatorRecord, run_id, lambda _: None)
        others = others or any(record.token for record in found.values())
        found = await announced(dht, COORDINATOR_KEY(run_id), CoordinatorRecord, run_id, lambda _: None)
        coordinators = coordinators or not all(record.token for record in found.values())
        await asyncio.sleep(RETRY_S)
    raise NoIssuer(others=others, coordinators=coordinators)


async def _ask_all(
    dht: Dht, records: Sequence[CoordinatorRecord], applicant: Applicant, timeout_s: float
) -> bytes | None:
    """The first token that an issuer grants; None if none answers. Raises Refused if none grants one."""
    refused: Refused | None = None
    asking = [asyncio.create_task(_ask(dht, record, applicant, timeout_s)) for record in records]
    try:
        for answer in asyncio.as_completed(asking):
            try:
                return await answer
            except Refused as error:
                refused = error
            except (PeerUnreachable, ProtocolError) as error:
                log.info("an issuer gave no token: %s", error)
    finally:
        await cancelled(asking)
    if refused is not None:
        raise refused
    return None


async def issuers(dht: Dht, applicant: Applicant) -> list[CoordinatorRecord]:
    """All that announce themselves as issuers and show a valid token, the newest announcement first."""

    def check(record: CoordinatorRecord) -> None:
        token = Token.decode(record.token, applicant.secret.public_key)
        if (token.run_id, token.peer_id) != (applicant.run_id, record.peer_id):
            raise ProtocolError(f"{record.peer_id} shows a token of another peer or run")

    found = await announced(dht, ISSUERS_KEY(applicant.run_id), CoordinatorRecord, applicant.run_id, check)
    return sorted(found.values(), key=lambda record: -record.time)


async def _ask(dht: Dht, record: CoordinatorRecord, applicant: Applicant, timeout_s: float) -> bytes:
    """Raises Refused, PeerUnreachable, ProtocolError."""
    limit_s = min(max(timeout_s, 0.001), ANSWER_S)
    protocol = admission_protocol(applicant.run_id)
    with await call(
        dht.transport, record.peer_id, protocol, timeout_s=limit_s, maddrs=record.maddrs
    ) as channel:
        await channel.send(Join(), limit_s)
        nonce = (await channel.read(_NONCE, limit_s)).nonce
        proof = applicant.secret.proof(applicant.run_id, applicant.peer_id, record.peer_id, nonce)
        await channel.send(Proof(proof=proof), limit_s)
        blob = unless_refused(await channel.read(_ANSWER, limit_s)).token
    token = Token.decode(blob, applicant.secret.public_key)
    if (token.run_id, token.peer_id) != (applicant.run_id, applicant.peer_id):
        raise ProtocolError("it issued a token for another peer or run")
    return blob
