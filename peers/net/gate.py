"""Applies peers/core/admission.py to incoming and outgoing connections of this peer, with its clock, its log, and
callbacks for new ban lists.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from peers.core.admission import Admission
from peers.net.rate_limit import RateLimit
from peers.protocol.records import Record
from peers.protocol.refusal import Refused
from peers.protocol.tokens import BanList

_LOGGED_PER_S, _LOGGED_AT_ONCE = 1 / 3, 20
"""Refusals that are logged. Bounded, since a stranger can make any number of keys."""
_MAX_TOLD = 1024

log = logging.getLogger(__name__)


class Gate:
    """Used from one event loop. `on_bans` hooks are called after every newer ban list, whoever brought it."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._told: dict[tuple[str, str], None] = {}
        self._refusals = RateLimit(_LOGGED_PER_S, _LOGGED_AT_ONCE)
        self.on_bans: list[Callable[[], object]] = []

    @classmethod
    def open(cls, run_id: str) -> Gate:
        """A gate that admits everybody."""
        return cls(Admission(run_id))

    @property
    def is_open(self) -> bool:
        return self._admission.is_open

    @property
    def bans(self) -> BanList:
        return self._admission.bans

    @property
    def bans_blob(self) -> bytes:
        """The newest ban list to pass on; empty where there is none."""
        return self._admission.bans_blob

    def check(self, peer_id: str, token: bytes, door: str) -> None:
        """Raise Refused, and log it once, unless this token admits this peer. `door`: where the peer asked."""
        try:
            self._admission.check(peer_id, token, time.time())
        except Refused as error:
            self.tell(peer_id, error, door)
            raise

    def check_shown(self, peer_id: str, door: str) -> None:
        """As `check`, with the token that this peer has shown before."""
        try:
            self._admission.check_shown(peer_id, time.time())
        except Refused as error:
            self.tell(peer_id, error, door)
            raise

    def check_record(self, record: Record) -> None:
        """As `check`, for the peer of this record."""
        self.check(record.peer_id, record.token, "DHT")

    def check_quietly(self, record: Record) -> None:
        """As `check_record`, without logging: for observers."""
        self._admission.check(record.peer_id, record.token, time.time())

    def is_admitted(self, record: Record) -> bool:
        """As `check_quietly`, as a bool."""
        try:
            self.check_quietly(record)
        except Refused:
            return False
        return True

    def learn(self, blob: bytes) -> bool:
        """Adopt a ban list if it is newer; returns whether it was. Raises ProtocolError."""
        if not self._admission.learn(blob):
            return False
        for heard in self.on_bans:
            heard()
        return True

    def tell(self, peer_id: str, error: Refused, door: str) -> None:
        """Log a refusal, the first time for each peer and reason."""
        refusal = peer_id, error.why
        if refusal not in self._told and self._refusals.take(time.monotonic()):
            log.warning("refused %s at the %s: %s", peer_id, door, error.why)
            self._told[refusal] = None
            while len(self._told) > _MAX_TOLD:
                del self._told[next(iter(self._told))]
