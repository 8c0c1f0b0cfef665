"""What the admission key of a run signs: tokens and ban lists."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from peers.errors import ProtocolError
from peers.network.libp2p_keys import base58_decode, base58_encode
from peers.protocol.limits import MAX_TOKEN_BYTES
from peers.protocol.refusal import Refused, Why

MAX_BANS_BYTES = 4000
"""A ban list fits into one record of the DHT."""
MAX_BANNED = 90

_MAX_VERSION = 1 << 62
_MAX_TIME_S = 1e12
_MAX_ID_CHARACTERS = 128
# So that no signature of the admission key can be taken for one on something else.
_TOKEN, _BANS = b"diloco token\0", b"diloco bans\0"


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
