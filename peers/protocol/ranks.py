"""How a peer asks the coordinator of its run for a world rank (protocol diloco/<run_id>/coordinator).

peer        -> coordinator   AskRank   any number of times on one stream
coordinator -> peer          Grant, Taken or Refusal
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from peers.protocol.limits import MAX_WORLD_RANK, PeerId, TokenBytes, WorldRank
from peers.protocol.wire import Struct


class AskRank(Struct, frozen=True, tag="rank"):
    wanted: WorldRank | None
    """None: any free rank."""
    token: TokenBytes


class Grant(Struct, frozen=True, tag="grant"):
    world_rank: WorldRank
    galaxy_size: Annotated[int, Meta(ge=1, le=MAX_WORLD_RANK)]
    """How many peers the ledger knows, this one included."""


class Taken(Struct, frozen=True, tag="taken"):
    """The wanted rank belongs to another identity."""

    holder: PeerId
