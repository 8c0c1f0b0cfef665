"""Admission in one process, a peer or a coordinator: keeps its token valid, exchanges ban lists, issues tokens.

In an open swarm it only checks what this process's DHT node stores.
"""

from __future__ import annotations

import asyncio
import logging
import time

from peers.admission import bans
from peers.admission.issuer import Issuer
from peers.admission.own_token import OwnToken
from peers.admission.secrets import AdmissionSettings
from peers.errors import PeersError, PeerUnreachable, ProtocolError, UserError
from peers.net.dht.node import Dht
from peers.net.gate import Gate
from peers.net.identity import Identity
from peers.protocol.admission import admission_protocol
from peers.protocol.records import (
    COORDINATOR_KEY,
    ISSUERS_KEY,
    MAX_MADDRS,
    PEERS_KEY,
    Announcement,
    CoordinatorRecord,
    OtherVersion,
)
from peers.protocol.refusal import Why
from peers.tasks import is_set_within
from peers.timing import LOOK_S, OFTEN_S, RECORD_TTL_S

log = logging.getLogger(__name__)

_RECORD_TTL_S = 1.5 * RECORD_TTL_S


class AdmissionService:
    """Used from one event loop. `gate` decides whom this process admits; `token` is what it shows to others."""

    def __init__(self, run_id: str, identity: Identity, dht: Dht, settings: AdmissionSettings) -> None:
        """Raises UserError."""
        self.secret = settings.secret()
        """The swarm secret; None in an open swarm."""
        self.gate = Gate(run_id, self.secret.public_key if self.secret else None)
        guard_storage(dht, run_id, self.gate)
        self._run_id, self._identity, self._dht = run_id, identity, dht
        self._bans_path = identity.path.with_suffix(".bans")
        self._woken = asyncio.Event()
        self._issuer: Issuer | None = None
        if settings.admission_key_file is not None:
            self._issuer = Issuer(
                run_id,
                identity.peer_id,
                settings,
                lambda: self.gate.bans,
                lambda peer_id, error: self.gate.tell(peer_id, error, "issuing of tokens"),
            )
        self._own: OwnToken | None = None
        if self.secret is not None:
            path = identity.path.with_suffix(".token")
            self._own = OwnToken(dht, run_id, self.secret, path, self._issuer)

    @property
    def token(self) -> bytes:
        """Empty in an open swarm."""
        return self._own.blob if self._own else b""

    async def enter(self) -> None:
        """Get a token; to be called before anything is asked of other peers. Raises as `OwnToken.obtain`."""
        if self._own is None:
            return
        self._load_bans()
        self.gate.on_bans.append(self._heard_bans)
        try:
            await self._own.obtain()
        except PeerUnreachable as error:
            if self.gate.other_version is not None:
                raise UserError(str(self.gate.other_version)) from error
            raise
        await bans.serve(self._dht, self._run_id, self.gate)
        if self._issuer is not None:
            await self._dht.transport.serve(admission_protocol(self._run_id), self._issuer.handle)
            await self.announce(ISSUERS_KEY(self._run_id))

    async def run(self) -> None:
        """Keep the token valid. Raises PeersError once this peer is banned or its token has expired."""
        if self._own is None:
            await asyncio.Future()
            return
        while True:
            self._woken.clear()
            if self._is_banned:
                raise PeersError(Why.BANNED.advice(self._identity.peer_id))
            if self._issuer is not None:
                await self.announce(ISSUERS_KEY(self._run_id))
            await self._own.renew()
            await is_set_within(self._woken, min(LOOK_S, self._own.lifetime_s / 8))

    @property
    def _is_banned(self) -> bool:
        """Whether this peer itself is banned."""
        return self._identity.peer_id in self.gate.bans.peer_ids

    async def announce(self, key: str) -> None:
        """Announce under this key of the DHT that this process serves the run."""
        record = CoordinatorRecord(
            peer_id=self._dht.peer_id,
            run_id=self._run_id,
            maddrs=tuple((await self._dht.maddrs())[:MAX_MADDRS]),
            time=time.time(),
            token=self.token,
        )
        await self._dht.store(key, self._dht.peer_id, record.encode(self._identity), _RECORD_TTL_S)

    def _load_bans(self) -> None:
        """Load the ban list on disk, unless it bans this peer: it may have been unbanned since, and the first peer that
        it meets has the newest list."""
        assert self.secret is not None
        kept = Gate(self._run_id, self.secret.public_key)
        bans.load_into(kept, self._bans_path)
        if self._identity.peer_id not in kept.bans.peer_ids:
            self.gate.learn(kept.bans_blob)

    def _heard_bans(self) -> None:
        bans.keep(self.gate, self._bans_path)
        log.info("ban list %d: %d banned", self.gate.bans.version, len(self.gate.bans.peer_ids))
        self._woken.set()


