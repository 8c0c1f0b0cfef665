"""What the members of an attempt have agreed on before they reduce (ReducePlan), and what each knows afterwards."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from peers.errors import ProtocolError
from peers.protocol.aggregation import DEFAULT_TRIM, Rule, holds_all
from peers.reduce.codecs import codec_named, result_codec_named
from peers.reduce.robust_sums import norm_bound

CHUNK_NUMEL = 1 << 18
"""Values per chunk, and per frame: 1 MiB in fp32.

Every frame costs some ten microseconds of the interpreter at both ends. Longer frames, on the other hand, are added
later, are less often still in a core's cache, and need more memory for all threads. At twice the length, plain fp32
within one machine took 2 to 8 % more time, int8 the same or 2 % less.
"""

ATTEMPT_BYTES = 16


@dataclass(frozen=True)
class ReducePlan:
    """The same on all members but for `me`. Derived from the leader's plan, so it is checked like any message."""

    attempt: bytes
    members: tuple[int, ...]
    """World ranks, ascending; also the order of accumulation."""
    me: int
    """Index of this peer in `members`."""
    weights: tuple[float, ...]
    """The factor of each member's contribution: normalised weight times clipping scale."""
    norms: tuple[float, ...]
    """The L2 norm that each member announced for its whole contribution."""
    bounds: tuple[int, ...]
    """Member i owns the values [bounds[i], bounds[i + 1])."""
    codec: str
    rule: Rule = "clip"
    """How the members' values are combined."""
    trim: float = DEFAULT_TRIM
    """Under trimmed-mean, the share of the members that is left out at either end."""

    def __post_init__(self) -> None:
        count = len(self.members)
        reals = (*self.weights, *self.norms)
        if len(self.attempt) != ATTEMPT_BYTES:
            raise ProtocolError(f"an attempt id has {ATTEMPT_BYTES} bytes, not {len(self.attempt)}")
        if not count or list(self.members) != sorted(set(self.members)) or not 0 <= self.me < count:
            raise ProtocolError(f"not a group in order of world rank: {self.members}, this peer at {self.me}")
        if (len(self.weights), len(self.norms), len(self.bounds)) != (count, count, count + 1):
            raise ProtocolError(f"weights, norms or bounds do not fit {count} members")
        if not all(math.isfinite(real) and real >= 0 for real in reals):
            raise ProtocolError(f"weights and norms must be finite and not negative: {reals}")
        if self.bounds[0] != 0 or list(self.bounds) != sorted(self.bounds):
            raise ProtocolError(f"bounds must ascend from 0: {self.bounds}")
        try:
            codec_named(self.codec)
        except ValueError as error:
            raise ProtocolError(str(error)) from error

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Indices of the other members."""
        return tuple(index for index in range(len(self.members)) if index != self.me)

    def num_chunks(self, owner: int) -> int:
        return -(-(self.bounds[owner + 1] - self.bounds[owner]) // CHUNK_NUMEL)

    def chunk(self, owner: int, index: int) -> slice:
        """The place of chunk `index` of this owner's share in the whole vector."""
        start = self.bounds[owner] + index * CHUNK_NUMEL
        return slice(start, min(start + CHUNK_NUMEL, self.bounds[owner + 1]))

    def chunk_size(self, owner: int, index: int) -> int:
        """How many values a chunk has."""
        chunk = self.chunk(owner, index)
        return chunk.stop - chunk.start

    def contribution_bound(self, member: int) -> float:
        """The largest energy (sum of squares) that this member's decoded contribution to one share may have."""
        return codec_named(self.codec).energy_bound(self.norms[member], self.bounds[-1])

    def average_bound(self) -> float:
        """The largest L2 norm that the average may have: at worst, weighted norms add up."""
        norms = [math.sqrt(self.contribution_bound(index)) for index in range(len(self.members))]
        if holds_all(self.rule, len(self.members)):
            return norm_bound(self.rule, self.trim, norms)
        return sum(weight * norm for weight, norm in zip(self.weights, norms, strict=True))

    def result_residual_bound(self) -> float:
        """The largest L2 norm of the residual that an owner may add to its share of the average."""
        return result_codec_named(self.codec).residual_reach * self.average_bound()

    def result_bound(self) -> float:
        """The largest energy that the decoded result of one share may have."""
        norm = self.average_bound() + self.result_residual_bound()
        return result_codec_named(self.codec).energy_bound(norm, self.bounds[-1])

    def weights_fp32(self) -> tuple[float, ...]:
        """The weights as every member applies them: rounded to fp32 once, here."""
        return struct.unpack(f"{len(self.weights)}f", struct.pack(f"{len(self.weights)}f", *self.weights))


@dataclass(frozen=True)
class ReduceReport:
    """Bytes count contributions and results with their headers."""

    sent_bytes: int
    received_bytes: int
    bandwidth: float = 0.0
    """Peak bytes/s of this peer's link, the lower of both directions; 0: too short to tell."""


def equal_bounds(numel: int, num_members: int) -> tuple[int, ...]:
    """Shares of equal size, to within one value."""
    return tuple(numel * index // num_members for index in range(num_members + 1))


def slices(numel: int) -> Iterator[slice]:
    """Consecutive chunks of a vector of this length."""
    for start in range(0, numel, CHUNK_NUMEL):
        yield slice(start, min(start + CHUNK_NUMEL, numel))
