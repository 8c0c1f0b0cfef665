"""Who keeps a channel with whom. Pure.

Among few, everybody with everybody. Among more, peers stand on a ring in the order of hash(peer id), and each keeps
channels with those 1, 2, 4, 8 … places before and after it, as in Chord (Stoica et al., 2001): 2 log2 N channels each,
and what one of them says is log2(N) / 2 hops from everybody. Every peer works this out for itself, for any peer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache

FULL_MESH = 32
"""Up to so many peers everybody has a channel with everybody, and news need no second hop."""


def is_full_mesh(num_peers: int) -> bool:
    return num_peers <= FULL_MESH


def neighbours_of(peer_id: str, peer_ids: Collection[str]) -> frozenset[str]:
    """With whom this peer keeps channels, if these are all there are; itself may be among them."""
    others = frozenset(peer_ids) - {peer_id}
    if is_full_mesh(len(others) + 1):
        return others
    ring = sorted((*others, peer_id), key=_place)
    here, count = ring.index(peer_id), len(ring)
    steps = [1 << power for power in range((count // 2).bit_length())]
    return frozenset(ring[(here + step) % count] for size in steps for step in (size, -size)) - {peer_id}


@lru_cache(maxsize=1 << 14)
def _place(peer_id: str) -> bytes:
    return hashlib.sha256(peer_id.encode()).digest()
