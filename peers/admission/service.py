"""One process's part in admission, a peer's or a coordinator's: its own token kept valid, ban lists, tokens for others.

In an open swarm it does nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

from peers.admission import bans
from peers.admission.issuer import DEFAULT_LIFETIME_DAYS, Issuer, IssuerSettings
from peers.admission.secrets import SwarmSecret, load_key, load_secret
from peers.admission.storage_checks import guard_storage
from peers.admission.token_request import (
    ISSUERS_KEY,
    Applicant,
    NoIssuer,
    admission_protocol,
    request_token,
)
from peers.core.admission import Admission
from peers.errors import PeersError, PeerUnreachable, UserError
from peers.net.dht.node import Dht
from peers.net.gate import Gate
from peers.net.identity import Identity
from peers.net.private_files import write_private
from peers.protocol.records import MAX_MADDRS, CoordinatorRecord
from peers.protocol.refusal import Refused, Why
from peers.protocol.tokens import Token

REQUEST_TIMEOUT_S = 10.0
"""How long to look for somebody who issues tokens before this peer cannot join."""
RENEWAL_TIMEOUT_S = 3.0
"""The same while the token at hand is still good."""
_INTERVAL_S = 5.0
_RENEWALS = 100
"""Attempts at renewing a token in its time, about: one of 30 days is tried every seven hours."""
_RECORD_TTL_S = 30.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """What a process was given: nothing means an open swarm. Files only, so that no secret is where others read."""

    swarm_secret_file: str | None = None
    """Default: the secret itself in DILOCO_SWARM_SECRET."""
    admission_key_file: str | None = None
    """Makes this process one that issues tokens."""
    allowlist_file: str | None = None
    token_days: float = DEFAULT_LIFETIME_DAYS
    use_environment: bool = True
    """False: the secret is in the file or nowhere. A coordinator's variable may be meant for a peer beside it."""

    def secret(self) -> SwarmSecret | None:
        """The swarm secret, from wherever it is to be had. Raises UserError."""
        secret = load_secret(self.swarm_secret_file, os.environ if self.use_environment else {})
        if self.admission_key_file is None:
            return secret
        own = load_key(self.admission_key_file).secret
        if secret is not None and secret.public_key != own.public_key:
            raise UserError("the swarm secret and the admission key are of different runs; give either alone")
        return own

    def issuer(self) -> IssuerSettings | None:
        if self.admission_key_file is None:
            return None
        return IssuerSettings(
            key_path=Path(self.admission_key_file).expanduser(),
            allowlist_path=Path(self.allowlist_file) if self.allowlist_file else None,
            lifetime_s=self.token_days * 86_400.0,
        )


