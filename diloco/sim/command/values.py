"""Parses quantities with units: 500mbit, 80ms, 10B, 312T."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import Token

_BITS = {
    "bit": 1.0,
    "kbit": 1e3,
    "mbit": 1e6,
    "gbit": 1e9,
    "tbit": 1e12,
    "kbps": 1e3,
    "mbps": 1e6,
    "gbps": 1e9,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LONG_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}


def bits_per_s(text: str) -> float:
    """Parse a bandwidth: 500mbit, 1gbit, 2.5Gbit/s, 1e9bit. Raises ValueError."""
    return _quantity(
        text.lower().replace("/s", "").replace("bits", "bit"), _BITS, "a bandwidth like 500mbit or 1.5gbit"
    )


def seconds(text: str) -> float:
    """Parse a time: 80ms, 0.08s. Raises ValueError."""
    return _quantity(text.lower(), _SECONDS, "a time like 80ms or 0.08s")


def long_seconds(text: str) -> float:
    """Parse a long time: 300s, 10m, 6h, 2d. Raises ValueError."""
    return _quantity(text.lower(), _LONG_SECONDS, "a time like 300s, 10m or 6h")


def count(text: str) -> float:
    """Parse a number: 10e9, 10B, 150m; 989T for FLOP/s. Raises ValueError."""
    return _quantity(text.lower(), _COUNTS, "a number like 10e9, 10B or 312T")


def one(parse: Callable[[str], float]) -> Callable[[Any, Sequence[Token]], float]:
    """A converter for a flag with one value."""

    def convert(_type: Any, tokens: Sequence[Token]) -> float:
        return parse(tokens[-1].value)

    return convert


def several(parse: Callable[[str], float]) -> Callable[[Any, Sequence[Token]], tuple[float, ...]]:
    """A converter for a flag with several values, separated by commas or spaces."""

    def convert(_type: Any, tokens: Sequence[Token]) -> tuple[float, ...]:
        words = [text for token in tokens for text in re.split(r"[,\s]+", token.value) if text]
        if not words:
            raise ValueError("It has no value.")
        return tuple(parse(word) for word in words)

    return convert


def _quantity(text: str, units: Mapping[str, float], what: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text)
    value = float(match[1]) * units[match[2]] if match and match[2] in units else math.nan
    if not (math.isfinite(value) and value > 0):
        too_small = ", or not above 0" if math.isfinite(value) else ""
        raise ValueError(f'"{text}" is not {what}{too_small}.')
    return value
