"""What the members of an attempt have agreed on before they reduce (ReducePlan), and what each knows afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from peers.errors import ProtocolError
from peers.protocol.aggregation import DEFAULT_TRIM, Rule, holds_all
from peers.reduce.codecs import codec_named, result_codec_named
from peers.reduce.grid import Grid, grid_of
from peers.reduce.robust_sums import norm_bound

CHUNK_NUMEL = 1 << 18
"""Values per chunk, and per frame: 1 MiB in fp32.

Every frame costs some ten microseconds of the interpreter at both ends. Longer frames, on the other hand, are added
later, are less often still in a core's cache, and need more memory for all threads. At twice the length, plain fp32
within one machine took 2 to 8 % more time, int8 the same or 2 % less.
"""

ATTEMPT_BYTES = 16


class Chunk(NamedTuple):
    owner: int
    """Index of the member whose share it is in."""
    number: int
    """Within the share."""


@dataclass(frozen=True)
class ReducePlan:
    """The same on all members but for `me`. Derived from the leader's plan after that was checked."""

    attempt: bytes
    members: tuple[int, ...]
    """World ranks, in the order of accumulation."""
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
    num_columns: int = 0
    """Of the grid in which the members stand (grid.py); 0: as many as members, so that all exchange with all."""

    def __post_init__(self) -> None:
        assert len(self.attempt) == ATTEMPT_BYTES
        # Ranks of a roster that was fetched are checked nowhere else.
        if len(set(self.members)) != len(self.members):
            raise ProtocolError(f"two members have one world rank: {self.members}")

    @cached_property
    def grid(self) -> Grid:
        return grid_of(len(self.members), self.num_columns or len(self.members))

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """The members whose contributions this peer collects, besides its own."""
        return self.grid.sources(self.me)

    @cached_property
    def mates(self) -> tuple[int, ...]:
        """The other members of this peer's column, which send it sums; none if all exchange with all."""
        return self.grid.mates(self.me)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """The members with which this peer exchanges values."""
        return self.grid.neighbours(self.me)

    @cached_property
    def piece(self) -> slice:
        """The place of the shares of this peer's column: it sums its sources' contributions to them."""
        column = self.grid.column(self.me)
        return slice(self.bounds[column.start], self.bounds[column.stop])

    @property
    def share(self) -> slice:
        """The place of this peer's own share."""
        return slice(self.bounds[self.me], self.bounds[self.me + 1])

    def chunks(self, owners: Iterable[int]) -> list[Chunk]:
        """The chunks of these owners' shares in the order in which they are sent: in turn one of each share."""
        every = (Chunk(owner, number) for owner in owners for number in range(self.num_chunks(owner)))
        return sorted(every, key=lambda chunk: (chunk.number, chunk.owner))

    def contributions(self, sender: int, receiver: int) -> list[Chunk]:
        """The chunks of which the sender sends the receiver its contribution, or, within a column, its sum."""
        if self.grid.are_mates(sender, receiver):
            return self.chunks([receiver])
        column = self.grid.column(receiver)
        return self.chunks(column) if self.grid.collector(sender, column) == receiver else []

    def results(self, sender: int, receiver: int) -> list[Chunk]:
        """The chunks of which the sender sends the receiver the average."""
        if self.grid.are_mates(sender, receiver):
            return self.chunks([sender])
        column = self.grid.column(sender)
        return self.chunks(column) if self.grid.collector(receiver, column) == sender else []

    def num_chunks(self, owner: int) -> int:
        return -(-(self.bounds[owner + 1] - self.bounds[owner]) // CHUNK_NUMEL)

    def place(self, chunk: Chunk) -> slice:
        """The place of this chunk in the whole vector."""
        start = self.bounds[chunk.owner] + chunk.number * CHUNK_NUMEL
        return slice(start, min(start + CHUNK_NUMEL, self.bounds[chunk.owner + 1]))

    def contribution_bound(self, member: int) -> float:
        """The largest energy (sum of squares) that this member's decoded contribution to one piece may have."""
        return codec_named(self.codec).energy_bound(self.norms[member], self.bounds[-1])

    def average_bound(self) -> float:
        """The largest L2 norm that the average may have: at worst, weighted norms add up."""
        count = len(self.members)
        if holds_all(self.rule, count):
            norms = [math.sqrt(self.contribution_bound(index)) for index in range(count)]
            return norm_bound(self.rule, self.trim, norms)
        return self._norm_of_sum(range(count))

    def result_residual_bound(self) -> float:
        """The largest L2 norm of the residual that an owner may add to its share of the average."""
        return result_codec_named(self.codec).residual_reach * self.average_bound()

    def sum_residual_bound(self, collector: int) -> float:
        """The largest L2 norm of the residual that a collector may add to the sums that it sends one mate."""
        return result_codec_named(self.codec).residual_reach * self._norm_of_collected(collector)

    def sum_bound(self, collector: int) -> float:
        """The largest energy of the decoded sums that a collector sends one mate."""
        return self._result_energy_bound(
            self._norm_of_collected(collector) + self.sum_residual_bound(collector)
        )

    def result_bound(self, owner: int) -> float:
        """The largest energy that the decoded result of this owner's share may have."""
        norm = self.average_bound()
        if mates := self.grid.mates(owner):
            norm = self._norm_of_collected(owner) + sum(math.sqrt(self.sum_bound(mate)) for mate in mates)
        return self._result_energy_bound(norm + self.result_residual_bound())

    def _norm_of_collected(self, collector: int) -> float:
        return self._norm_of_sum((collector, *self.grid.sources(collector)))

    def _norm_of_sum(self, members: Iterable[int]) -> float:
        return sum(self._weighted_norms[index] for index in members)

    @cached_property
    def _weighted_norms(self) -> tuple[float, ...]:
        return tuple(
            weight * math.sqrt(self.contribution_bound(index)) for index, weight in enumerate(self.weights)
        )

    def _result_energy_bound(self, norm: float) -> float:
        return result_codec_named(self.codec).energy_bound(norm, self.bounds[-1])


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
