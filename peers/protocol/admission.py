"""How a peer gets its token, and how the ban list spreads.

protocol diloco/<run_id>/admission
    peer    -> issuer   Join     a request for a token
    issuer  -> peer     Nonce    a challenge
    peer    -> issuer   Proof    that the peer has the swarm secret
    issuer  -> peer     Issued, or Refusal

protocol diloco/<run_id>/bans, and within the mesh (mesh.py)
    any     -> any      Bans     the newest list that the sender knows; over the former, the answer is another one

libp2p authenticates both ends. The proof is an HMAC with the swarm secret over both identities, the run and the nonce:
the secret is never sent, and a proof cannot be reused. Issuers announce themselves in the DHT, with tokens of their
own. A ban list is signed by the admission key, so any peer may pass it on.
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
    """A signed BanList; empty: the sender has none."""
