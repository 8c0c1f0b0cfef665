"""Which peers may be in a run: decided here only, checked wherever a peer connects. Pure: the clock is an argument.

The holder of a run's *admission key* issues *tokens* and signs *ban lists*; the key's public half, which comes with the
swarm secret, verifies them. A token is useless without the identity key of the peer that it names. A run without an
admission key is open to every peer.
"""

from __future__ import annotations

from peers.errors import ProtocolError
from peers.protocol.refusal import Refused, Why
from peers.protocol.tokens import BanList, Token
from peers.timing import CLOCK_TOLERANCE_S

MAX_SHOWN = 4096
"""Peers whose tokens are remembered. Beyond that the oldest is dropped, and that peer has to show its token again."""


class Admission:
    """Decides by the public admission key, the newest ban list, and the tokens that peers have shown."""

    def __init__(self, run_id: str, public_key: bytes | None = None) -> None:
        self.run_id = run_id
        self.bans = BanList(run_id=run_id)
        self.bans_blob = b""
        """The signed form of `bans`, to pass on; empty before there is any."""
        self._public_key = public_key
        self._shown: dict[str, tuple[bytes, Token]] = {}

    @property
    def is_open(self) -> bool:
        return self._public_key is None

    def check(self, peer_id: str, blob: bytes, now: float) -> None:
        """Raises Refused unless this token admits this peer, which has already proved its identity."""
        if self._public_key is None:
            return
        if peer_id in self.bans.peer_ids:
            raise Refused(Why.BANNED)
        if not blob:
            raise Refused(Why.NO_TOKEN)
        shown = self._shown.get(peer_id)
        if shown is None or shown[0] != blob:
            token = Token.decode(blob, self._public_key)
            if token.run_id != self.run_id:
                raise Refused(Why.FORGED)
            if token.peer_id != peer_id:
                raise Refused(Why.ANOTHERS)
            shown = blob, token
        _check_time(shown[1], now)
        self._shown[peer_id] = shown
        while len(self._shown) > MAX_SHOWN:
            del self._shown[next(iter(self._shown))]

    def check_shown(self, peer_id: str, now: float) -> None:
        """Raises Refused unless a token that this peer has shown before still admits it."""
        shown = self._shown.get(peer_id)
        self.check(peer_id, shown[0] if shown else b"", now)

    def learn(self, blob: bytes) -> bool:
        """Adopt a signed ban list if it is newer than the one held. True if so. `blob` empty: there is none.

        Raises ProtocolError.
        """
        if self._public_key is None or blob in (b"", self.bans_blob):
            return False
        bans = BanList.decode(blob, self._public_key)
        if bans.run_id != self.run_id:
            raise ProtocolError(f"a ban list of another run, {bans.run_id!r:.80}")
        if bans.order <= self.bans.order:
            return False
        self.bans, self.bans_blob = bans, blob
        return True


def _check_time(token: Token, now: float) -> None:
    if now < token.not_before - CLOCK_TOLERANCE_S:
        raise Refused(Why.EARLY)
    if now >= token.expires:
        raise Refused(Why.EXPIRED)
