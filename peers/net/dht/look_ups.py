"""Bounds what one look-up in the DHT asks.

Kademlia goes on asking whoever is nearer to the key than those that have answered. That ends only if all nodes are
honest: a node could name itself, or other nodes of its owner, under ever nearer DHT ids.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode


class _LookUp:
    """Whom one look-up has asked, and until when it asks further nodes."""

    def __init__(self, until: float) -> None:
        self._until = until
        self._asked: set[Any] = set()

    def may_ask(self, peer: Any) -> bool:
        if peer in self._asked or time.monotonic() > self._until:
            return False
        self._asked.add(peer)
        return True


# Hivemind's tasks of a look-up inherit it, also those that outlive their caller.
_current: ContextVar[_LookUp | None] = ContextVar("look_up", default=None)


@contextlib.contextmanager
def look_up(asking_s: float) -> Iterator[None]:
    """The one look-up that is begun within this context asks further nodes for this long, then ends with what it has
    found."""
    token = _current.set(_LookUp(time.monotonic() + asking_s))
    try:
        yield
    finally:
        _current.reset(token)


def bound_look_ups(node: DHTNode) -> None:
    """From now on, a look-up of this node asks each peer once, under whatever DHT ids others name it."""
    find = node._call_find_with_blacklist

    async def call_find(peer: Any, keys: Collection[Any]) -> Any:
        current = _current.get()
        # Not an answer, but no failure of the peer either: another node may have named it twice.
        return await find(peer, keys) if current is None or current.may_ask(peer) else None

    node._call_find_with_blacklist = call_find
