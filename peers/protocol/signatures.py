"""Whether a peer has signed something: its id is the hash of its key, or the key itself."""

from __future__ import annotations

from peers.protocol import libp2p_keys
from peers.protocol.certificates import Signature


def verify_signature(peer_id: str, payload: bytes, signature: Signature) -> bool:
    """Whether this peer has signed this."""
    return libp2p_keys.verify(peer_id, signature.public_key, payload, signature.signature)
