"""This process's own token: kept on disk, so that a restart needs no issuer, and renewed when half its time is over."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from peers.admission.issuer import Issuer
from peers.admission.token_request import Applicant, NoIssuer, request_token
from peers.core.admission import Admission
from peers.errors import PeersError, PeerUnreachable, UserError
from peers.net.dht.node import Dht
from peers.net.private_files import write_private
from peers.protocol.refusal import Refused, Why
from peers.protocol.tokens import Token
from peers.timing import CONNECT_S, PROBE_S

_RENEWALS = 100
"""Attempts at renewing a token in its time, about: one of 30 days is tried every seven hours."""

log = logging.getLogger(__name__)


class OwnToken:
    """`issuer`: this process's own, where it issues tokens itself."""

    def __init__(self, dht: Dht, applicant: Applicant, path: Path, issuer: Issuer | None) -> None:
        self._dht, self._applicant, self._path, self._issuer = dht, applicant, path, issuer
        self._renew_at = 0.0
        self.blob = self._kept()

    @property
    def lifetime_s(self) -> float:
        token = self._token()
        return token.expires - token.not_before

    async def obtain(self) -> None:
        """Get a token. Raises UserError."""
        if self.blob and not self._is_half_over():
            return
        try:
            # While the old token is valid, do not wait long for a new one.
            self._take(await self._new(PROBE_S if self.blob else CONNECT_S))
        except Refused as error:
            raise UserError(error.why.advice(self._applicant.peer_id)) from error
        except NoIssuer as error:
            if not self.blob:
                raise UserError(_nobody(error)) from error

    async def renew(self) -> None:
        """Renew the token if it is time. Raises PeersError once it has expired."""
        if time.time() >= (expires := self._token().expires):
            raise PeersError(Why.EXPIRED.advice(self._applicant.peer_id))
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
            return self._issuer.issue(self._applicant.peer_id, time.time())
        return await request_token(self._dht, self._applicant, timeout_s=timeout_s)

    def _take(self, blob: bytes) -> None:
        self.blob = blob
        try:
            write_private(self._path, blob)
        except OSError as error:
            log.warning("cannot keep the token at %s: %s", self._path, error.strerror)

    def _kept(self) -> bytes:
        """The token kept on disk, if it is still valid."""
        who = self._applicant
        try:
            blob = self._path.read_bytes()
            Admission(who.run_id, who.secret.public_key).check(who.peer_id, blob, time.time())
        except (OSError, Refused):
            return b""
        return blob

    def _token(self) -> Token:
        return Token.decode(self.blob, self._applicant.secret.public_key)

    def _is_half_over(self) -> bool:
        token = self._token()
        return time.time() > (token.not_before + token.expires) / 2


def _nobody(error: NoIssuer) -> str:
    if error.others:
        return Why.WRONG_SECRET.advice("")
    if error.coordinators:
        return (
            "this peer was given a swarm secret, but the run's coordinator admits everybody. Start the coordinator "
            "with --admission, or the peer without a secret"
        )
    return (
        "nobody who issues tokens for the swarm secret answers. Is the coordinator running, and --run-id right? A peer "
        "with --admission-key-file can stand in for it"
    )
