"""Which peers keep channels with each other, and who passes on what to whom. Pure.

Among few peers, each keeps a channel with every other. Among more, they form a ring in the order of hash(peer id), and
each keeps channels with the peers 1, 2, 4, 8 … places before and after it, as in Chord (Stoica et al., 2001): 2 log2 N
channels each. An announcement spreads over them along two binomial trees, one for each half of the ring: it reaches
every peer once, in log2 N hops at most. Every peer can compute this for any peer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache

from peers.timing import FULL_MESH


def is_full_mesh(num_peers: int) -> bool:
    return num_peers <= FULL_MESH


class Ring:
    """All peers that one of them knows. Those that know the same peers compute the same channels and trees."""

    def __init__(self, peer_ids: Collection[str]) -> None:
        self._ordered = sorted(frozenset(peer_ids), key=place_of)
        self._index = {peer_id: index for index, peer_id in enumerate(self._ordered)}

    def with_(self, peer_ids: Collection[str]) -> Ring:
        """The ring with these peers added."""
        return self if self._index.keys() >= set(peer_ids) else Ring({*self._ordered, *peer_ids})

    def neighbours_of(self, peer_id: str) -> frozenset[str]:
        """The peers with which this one keeps channels."""
        count, here = len(self._ordered), self._index[peer_id]
        if is_full_mesh(count):
            return frozenset(self._ordered) - {peer_id}
        steps = [1 << power for power in range((count // 2).bit_length())]
        found = (self._ordered[(here + step) % count] for size in steps for step in (size, -size))
        return frozenset(found) - {peer_id}

    def told_by(self, peer_id: str, origin: str) -> frozenset[str]:
        """The peers to which this one passes on announcements of `origin`, which itself sends them to its neighbours.

        A peer d places from `origin`, on the nearer side, hears them from the peer at d without d's lowest bit.
        """
        count, here = len(self._ordered), self._index[peer_id]
        after = (here - self._index[origin]) % count
        far, side, last = (after, 1, count // 2)
        if far > last:
            far, side, last = count - after, -1, (count - 1) // 2
        steps = [1 << power for power in range((far & -far).bit_length() - 1)]
        return frozenset(self._ordered[(here + side * step) % count] for step in steps if far + step <= last)


@lru_cache(maxsize=1 << 14)
def place_of(peer_id: str) -> bytes:
    return hashlib.sha256(peer_id.encode()).digest()
