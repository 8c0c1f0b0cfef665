"""The layout: the place of every parameter in the flat fp32 fragments that peers average.

The worker derives it from its model; the daemon and the other peers only compare it and address values by it.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from math import prod

import msgspec

from peers.errors import ProtocolError
from peers.protocol.limits import Count


class ParameterSlot(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: `numel` consecutive floats from `offset` on, in row-major order of `shape`."""

    name: str
    shape: tuple[Count, ...]
    offset: Count

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Layout(msgspec.Struct, frozen=True, dict=True):
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

    @classmethod
    def from_message(cls, message: object) -> Layout:
        """Raises ProtocolError unless every fragment is a gapless list of valid slots."""
        try:
            layout = msgspec.convert(message, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"not a layout: {error}") from error
        for fragment in layout.fragments:
            end = 0
            for slot in fragment:
                if slot.offset != end:
                    raise ProtocolError(f"layout has a gap at {slot.name}")
                end += slot.numel
        return layout