class AdmissionService:
    """Used from one event loop. `gate` is for the doors; `token` for what this process shows at those of others."""

    def __init__(self, run_id: str, identity: Identity, dht: Dht, settings: AdmissionSettings) -> None:
        """Raises UserError."""
        secret = settings.secret()
        self.gate = Gate(Admission(run_id, secret.public_key if secret else None))
        self.token = b""
        guard_storage(dht, run_id, self.gate)
        self._run_id, self._identity, self._dht = run_id, identity, dht
        self._applicant = Applicant(run_id, identity.peer_id, secret) if secret else None
        self._token_path = identity.path.with_suffix(".token")
        self._bans_path = identity.path.with_suffix(".bans")
        self._woken = asyncio.Event()
        self._renew_at = 0.0
        self._issuer: Issuer | None = None
        if (issuing := settings.issuer()) is not None:
            self._issuer = Issuer(
                run_id,
                identity.peer_id,
                issuing,
                lambda: self.gate.bans,
                lambda peer_id, error: self.gate.tell(peer_id, error, "issuing of tokens"),
            )

    async def enter(self) -> None:
        """Have a token, before anything is asked of others. Raises UserError."""
        if self._applicant is None:
            return
        self._load_bans(self._applicant)
        self.gate.on_bans.append(self._heard_bans)
        await self._obtain(self._applicant)
        await bans.serve(self._dht, self._run_id, self.gate)
        if self._issuer is not None:
            await self._dht.transport.serve(admission_protocol(self._run_id), self._issuer.handle)
            await self._announce()

    async def run(self) -> None:
        """Keep the token valid. Raises PeersError once this peer is banned or its token over."""
        if self._applicant is None:
            await asyncio.Future()
            return
        while True:
            self._woken.clear()
            if self._is_banned:
                raise PeersError(Why.BANNED.advice(self._identity.peer_id))
            if self._issuer is not None:
                await self._announce()
            await self._renew(self._applicant)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_INTERVAL_S, self._lifetime_s(self._applicant) / 8)):
                    await self._woken.wait()

    @property
    def secret(self) -> SwarmSecret | None:
        """The swarm secret; None in an open swarm."""
        return self._applicant.secret if self._applicant else None

    @property
    def _is_banned(self) -> bool:
        return self._identity.peer_id in self.gate.bans.peer_ids

    def _load_bans(self, applicant: Applicant) -> None:
        """Start from the list of a former life, unless it bans this peer, which may have been let back in since: the
        first peer that it meets has the newest."""
        kept = Gate(Admission(applicant.run_id, applicant.secret.public_key))
        bans.load_into(kept, self._bans_path)
        if applicant.peer_id not in kept.bans.peer_ids:
            self.gate.learn(kept.bans_blob)

    def _heard_bans(self) -> None:
        bans.keep(self.gate, self._bans_path)
        log.info("ban list %d: %d banned", self.gate.bans.version, len(self.gate.bans.peer_ids))
        self._woken.set()

    # The own token

    async def _obtain(self, applicant: Applicant) -> None:
        self.token = self._kept(applicant)
        if self.token and not self._is_half_over(applicant):
            return
        try:
            self._take(await self._new(applicant, RENEWAL_TIMEOUT_S if self.token else REQUEST_TIMEOUT_S))
        except Refused as error:
            raise UserError(error.why.advice(applicant.peer_id)) from error
        except NoIssuer as error:
            if not self.token:
                raise UserError(_nobody(error)) from error

    async def _renew(self, applicant: Applicant) -> None:
        token = Token.decode(self.token, applicant.secret.public_key)
        if time.time() >= token.expires:
            raise PeersError(Why.EXPIRED.advice(applicant.peer_id))
        if not self._is_half_over(applicant) or time.monotonic() < self._renew_at:
            return
        try:
            self._take(await self._new(applicant, RENEWAL_TIMEOUT_S))
        except (Refused, PeerUnreachable) as error:
            left_h = (token.expires - time.time()) / 3600
            log.warning("the token was not renewed (%s); it is good for %.1f h more", error, left_h)
            # Whoever issues tokens may be gone for days.
            self._renew_at = time.monotonic() + (token.expires - token.not_before) / _RENEWALS

    async def _new(self, applicant: Applicant, timeout_s: float) -> bytes:
        if self._issuer is not None:
            return self._issuer.issue(applicant.peer_id, time.time())
        return await request_token(self._dht, applicant, timeout_s=timeout_s)

    def _take(self, token: bytes) -> None:
        self.token = token
        try:
            write_private(self._token_path, token)
        except OSError as error:
            log.warning("cannot keep the token at %s: %s", self._token_path, error.strerror)

    def _kept(self, applicant: Applicant) -> bytes:
        """The token of a former life, where it is still good."""
        try:
            blob = self._token_path.read_bytes()
            Admission(applicant.run_id, applicant.secret.public_key).check(
                applicant.peer_id, blob, time.time()
            )
        except (OSError, Refused):
            return b""
        return blob

    def _is_half_over(self, applicant: Applicant) -> bool:
        token = Token.decode(self.token, applicant.secret.public_key)
        return time.time() > (token.not_before + token.expires) / 2

    def _lifetime_s(self, applicant: Applicant) -> float:
        token = Token.decode(self.token, applicant.secret.public_key)
        return token.expires - token.not_before

    async def _announce(self) -> None:
        record = CoordinatorRecord(
            peer_id=self._dht.peer_id,
            run_id=self._run_id,
            maddrs=tuple((await self._dht.maddrs())[:MAX_MADDRS]),
            time=time.time(),
            token=self.token,
        )
        key = ISSUERS_KEY(self._run_id)
        await self._dht.store(key, self._dht.peer_id, record.encode(self._identity), _RECORD_TTL_S)


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
