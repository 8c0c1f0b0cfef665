"""Issues tokens to those who prove the swarm secret; the messages are in peers/protocol/admission.py.

Runs beside the coordinator, and in any peer that was given the admission key.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from msgspec.msgpack import Decoder

from peers.admission.secrets import AdmissionKey, load_key
from peers.admission.token_request import MAX_MESSAGE_BYTES
from peers.errors import ProtocolError, UserError
from peers.net.channel import Channel
from peers.protocol.admission import NONCE_BYTES, Issued, Join, Nonce, Proof
from peers.protocol.maddrs import is_peer_id
from peers.protocol.refusal import Refusal, Refused, Why
from peers.protocol.tokens import BanList, Token

DEFAULT_LIFETIME_DAYS = 30.0
"""Far longer than a coordinator is missed for: nobody is to be shut out of a swarm that goes on without it."""
MAX_ASKING = 64
"""Peers that are asked for their proof at once; further ones are turned away, and ask again."""
_ANSWER_TIMEOUT_S = 3.0
_MAX_LIST_BYTES = 1 << 20

_JOIN, _PROOF = Decoder(Join), Decoder(Proof)

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class IssuerSettings:
    """What an issuer of tokens is given."""

    key_path: Path
    allowlist_path: Path | None = None
    """One peer id a line; only these are given tokens. Read again when it changes."""
    lifetime_s: float = DEFAULT_LIFETIME_DAYS * 86_400.0


class Issuer:
    """`bans` gives the newest ban list, `tell(peer id, refusal)` hears whom it refused."""

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        settings: IssuerSettings,
        bans: Callable[[], BanList],
        tell: Callable[[str, Refused], object],
    ) -> None:
        """Raises UserError where the key or the allowlist cannot be read."""
        self._run_id, self._peer_id, self._settings = run_id, peer_id, settings
        self._bans, self._tell = bans, tell
        self._key = _Reread(settings.key_path, load_key)
        self._allowed = _Reread(settings.allowlist_path, read_allowlist) if settings.allowlist_path else None
        self._num_asking = 0

    @property
    def key(self) -> AdmissionKey:
        """As the file has it now: its secret may have been replaced."""
        return self._key.value

    def issue(self, peer_id: str, now: float) -> bytes:
        """A new token. Raises Refused for whom the allowlist does not name, or the ban list does."""
        if peer_id in self._bans().peer_ids:
            raise Refused(Why.BANNED)
        if self._allowed is not None and peer_id != self._peer_id and peer_id not in self._allowed.value:
            raise Refused(Why.NOT_LISTED)
        token = Token(
            run_id=self._run_id,
            peer_id=peer_id,
            not_before=now,
            expires=now + self._settings.lifetime_s,
            serial=secrets.randbits(60),
        )
        return token.encode(self.key.private_key)

    async def handle(self, peer_id: str, sock: socket.socket) -> None:
        """Serve one stream of this peer, whose identity is proved. Raises PeersError."""
        channel = Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES)
        if self._num_asking >= MAX_ASKING:
            channel.close()
            raise ProtocolError(f"{MAX_ASKING} peers are asking for tokens already")
        self._num_asking += 1
        try:
            await channel.read(_JOIN, _ANSWER_TIMEOUT_S)
            nonce = secrets.token_bytes(NONCE_BYTES)
            await channel.send(Nonce(nonce=nonce), _ANSWER_TIMEOUT_S)
            said = await channel.read(_PROOF, _ANSWER_TIMEOUT_S)
            await channel.send(self._answer(peer_id, nonce, said.proof), _ANSWER_TIMEOUT_S)
        finally:
            self._num_asking -= 1
            channel.close()

    def _answer(self, peer_id: str, nonce: bytes, proof: bytes) -> Issued | Refusal:
        try:
            if not self.key.secret.is_proved_by(proof, self._run_id, peer_id, self._peer_id, nonce):
                raise Refused(Why.WRONG_SECRET)
            return Issued(token=self.issue(peer_id, time.time()))
        except Refused as error:
            self._tell(peer_id, error)
            return Refusal(why=error.why)


def read_allowlist(path: Path) -> frozenset[str]:
    """The peer ids in a file, one a line; `#` begins a comment. Raises UserError."""
    try:
        with path.expanduser().open("rb") as file:
            text = file.read(_MAX_LIST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise UserError(f"cannot read the allowlist {path}: {error.strerror}") from error
    words = [word for line in text.splitlines() if (word := line.partition("#")[0].strip())]
    for word in words:
        if not is_peer_id(word):
            raise UserError(f"{word!r:.80} in the allowlist {path} is not a peer id")
    return frozenset(words)


class _Reread(Generic[T]):
    """What a file says, read again whenever it has changed; what cannot be read then leaves the last that could."""

    def __init__(self, path: Path, read: Callable[[Path], T]) -> None:
        self._path, self._read = path, read
        self._seen = self._stamp()
        self._value = read(path)

    @property
    def value(self) -> T:
        if (stamp := self._stamp()) != self._seen:
            self._seen = stamp
            try:
                self._value = self._read(self._path)
            except UserError as error:
                log.warning("%s; what it said before holds", error)
        return self._value

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.expanduser().stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