MAX_TTL_S = 2 * RECORD_TTL_S
"""Ours live for 30 s at most. Without a limit, an old record stored again by somebody else with a later expiry would
block newer ones."""
MAX_FOUND = 1024
"""Valid records that are remembered, so that they are not verified again."""
MAX_NEW_BYTES, MAX_KEPT_BYTES = 5 << 19, 3 << 20
"""Limits of the bytes kept under one key, because Hivemind sends them in one message of at most 4 MiB: the first for a
record of a new subkey, the second for one that replaces a shorter record. A thousand peers' records take about 1 MB."""
_AROUND_BYTES = 32
"""Overhead of each record in that message."""


class _Room:
    """By subkey, the size and the expiry of what is kept under one key."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, float]] = {}
        self._total, self._looked_at = 0, 0.0

    def take(self, subkey: str, num_bytes: int, expiry: float, now: float) -> bool:
        """Whether there is room for this record, which replaces one of its subkey that expires earlier."""
        before, until = self._kept.get(subkey, (0, 0.0))
        if expiry <= until:
            return True
        num_bytes += len(subkey) + _AROUND_BYTES
        growth, limit = num_bytes - before, MAX_KEPT_BYTES if before else MAX_NEW_BYTES
        if growth > 0 and self._total + growth > limit and now >= self._looked_at + OFTEN_S:
            self._looked_at = now
            self._kept = {
                known: kept for known, kept in self._kept.items() if kept[1] > now or known == subkey
            }
            self._total = sum(size for size, _ in self._kept.values())
        if growth > 0 and self._total + growth > limit:
            return False
        self._kept[subkey] = num_bytes, expiry
        self._total += growth
        return True


def guard_storage(dht: Dht, run_id: str, gate: Gate) -> None:
    """From now on store under the run's keys only announcements that admitted peers have signed themselves.

    Records found at other nodes are verified, but not checked for admission: the reader reports whom it refuses.
    """

    def keep_records(key: str, kind: type[Announcement] | type[CoordinatorRecord]) -> None:
        found, room = dict[tuple[str, bytes], None](), _Room()

        def check(subkey: str, value: bytes, *, expiry: float, is_found: bool) -> bool:
            # Also false for NaN, with which a record, and in Hivemind's heap all later ones, would never expire.
            if not expiry <= time.time() + MAX_TTL_S:
                return False
            # Every node that has the record returns it at every look-up, which is every few seconds.
            if is_found and (subkey, value) in found:
                return True
            try:
                record = kind.decode(subkey, value, time.time(), run_id=run_id)
            except OtherVersion as error:
                # Others than the initial peers, which the user has named, may say anything.
                if is_found and subkey in dht.initial_peers - {dht.peer_id}:
                    gate.other_version = error
                return False
            except ProtocolError:
                return False
            if is_found and subkey in dht.initial_peers:
                # It has been updated meanwhile.
                gate.other_version = None
            if not is_found:
                return gate.is_admitted(record) and room.take(subkey, len(value), expiry, time.time())
            found[subkey, value] = None
            while len(found) > MAX_FOUND:
                del found[next(iter(found))]
            return True

        dht.keep(key, check)

    keep_records(PEERS_KEY(run_id), Announcement)
    keep_records(COORDINATOR_KEY(run_id), CoordinatorRecord)
    keep_records(ISSUERS_KEY(run_id), CoordinatorRecord)
