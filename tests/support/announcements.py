"""A valid announcement, in which tests change the fields that they are about."""

from __future__ import annotations

import time
from typing import Any

from peers.protocol.messages import Status
from peers.protocol.records import Announcement, Lost, Spoken


def announced(peer_id: str, **fields: Any) -> Announcement:
    """The announcement, made now, of a peer that trains and has not committed anything."""
    usual: dict[str, Any] = {
        "run_id": "run",
        "world_rank": 1,
        "incarnation": 1,
        "state": "training",
        "epoch": 0,
        "head": "",
        "step": 0,
        "local_step": 0,
        "committed_tokens": 0,
        "tokens_per_s": 0.0,
        "anchor_digest": "",
        "manifest_digest": "",
        "maddrs": (),
        "time": time.time(),
    }
    return Announcement(**{**usual, "peer_id": peer_id, **fields})


def spoken(
    peer_id: str, status: Status | None = None, number: int = 0, lost: tuple[Lost, ...] = (), **fields: Any
) -> Spoken:
    """The same announcement as it is sent over the mesh."""
    return Spoken.of(announced(peer_id, **fields), status, number, lost)
