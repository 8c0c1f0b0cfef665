"""Which peers may be in a run: decided here only, checked wherever a peer connects.

The holder of a run's *admission key* issues *tokens* and signs *ban lists*; the key's public half, which comes with the
swarm secret, verifies them. A token is useless without the identity key of the peer that it names. A run without an
admission key is open to every peer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from peers.errors import ProtocolError
from peers.net.rate_limit import RateLimit
from peers.protocol.records import OtherVersion, Record
from peers.protocol.refusal import Refused, Why
from peers.protocol.tokens import BanList, Token
from peers.timing import CLOCK_TOLERANCE_S

MAX_SHOWN = 4096
"""Peers whose tokens are remembered. Beyond that the oldest is dropped, and that peer has to show its token again."""
_LOGGED_PER_S, _LOGGED_AT_ONCE = 1 / 3, 20
"""Refusals that are logged. Bounded, since a stranger can make any number of keys."""
_MAX_TOLD = 1024

log = logging.getLogger(__name__)


class Gate:
    """Decides by the public admission key, the newest ban list, and the tokens that peers have shown.

    Used from one event loop. `on_bans` hooks are called after every newer ban list, whoever brought it.
    """

    def __init__(
        self, run_id: str, public_key: bytes | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Without a key, the gate admits everybody. `clock` gives Unix time."""
        self._run_id, self._public_key, self._clock = run_id, public_key, clock
        self.bans = BanList(run_id=run_id)
        self.bans_blob = b""
        """The signed form of `bans`, to pass on; empty before there is any."""
        self.on_bans: list[Callable[[], object]] = []
        self.other_version: OtherVersion | None = None
        """Set while the last record of this run by an initial peer was written by another version of diloco."""
        self._shown: dict[str, tuple[bytes, Token]] = {}
        self._told: dict[tuple[str, str], None] = {}
        self._refusals = RateLimit(_LOGGED_PER_S, _LOGGED_AT_ONCE)

    @property
    def is_open(self) -> bool:
        return self._public_key is None

    def check(self, peer_id: str, token: bytes, door: str) -> None:
        """Raise Refused, and log it once, unless this token admits this peer. `door`: where the peer asked."""
        try:
            self.check_token(peer_id, token)
        except Refused as error:
            self.tell(peer_id, error, door)
            raise

    def check_shown(self, peer_id: str, door: str) -> None:
        """As `check`, with the token that this peer has shown before."""
        blob, _ = self._shown.get(peer_id, (b"", None))
        self.check(peer_id, blob, door)

    def check_record(self, record: Record) -> None:
        """As `check`, for the peer of this record."""
        self.check(record.peer_id, record.token, "DHT")

    def check_quietly(self, record: Record) -> None:
        """As `check_record`, without logging: for observers."""
        self.check_token(record.peer_id, record.token)

    def is_admitted(self, record: Record) -> bool:
        """As `check_quietly`, as a bool."""
        try:
            self.check_quietly(record)
        except Refused:
            return False
        return True

    def check_token(self, peer_id: str, blob: bytes) -> None:
        """Raise Refused unless this token admits this peer, which has already proved its identity."""
        if self._public_key is None:
            return
        if peer_id in self.bans.peer_ids:
            raise Refused(Why.BANNED)
        if not blob:
            raise Refused(Why.NO_TOKEN)
        shown, token = self._shown.get(peer_id, (b"", None))
        if token is None or shown != blob:
            token = Token.checked(blob, self._public_key, run_id=self._run_id, peer_id=peer_id)
        now = self._clock()
        if now < token.not_before - CLOCK_TOLERANCE_S:
            raise Refused(Why.EARLY)
        if now >= token.expires:
            raise Refused(Why.EXPIRED)
        self._shown[peer_id] = blob, token
        while len(self._shown) > MAX_SHOWN:
            del self._shown[next(iter(self._shown))]

    def learn(self, blob: bytes) -> bool:
        """Adopt a signed ban list if it is newer than the one held; returns whether it was. Empty: there is none.

        Raises ProtocolError.
        """
        if self._public_key is None or blob in (b"", self.bans_blob):
            return False
        bans = BanList.decode(blob, self._public_key)
        if bans.run_id != self._run_id:
            raise ProtocolError(f"a ban list of another run, {bans.run_id!r:.80}")
        if bans.order <= self.bans.order:
            return False
        self.bans, self.bans_blob = bans, blob
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
