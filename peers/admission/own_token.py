"""This process's own token: requested from issuers, kept on disk for a restart, and renewed after half of its lifetime.

The messages are in peers/protocol/admission.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.msgpack import Decoder

from peers.admission.issuer import Issuer
from peers.admission.secrets import SwarmSecret
from peers.errors import PeersError, PeerUnreachable, ProtocolError, UserError
from peers.net.channel import call
from peers.net.dht.node import Dht, announced
from peers.net.gate import Gate
from peers.net.private_files import write_private
from peers.protocol.admission import Issued, Join, Nonce, Proof, admission_protocol
from peers.protocol.records import COORDINATOR_KEY, ISSUERS_KEY, CoordinatorRecord
from peers.protocol.refusal import Refusal, Refused, Why, unless_refused
from peers.protocol.tokens import Token
from peers.tasks import cancelled
from peers.timing import ANSWER_S, CONNECT_S, PROBE_S, RETRY_S

log = logging.getLogger(__name__)

_RENEWALS = 100
"""About how many renewals are attempted in a token's lifetime: for a token of 30 days, one every seven hours."""


class OwnToken:
    """`issuer`: this process's own issuer, if it issues tokens itself."""

    def __init__(self, dht: Dht, run_id: str, secret: SwarmSecret, path: Path, issuer: Issuer | None) -> None:
        self._dht, self._run_id, self._secret = dht, run_id, secret
        self._path, self._issuer = path, issuer
        self._renew_at = 0.0
        self.blob = self._kept()

    @property
    def lifetime_s(self) -> float:
        token = self._token()
        return token.expires - token.not_before

    async def obtain(self) -> None:
        """Get a token. Raises UserError if it is refused, PeerUnreachable if no issuer answers."""
        if self.blob and not self._is_half_over():
            return
        try:
            # While the old token is valid, do not wait long for a new one.
            self._take(await self._new(PROBE_S if self.blob else CONNECT_S))
        except Refused as error:
            raise UserError(error.why.advice(self._dht.peer_id)) from error
        except NoIssuer as error:
            if not self.blob:
                raise _nobody(error) from error

    async def renew(self) -> None:
        """Renew the token if it is time. Raises PeersError once it has expired."""
        if time.time() >= (expires := self._token().expires):
            raise PeersError(Why.EXPIRED.advice(self._dht.peer_id))
        if not self._is_half_over() or time.monotonic() < self._renew_at:
            return
        try:
            self._take(await self._new(PROBE_S))
        except (Refused, PeerUnreachable, UserError) as error:
            left_h = (expires - time.time()) / 3600
            log.warning("the token was not renewed (%s); it is good for %.1f h more", error, left_h)
            # Issuers may be gone for days.
            self._renew_at = time.monotonic() + self.lifetime_s / _RENEWALS

    async def _new(self, timeout_s: float) -> bytes:
        if self._issuer is not None:
            return self._issuer.issue(self._dht.peer_id, time.time())
        return await request_token(self._dht, self._run_id, self._secret, timeout_s=timeout_s)

    def _take(self, blob: bytes) -> None:
        self.blob = blob
        try:
            write_private(self._path, blob)
        except OSError as error:
            log.warning("cannot keep the token at %s: %s", self._path, error.strerror)

    def _kept(self) -> bytes:
        """The token kept on disk, if it is still valid."""
        try:
            blob = self._path.read_bytes()
            Gate(self._run_id, self._secret.public_key).check_token(self._dht.peer_id, blob)
        except (OSError, Refused):
            return b""
        return blob

    def _token(self) -> Token:
        return Token.decode(self.blob, self._secret.public_key)

    def _is_half_over(self) -> bool:
        token = self._token()
        return time.time() > (token.not_before + token.expires) / 2


def _nobody(error: NoIssuer) -> PeersError:
    if error.others:
        return UserError(Why.WRONG_SECRET.advice(""))
    if error.coordinators:
        return UserError(
            "this peer was given a swarm secret, but the run's coordinator admits everybody. Start the coordinator "
            "with --admission, or the peer without a secret"
        )
    return PeerUnreachable(
        "no issuer of tokens for this swarm secret answers. Is the coordinator running, and --run-id right? A peer "
        "with --admission-key-file can stand in for the coordinator"
    )


MAX_ASKED = 16
"""Issuers asked at once: those with the newest announcements."""
_NONCE = Decoder(Nonce)
_ANSWER: Decoder[Issued | Refusal] = Decoder(Issued | Refusal)


class NoIssuer(PeerUnreachable):
    """No issuer answers. `others`: there are issuers with another admission key; `coordinators`: there are coordinators
    without admission."""

    def __init__(self, *, others: bool, coordinators: bool) -> None:
        super().__init__("nobody issues tokens here")
        self.others, self.coordinators = others, coordinators


async def request_token(dht: Dht, run_id: str, secret: SwarmSecret, *, timeout_s: float) -> bytes:
    """A new token from whichever issuer grants it first: all are asked at once, so none can hold this peer up.

    Raises Refused when all that answer refuse, NoIssuer when none answers within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    others = coordinators = False
    while (left_s := deadline - time.monotonic()) > 0:
        found = await announced(dht, ISSUERS_KEY(run_id), CoordinatorRecord, run_id, lambda _: None)
        newest_first = sorted(found.values(), key=lambda record: -record.time)
        records = [record for record in newest_first if _has_token_of(record, secret)]
        if (token := await _ask_all(dht, records[:MAX_ASKED], secret, left_s)) is not None:
            return token
        # A single look-up may miss records.
        others = others or any(record.token for record in newest_first if record not in records)
        found = await announced(dht, COORDINATOR_KEY(run_id), CoordinatorRecord, run_id, lambda _: None)
        coordinators = coordinators or not all(record.token for record in found.values())
        await asyncio.sleep(RETRY_S)
    raise NoIssuer(others=others, coordinators=coordinators)


async def _ask_all(
    dht: Dht, records: Sequence[CoordinatorRecord], secret: SwarmSecret, timeout_s: float
) -> bytes | None:
    """The first token that an issuer grants; None if none answers. Raises Refused if none grants one."""
    refused: Refused | None = None
    asking = [asyncio.create_task(_ask(dht, record, secret, timeout_s)) for record in records]
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


def _has_token_of(record: CoordinatorRecord, secret: SwarmSecret) -> bool:
    try:
        Token.checked(record.token, secret.public_key, run_id=record.run_id, peer_id=record.peer_id)
    except Refused:
        return False
    return True


async def _ask(dht: Dht, record: CoordinatorRecord, secret: SwarmSecret, timeout_s: float) -> bytes:
    """Raises Refused, PeerUnreachable, ProtocolError."""
    limit_s = min(max(timeout_s, 0.001), ANSWER_S)
    run_id = record.run_id
    protocol = admission_protocol(run_id)
    with await call(
        dht.transport, record.peer_id, protocol, timeout_s=limit_s, maddrs=record.maddrs
    ) as channel:
        await channel.send(Join(), limit_s)
        nonce = (await channel.read(_NONCE, limit_s)).nonce
        proof = secret.proof(run_id, dht.peer_id, record.peer_id, nonce)
        await channel.send(Proof(proof=proof), limit_s)
        blob = unless_refused(await channel.read(_ANSWER, limit_s)).token
    try:
        Token.checked(blob, secret.public_key, run_id=run_id, peer_id=dht.peer_id)
    except Refused as error:
        raise ProtocolError(f"it issued a token that admits nobody here: {error.why}") from error
    return blob
