"""Tokens and ban lists, both signed by the admission key of a run."""

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
"""As many as fit into MAX_BANS_BYTES."""

# Signed prefixes (domain separation): a signature under a token is never valid under a ban list, and vice versa.
_TOKEN, _BANS = b"diloco token v3\0", b"diloco bans v2\0"

T = TypeVar("T")


class Token(Struct, frozen=True):
    """Admits one identity to one run for a limited time. Times are Unix seconds."""

    run_id: RunId
    peer_id: PeerId
    not_before: Real
    expires: Real

    def encode(self, key: Ed25519PrivateKey) -> bytes:
        return _signed(_TOKEN, encode(self), key)

    @classmethod
    def decode(cls, blob: bytes, public_key: bytes) -> Token:
        """Raises Refused unless `blob` is a token signed by this admission key."""
        try:
            return decode(_TOKENS, _payload(_TOKEN, blob, MAX_TOKEN_BYTES, public_key), MAX_TOKEN_BYTES)
        except ProtocolError as error:
            raise Refused(Why.FORGED) from error

    @classmethod
    def checked(cls, blob: bytes, public_key: bytes, *, run_id: str, peer_id: str) -> Token:
        """As `decode`. Raises Refused also for the token of another run or peer."""
        token = cls.decode(blob, public_key)
        if token.run_id != run_id:
            raise Refused(Why.FORGED)
        if token.peer_id != peer_id:
            raise Refused(Why.ANOTHERS)
        return token


class BanList(Struct, frozen=True):
    """Peers that are refused even with a token. Of two lists of a run the one with the greater `order` is valid."""

    run_id: RunId
    version: Count = 0
    peer_ids: Annotated[frozenset[PeerId], Meta(max_length=MAX_BANNED)] = frozenset()

    @property
    def order(self) -> tuple[int, list[str]]:
        """Total order of a run's lists: two holders of the key may each have made the same version."""
        return self.version, sorted(self.peer_ids)

    def encode(self, key: Ed25519PrivateKey) -> bytes:
        """Raises ValueError for too many peers."""
        if len(self.peer_ids) > MAX_BANNED:
            raise ValueError(f"{len(self.peer_ids)} banned peers; at most {MAX_BANNED} fit into a list")
        return _signed(_BANS, encode(self), key)

    @classmethod
    def decode(cls, blob: bytes, public_key: bytes) -> BanList:
        """Raises ProtocolError unless `blob` is a ban list signed by this admission key."""
        return decode(
            _BAN_LISTS, _payload(_BANS, blob, MAX_BANS_BYTES, public_key), MAX_BANS_BYTES, what="ban list"
        )


def banned_more(bans: BanList, *, ban: Collection[str] = (), unban: Collection[str] = ()) -> BanList:
    """The next version of this list, with these peers added and removed."""
    peer_ids = (bans.peer_ids | set(ban)) - set(unban)
    return BanList(run_id=bans.run_id, version=bans.version + 1, peer_ids=peer_ids)


class _Signed(Struct, frozen=True):
    payload: bytes
    signature: SignatureBytes


_SIGNED, _TOKENS, _BAN_LISTS = Decoder(_Signed), Decoder(Token), Decoder(BanList)


def _signed(kind: bytes, payload: bytes, key: Ed25519PrivateKey) -> bytes:
    return encode(_Signed(payload=payload, signature=key.sign(kind + payload)))


def _payload(kind: bytes, blob: bytes, most_bytes: int, public_key: bytes) -> bytes:
    """The payload of `blob`. Raises ProtocolError unless it is signed by the admission key."""
    signed = decode(_SIGNED, blob, most_bytes)
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signed.signature, kind + signed.payload)
    except InvalidSignature as error:
        raise ProtocolError("not signed by the run's admission key") from error
    return signed.payload
