"""Values out of a message, each checked before it is believed. All raise ProtocolError."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from peers.errors import ProtocolError
from peers.protocol.limits import MAX_WORLD_RANK

_MAX_COUNT = 1 << 62
_MAX_REAL = 1e18


def count(value: Any, most: int = _MAX_COUNT) -> int:
    """A whole number from 0 on."""
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"not a count up to {most}: {value!r:.80}")
    return value


def rank(value: Any) -> int:
    """A world rank."""
    return count(value, MAX_WORLD_RANK - 1)


def real(value: Any) -> float:
    """A finite number, of either sign."""
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _MAX_REAL:
        raise ProtocolError(f"not a finite number: {value!r:.80}")
    return float(value)


def amount(value: Any) -> float:
    """A finite number from 0 on."""
    if real(value) < 0:
        raise ProtocolError(f"a negative amount: {value!r:.80}")
    return float(value)


def text(value: Any, most: int) -> str:
    """So many printable characters at most: no control characters, which a terminal would obey."""
    if type(value) is not str or len(value) > most or not value.isprintable():
        raise ProtocolError(f"not a text of at most {most} printable characters: {value!r:.80}")
    return value


def items(value: Any, most: int, *, width: int | None = None) -> list[Any]:
    """A list of at most so many; with `width`, of lists of that length."""
    if not isinstance(value, list) or len(value) > most:
        raise ProtocolError(f"not a list of at most {most}: {value!r:.80}")
    if width is not None and not all(isinstance(item, list) and len(item) == width for item in value):
        raise ProtocolError(f"not a list of lists of {width}: {value!r:.80}")
    return value


def fields(value: Any) -> Mapping[str, Any]:
    """A map with text keys, which may hold more than the reader knows of."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ProtocolError(f"not a map of named fields: {value!r:.80}")
    return value
