"""Verification of signatures by peer id: the id is the hash of the peer's key, or the key itself."""

from __future__ import annotations

from peers.protocol import libp2p_keys
from peers.protocol.certificates import Signature


def verify_signature(peer_id: str, payload: bytes, signature: Signature) -> bool:
    """Whether this peer has signed this payload."""
    return libp2p_keys.verify(peer_id, signature.public_key, payload, signature.signature)
