"""The layout: the place of every parameter in the flat fp32 fragments that peers average.

The worker derives it from its model; the daemon and the other peers only compare it and address values by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from peers.errors import ProtocolError


@dataclass(frozen=True)
class ParameterSlot:
    """One parameter: `numel` consecutive floats from `offset` on, in row-major order of `shape`."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """`fragments[f]` lists the parameters of fragment f in order, without gaps."""

    fragments: tuple[tuple[ParameterSlot, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of floats in each fragment."""
        return tuple(sum(slot.numel for slot in fragment) for fragment in self.fragments)

    @cached_property
    def digest(self) -> str:
        """Hex sha256 over names, shapes and offsets; equal on all peers of a run."""
        lines = (
            f"{index} {slot.name} {slot.shape} {slot.offset}"
            for index, fragment in enumerate(self.fragments)
            for slot in fragment
        )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def to_message(self) -> dict[str, Any]:
        return {
            "fragments": [
                [[slot.name, list(slot.shape), slot.offset] for slot in fragment]
                for fragment in self.fragments
            ]
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Layout:
        """Raises ProtocolError unless every fragment is a gapless list of valid slots."""
        try:
            fragments = tuple(
                tuple(ParameterSlot(str(n), tuple(int(d) for d in s), int(o)) for n, s, o in fragment)
                for fragment in message["fragments"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not a layout: {error!r}") from error
        for fragment in fragments:
            end = 0
            for slot in fragment:
                if slot.offset != end or any(d < 0 for d in slot.shape):
                    raise ProtocolError(f"layout has a gap or a negative size at {slot.name}")
                end += slot.numel
        return cls(fragments)
