"""Signatures of virtual peers: keyed hashes. Only the owner's keys and the key ring's `verify` hold the secret."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from peers.protocol.certificates import Signature


def _mac(secret: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, key=secret, digest_size=16).digest()


@dataclass(frozen=True)
class VirtualKeys:
    """The identity key of one peer (peers.protocol.certificates.Keys)."""

    peer_id: str
    _secret: bytes = field(repr=False)

    def sign(self, payload: bytes) -> Signature:
        return Signature(public_key=self.peer_id.encode(), signature=_mac(self._secret, payload))


@dataclass(frozen=True)
class KeyRing:
    """All keys of one simulation."""

    seed: int

    def keys_of(self, peer_id: str) -> VirtualKeys:
        """The keys of this peer, the same at every call: a peer keeps its key when it restarts."""
        return VirtualKeys(peer_id, _mac(b"ring", f"{self.seed} {peer_id}".encode()))

    def verify(self, peer_id: str, payload: bytes, signature: Signature) -> bool:
        return hmac.compare_digest(self.keys_of(peer_id).sign(payload).signature, signature.signature)


@dataclass(frozen=True)
class BelievedKeys:
    """Keys for simulations without liars: signatures as long as real ones that cost nothing to make."""

    peer_id: str

    def sign(self, payload: bytes) -> Signature:
        return _BELIEVED


def believe(peer_id: str, payload: bytes, signature: Signature) -> bool:
    """A `Verify` that accepts every signature."""
    return True


_BELIEVED = Signature(public_key=bytes(36), signature=bytes(64))
