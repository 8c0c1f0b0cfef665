"""What is said where a peer proves that it has the swarm secret."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.access.secrets import NONCE_BYTES, PROOF_BYTES
from peers.protocol.wire import Struct


class Nonce(Struct, frozen=True, tag="nonce"):
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Proof(Struct, frozen=True, tag="proof"):
    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
