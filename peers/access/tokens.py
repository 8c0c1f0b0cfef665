"""What the admission key of a run signs: tokens and ban lists; and why a peer may be refused."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from peers.errors import ProtocolError
from peers.network.libp2p_keys import base58_decode, base58_encode

MAX_TOKEN_BYTES = 512
MAX_BANS_BYTES = 4000
"""A ban list fits into one record of the DHT."""
MAX_BANNED = 90

_MAX_VERSION = 1 << 62
_MAX_TIME_S = 1e12
_MAX_ID_CHARACTERS = 128
# So that no signature of the admission key can be taken for one on something else.
_TOKEN, _BANS = b"diloco token\0", b"diloco bans\0"


class Why(StrEnum):
    """Why a peer is refused, as it is told and as the log has it."""

    NO_TOKEN = "it has shown no token"
    FORGED = "its token is not of this run"
    ANOTHERS = "its token is another peer's"
    EARLY = "its token is not valid yet"
    EXPIRED = "its token has expired"
    BANNED = "it is banned"
    WRONG_SECRET = "it does not have the swarm secret"
    NOT_LISTED = "it is not on the allowlist"

    def advice(self, peer_id: str) -> str:
        """What this means to the user of the refused peer, and the next move."""
        return _ADVICE[self].format(peer_id=peer_id)


_ADVICE = {
    Why.NO_TOKEN: "this swarm admits only peers that have its secret. Copy the file that `diloco dht start` names on "
    "the coordinator's machine to this one, and give it by --swarm-secret-file, or its content in DILOCO_SWARM_SECRET",
    Why.FORGED: "the others hold another swarm secret than this peer. Copy the coordinator's file to this machine "
    "anew, and check --run-id",
    Why.ANOTHERS: "this peer's token was issued to another identity. Remove the .token file beside its key and start "
    "it again: a new one is issued",
    Why.EARLY: "this peer's token is not valid yet by the others' clocks. Is the clock of this machine, and the "
    "coordinator's, right?",
    Why.EXPIRED: "this peer's token has expired, and nobody renewed it. Start the coordinator again, or a peer with "
    "--admission-key-file, then this peer",
    Why.BANNED: "this peer, {peer_id}, is banned from the run. Whoever holds the admission key can lift that by "
    "`diloco peers unban {peer_id}`",
    Why.WRONG_SECRET: "the swarm secret that this peer has is not the run's, or not any more. Copy the coordinator's "
    "file to this machine anew",
    Why.NOT_LISTED: "the run's allowlist does not name this peer. Have {peer_id} added to it on the coordinator's "
    "machine, then start this peer again",
}


class Refused(ProtocolError):
    """A peer that may not be here."""

    def __init__(self, why: Why) -> None:
        super().__init__(f"refused: {why}")
        self.why = why


@dataclass(frozen=True, kw_only=True)
class Token:
    """The right of one identity to be in one run for a while. Times are Unix seconds."""

    run_id: str
    peer_id: str
    not_before: float
    expires: float
    serial: int

    def encode(self, key: Ed25519PrivateKey) -> bytes:
        return _signed(_TOKEN, [self.run_id, self.peer_id, self.not_before, self.expires, self.serial], key)

    @classmethod
    def decode(cls, blob: bytes, public_key: bytes) -> Token:
        """Raises Refused unless the holder of this admission key signed exactly this."""
        try:
            fields = _verified(_TOKEN, blob, MAX_TOKEN_BYTES, public_key)
            run_id, peer_id, not_before, expires, serial = fields
        except ValueError as error:
            raise Refused(Why.FORGED) from error
        times = not_before, expires
        if not (
            _is_name(run_id)
            and _is_name(peer_id)
            and all(type(time) is float and 0 <= time <= _MAX_TIME_S for time in times)
            and _is_count(serial)
        ):
            raise Refused(Why.FORGED)
        return cls(run_id=run_id, peer_id=peer_id, not_before=not_before, expires=expires, serial=serial)


@dataclass(frozen=True, kw_only=True)
class BanList:
    """Whom no door opens for any more, token or not. Of two lists of a run the higher version holds."""

    run_id: str
    version: int = 0
    peer_ids: frozenset[str] = frozenset()

    def encode(self, key: Ed25519PrivateKey) -> bytes:
        """Raises ValueError where there are too many."""
        if len(self.peer_ids) > MAX_BANNED:
            raise ValueError(f"{len(self.peer_ids)} banned peers; at most {MAX_BANNED} fit into a list")
        banned = [base58_decode(peer_id) for peer_id in sorted(self.peer_ids)]
        return _signed(_BANS, [self.run_id, self.version, banned], key)

    @classmethod
    def decode(cls, blob: bytes, public_key: bytes) -> BanList:
        """Raises ProtocolError unless the holder of this admission key signed exactly this."""
        try:
            run_id, version, banned = _verified(_BANS, blob, MAX_BANS_BYTES, public_key)
        except ValueError as error:
            raise ProtocolError(f"not a ban list of this run: {error}") from error
        if not (
            _is_name(run_id)
            and _is_count(version)
            and isinstance(banned, list)
            and len(banned) <= MAX_BANNED
            and all(isinstance(raw, bytes) and len(raw) <= _MAX_ID_CHARACTERS for raw in banned)
        ):
            raise ProtocolError("a ban list with other fields than ours")
        return cls(run_id=run_id, version=version, peer_ids=frozenset(map(base58_encode, banned)))


def banned_more(bans: BanList, *, ban: Collection[str] = (), unban: Collection[str] = ()) -> BanList:
    """The next version of a list."""
    peer_ids = (bans.peer_ids | set(ban)) - set(unban)
    return BanList(run_id=bans.run_id, version=bans.version + 1, peer_ids=peer_ids)


def _signed(kind: bytes, fields: list[Any], key: Ed25519PrivateKey) -> bytes:
    payload = msgpack.packb(fields)
    blob: bytes = msgpack.packb([payload, key.sign(kind + payload)])
    return blob


def _verified(kind: bytes, blob: bytes, max_bytes: int, public_key: bytes) -> list[Any]:
    """Raises ValueError."""
    if not isinstance(blob, bytes) or len(blob) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes, or none")
    payload, signature = _list_of(blob)
    if not (isinstance(payload, bytes) and isinstance(signature, bytes)):
        raise ValueError("not a payload and a signature")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, kind + payload)
    except InvalidSignature as error:
        raise ValueError("not signed by the run's admission key") from error
    return _list_of(payload)


def _list_of(blob: bytes) -> list[Any]:
    """Raises ValueError."""
    try:
        value = msgpack.unpackb(blob, strict_map_key=True)
    except (TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"not msgpack: {error!r}") from error
    if not isinstance(value, list):
        raise ValueError(f"not a list but {type(value).__name__}")
    return value


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_ID_CHARACTERS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_VERSION
