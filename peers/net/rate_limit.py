"""How much one peer, or all peers together, may ask for: per second, and at once. Pure: time is an argument."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from peers.errors import ProtocolError


class RateLimit:
    """A token bucket: filled by `per_s` a second, up to `at_once`."""

    def __init__(self, per_s: float, at_once: float) -> None:
        self._per_s, self._at_once = per_s, at_once
        self._left, self._at = at_once, 0.0

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Take this amount if it is left; returns whether it was. `now`: seconds of a steady clock."""
        self._left = min(self._at_once, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True


class RateLimits:
    """One limit for each of many peers or addresses. Beyond `max_keys`, the least recently used one is forgotten."""

    def __init__(self, per_s: float, at_once: float, *, max_keys: int = 1024) -> None:
        self._per_s, self._at_once, self._max_keys = per_s, at_once, max_keys
        self._limits: dict[str, RateLimit] = {}

    def take(self, key: str, now: float, amount: float = 1.0) -> bool:
        """As RateLimit.take."""
        limit = self._limits.pop(key, None) or RateLimit(self._per_s, self._at_once)
        self._limits[key] = limit
        while len(self._limits) > self._max_keys:
            del self._limits[next(iter(self._limits))]
        return limit.take(now, amount)


@contextlib.contextmanager
def counted(counter: Counter[str], key: str, limit: int) -> Iterator[None]:
    """Count those inside the block, by key. Raises ProtocolError if that would be more than `limit`."""
    if counter[key] >= limit:
        raise ProtocolError(f"{limit} connections of {key} are being worked on already")
    counter[key] += 1
    try:
        yield
    finally:
        counter[key] -= 1
        if not counter[key]:
            del counter[key]
