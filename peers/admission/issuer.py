"""Issues tokens to peers that prove the swarm secret; the messages are in peers/protocol/admission.py.

Runs beside the coordinator, and in any peer that was given the admission key.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from msgspec.msgpack import Decoder

from peers.admission.secrets import AdmissionKey, AdmissionSettings, load_key
from peers.errors import ProtocolError, UserError
from peers.net.channel import Channel
from peers.net.rate_limit import counted
from peers.protocol.admission import MAX_MESSAGE_BYTES, NONCE_BYTES, Issued, Join, Nonce, Proof
from peers.protocol.maddrs import is_peer_id
from peers.protocol.refusal import Refusal, Refused, Why
from peers.protocol.tokens import BanList, Token
from peers.timing import ANSWER_S

MAX_ASKING = 64
"""Conversations at once; further ones are closed, and those peers ask again."""
_MAX_LIST_BYTES = 1 << 20

_JOIN, _PROOF = Decoder(Join), Decoder(Proof)

log = logging.getLogger(__name__)


class Issuer:
    """`bans` returns the newest ban list; `tell(peer id, refusal)` is called for each refused peer."""

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        settings: AdmissionSettings,
        bans: Callable[[], BanList],
        tell: Callable[[str, Refused], object],
    ) -> None:
        """Raises UserError if the key or the allowlist cannot be read."""
        self._run_id, self._peer_id, self._settings = run_id, peer_id, settings
        self._bans, self._tell = bans, tell
        self._asking: Counter[str] = Counter()
        self._check_listed(peer_id)
        self._key()

    def issue(self, peer_id: str, now: float) -> bytes:
        """A new token. Raises Refused if the allowlist does not name the peer or the ban list does, and UserError if
        the key or the allowlist cannot be read any more."""
        if peer_id in self._bans().peer_ids:
            raise Refused(Why.BANNED)
        self._check_listed(peer_id)
        token = Token(
            run_id=self._run_id,
            peer_id=peer_id,
            not_before=now,
            expires=now + self._settings.token_days * 86_400.0,
        )
        return token.encode(self._key().private_key)

    async def handle(self, peer_id: str, sock: socket.socket) -> None:
        """Serve one stream of this peer, whose identity is proved. Raises PeersError."""
        with (
            Channel(sock, max_message_bytes=MAX_MESSAGE_BYTES) as channel,
            counted(self._asking, "those who ask for tokens", MAX_ASKING),
        ):
            await channel.read(_JOIN, ANSWER_S)
            nonce = secrets.token_bytes(NONCE_BYTES)
            await channel.send(Nonce(nonce=nonce), ANSWER_S)
            said = await channel.read(_PROOF, ANSWER_S)
            await channel.send_last(self._answer(peer_id, nonce, said.proof), ANSWER_S)

    def _answer(self, peer_id: str, nonce: bytes, proof: bytes) -> Issued | Refusal:
        try:
            key = self._key()
            if not key.secret.is_proved_by(proof, self._run_id, peer_id, self._peer_id, nonce):
                raise Refused(Why.WRONG_SECRET)
            return Issued(token=self.issue(peer_id, time.time()))
        except Refused as error:
            self._tell(peer_id, error)
            return Refusal(why=error.why)
        except UserError as error:
            log.warning("no token for %s: %s", peer_id, error)
            raise ProtocolError("no token can be issued now") from error

    def _check_listed(self, peer_id: str) -> None:
        path = self._settings.allowlist_file
        if path and peer_id not in read_allowlist(Path(path)) | {self._peer_id}:
            raise Refused(Why.NOT_LISTED)

    def _key(self) -> AdmissionKey:
        assert self._settings.admission_key_file is not None
        return load_key(self._settings.admission_key_file)


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
