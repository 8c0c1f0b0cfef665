"""What the admission key of a run signs: tokens and ban lists."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta
from msgspec.msgpack import Decoder

from peers.errors import ProtocolError
from peers.protocol.limits import (
    MAX_BANS_BYTES,
    MAX_TOKEN_BYTES,
    Count,
    PeerId,
    Real,
    RunId,
    SignatureBytes,
)
from peers.protocol.refusal import Refused, Why
from peers.protocol.wire import Struct, decode, encode

MAX_BANNED = 400
"""So many fit into MAX_BANS_BYTES."""

# So that no signature of the admission key can be taken for one on something else.
_TOKEN, _BANS = b"diloco token v2\0", b"diloco bans v2\0"

T = TypeVar("T")


class Token(Struct, frozen=True):
    """The right of one identity to be in one run for a while. Times are Unix seconds."""

    run_id: RunId
    peer_id: PeerId
    not_before: Real
    expires: Real
    serial: Count

    def encode(self, key: Ed25519PrivateKey) -> bytes:
        return _signed(_TOKEN, encode(self), key)

    @classmethod
    def decode(cls, blob: bytes, public_key: bytes) -> Token:
        """Raises Refused unless the holder of this admission key signed exactly this."""
        try:
            return decode(_TOKENS, _payload(_TOKEN, blob, MAX_TOKEN_BYTES, public_key), MAX_TOKEN_BYTES)
        except ProtocolError as error:
            raise Refused(Why.FORGED) from error


class BanList(Struct, frozen=True):
    """Whom no door opens for any more, token or not. Of two lists of a run the higher version holds."""

    run_id: RunId
    version: Count = 0
    peer_ids: Annotated[frozenset[PeerId], Meta(max_length=MAX_BANNED)] = frozenset()

    @property
    def order(self) -> tuple[int, list[str]]:
        """Of two lists the greater holds: two holders of the key may each have made the next version."""
        return self.version, sorted(self.peer_ids)

    def encode(self, key: Ed25519PrivateKey) -> bytes:
        """Raises ValueError where there are too many."""
        if len(self.peer_ids) > MAX_BANNED:
            raise ValueError(f"{len(self.peer_ids)} banned peers; at most {MAX_BANNED} fit into a list")
        return _signed(_BANS, encode(self), key)

    @classmethod
    def decode(cls, blob: bytes, public_key: bytes) -> BanList:
        """Raises ProtocolError unless the holder of this admission key signed exactly this."""
        return decode(
            _BAN_LISTS, _payload(_BANS, blob, MAX_BANS_BYTES, public_key), MAX_BANS_BYTES, what="ban list"
        )


def banned_more(bans: BanList, *, ban: Collection[str] = (), unban: Collection[str] = ()) -> BanList:
    """The next version of a list."""
    peer_ids = (bans.peer_ids | set(ban)) - set(unban)
    return BanList(run_id=bans.run_id, version=bans.version + 1, peer_ids=peer_ids)


class _Signed(Struct, frozen=True):
    payload: bytes
    signature: SignatureBytes


_SIGNED, _TOKENS, _BAN_LISTS = Decoder(_Signed), Decoder(Token), Decoder(BanList)


def _signed(kind: bytes, payload: bytes, key: Ed25519PrivateKey) -> bytes:
    return encode(_Signed(payload=payload, signature=key.sign(kind + payload)))


def _payload(kind: bytes, blob: bytes, most_bytes: int, public_key: bytes) -> bytes:
    """What the holder of the admission key has signed. Raises ProtocolError."""
    signed = decode(_SIGNED, blob, most_bytes)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signed.signature, kind + signed.payload)
    except InvalidSignature as error:
        raise ProtocolError("not signed by the run's admission key") from error
    return signed.payload
