"""How a peer is given its token, and how the ban list gets about.

protocol diloco/<run_id>/admission
    peer    -> issuer   Join     I ask for a token
    issuer  -> peer     Nonce    to be proved about
    peer    -> issuer   Proof    that I have the swarm secret
    issuer  -> peer     Issued, or Refusal

protocol diloco/<run_id>/bans, and within the mesh (mesh.py)
    anybody -> anybody  Bans     the newest list that I know; over the first protocol the answer is another one

libp2p proves both identities; the proof is an HMAC by the swarm secret over them, the run and the nonce, so the secret
never travels and a proof is good for nothing else. Issuers announce themselves in the DHT, with tokens of their own.
The list is believed for its signature, so it matters nothing who brings it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.limits import MAX_BANS_BYTES, MAX_TOKEN_BYTES
from peers.protocol.wire import Struct

NONCE_BYTES = PROOF_BYTES = 32


class Join(Struct, frozen=True, tag="join"):
    pass


class Nonce(Struct, frozen=True, tag="nonce"):
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Proof(Struct, frozen=True, tag="proof"):
    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Issued(Struct, frozen=True, tag="token"):
    token: Annotated[bytes, Meta(min_length=1, max_length=MAX_TOKEN_BYTES)]


class Bans(Struct, frozen=True, tag="bans"):
    signed: Annotated[bytes, Meta(max_length=MAX_BANS_BYTES)]
    """A BanList; empty: this peer has none."""
