"""How a peer gets its token and its world rank, and how the ban list spreads.

protocol diloco/<run_id>/admission
    peer    -> issuer   Join     a request for a token
    issuer  -> peer     Nonce    a challenge
    peer    -> issuer   Proof    that the peer has the swarm secret
    issuer  -> peer     Issued, or Refusal

protocol diloco/<run_id>/bans, and within the mesh (mesh.py)
    any     -> any      Bans     the newest list that the sender knows; over the first protocol, the answer is Bans too

protocol diloco/<run_id>/coordinator
    peer        -> coordinator   AskRank   any number of times on one stream
    coordinator -> peer          Grant, Taken or Refusal

libp2p authenticates both ends. The proof is an HMAC with the swarm secret over both identities, the run and the nonce:
the secret is never sent, and a proof cannot be reused. Issuers announce themselves in the DHT, with tokens of their
own. A ban list is signed by the admission key, so any peer may pass it on.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.limits import (
    MAX_BANS_BYTES,
    MAX_TOKEN_BYTES,
    MAX_WORLD_RANK,
    PeerId,
    TokenBytes,
    WorldRank,
)
from peers.protocol.wire import Struct

NONCE_BYTES = PROOF_BYTES = 32
MAX_MESSAGE_BYTES = 1024
"""Of all but ban lists."""


def admission_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/admission"


def bans_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/bans"


def coordinator_protocol(run_id: str) -> str:
    return f"diloco/{run_id}/coordinator"


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


class AskRank(Struct, frozen=True, tag="rank"):
    wanted: WorldRank | None
    """None: any free rank."""
    token: TokenBytes


class Grant(Struct, frozen=True, tag="grant"):
    world_rank: WorldRank
    galaxy_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_RANK)]
    """How many peers are present or arriving, this one included."""


class Taken(Struct, frozen=True, tag="taken"):
    """The wanted rank belongs to another identity."""

    holder: PeerId
