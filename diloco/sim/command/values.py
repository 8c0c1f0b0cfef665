"""Parses quantities with units: 500mbit, 80ms, 10B, 312T."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from diloco.options.checks import quantity

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
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}


def bits_per_s(text: str) -> float:
    """Parse a bandwidth: 500mbit, 1gbit, 2.5Gbit/s, 1e9bit. Raises ValueError."""
    return quantity(
        text.lower().replace("/s", "").replace("bits", "bit"), _BITS, "a bandwidth like 500mbit or 1.5gbit"
    )


def seconds(text: str) -> float:
    """Parse a time: 80ms, 0.08s. Raises ValueError."""
    return quantity(text.lower(), _SECONDS, "a time like 80ms or 0.08s")


def count(text: str) -> float:
    """Parse a number: 10e9, 10B, 150m; 989T for FLOP/s. Raises ValueError."""
    return quantity(text.lower(), _COUNTS, "a number like 10e9, 10B or 312T")


def one(parse: Callable[[str], float]) -> Callable[[Any, Sequence[Token]], float]:
    """A converter for a flag with one value."""

    def convert(_type: Any, tokens: Sequence[Token]) -> float:
        return parse(tokens[-1].value)

    return convert
