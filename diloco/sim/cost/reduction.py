"""The reduction of one attempt: the bytes that it moves, and how it ends.

The streams of all members are one activity with a single rate. Owners add the chunks of the members in order, so no
member gets ahead of the slowest by more than the buffers hold, and the shares are chosen such that all members finish
at the same time (peers/reduce/shares.py). The reduction therefore takes as long as its busiest link or CPU, including
other traffic there, and ends for all members at the same time, up to the delay of the last bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from diloco.sim.clock import Timer
from diloco.sim.cost.links import Resource
from diloco.sim.cost.scenario import FP32_BYTES
from diloco.sim.cost.traffic import Activity
from peers.protocol.certificates import Plan
from peers.reduce.codecs import codec_named, result_codec_named
from peers.reduce.codecs_common import Codec
from peers.reduce.frames import HEADER
from peers.reduce.plan import CHUNK_NUMEL, ReducePlan
from peers.reduce.shares import reduce_plan_of

if TYPE_CHECKING:
    from diloco.sim.cost.peer import CostPeer
    from diloco.sim.cost.swarm import CostSwarm


@dataclass(frozen=True)
class Volume:
    """What one member sends, receives and computes."""

    sent_bytes: int
    received_bytes: int
    reduced_bytes: float
    """CPU work in bytes of fp32 weights: the fragment's size if all shares are equal. Two thirds of it, encoding and
    decoding, do not depend on the member's share. The additional coding in a grid, of sums and of results passed on, is
    left out."""


def volumes_of(plan: ReducePlan) -> list[Volume]:
    """The volume of each member, including frame headers."""
    grid, members = plan.grid, range(len(plan.members))
    contributions = [_wire_bytes(plan, owner, codec_named(plan.codec)) for owner in members]
    results = [_wire_bytes(plan, owner, result_codec_named(plan.codec)) for owner in members]
    sent, received, added = [0] * len(members), [0] * len(members), [0] * len(members)
    for column in grid.columns:
        to, back = sum(contributions[column.start : column.stop]), sum(results[column.start : column.stop])
        piece = plan.bounds[column.stop] - plan.bounds[column.start]
        for member in members:
            collector = grid.collector(member, column)
            added[collector] += piece
            if member not in column:
                sent[member], received[collector] = sent[member] + to, received[collector] + to
                sent[collector], received[member] = sent[collector] + back, received[member] + back
        for member in column:
            # The sums that the members of a column exchange are encoded like results.
            num_mates, own = len(column) - 1, results[member]
            sent[member] += (back - own) + num_mates * own
            received[member] += (back - own) + num_mates * own
            added[member] += num_mates * (plan.bounds[member + 1] - plan.bounds[member])
    whole = 2 * FP32_BYTES * plan.bounds[-1]
    return [
        Volume(sent[member], received[member], (whole + FP32_BYTES * added[member]) / 3) for member in members
    ]


def _wire_bytes(plan: ReducePlan, owner: int, codec: Codec) -> int:
    """Encoded size of an owner's share, with frame headers."""
    numel = plan.bounds[owner + 1] - plan.bounds[owner]
    whole, rest = divmod(numel, CHUNK_NUMEL)
    size = whole * codec.encoded_bytes(CHUNK_NUMEL) + (codec.encoded_bytes(rest) if rest else 0)
    return size + plan.num_chunks(owner) * HEADER.size


@dataclass(eq=False)
class _Part:
    """The state of one member."""

    peer: CostPeer
    begun_at: float
    timer: Timer
    """Limits how long this member waits for the others to begin."""
    stall_s: float


class Reduction:
    """The reduction of one attempt. Members join by `begin` and learn the outcome by `reduced` or `reduce_failed`; if
    it fails for one member, it fails for all."""

    def __init__(self, swarm: CostSwarm, plan: Plan) -> None:
        self.plan = plan
        self.ranks = tuple(contributor.world_rank for contributor in plan.contributors)
        """The members' world ranks."""
        self._swarm, self._clock = swarm, swarm.clock
        delays = sorted(swarm.scenario.peers[rank].link.delay_s for rank in self.ranks)
        self._worst_delay_s = sum(delays[-2:])
        """One-way delay between the two members that are farthest apart."""
        self._parts: dict[int, _Part] = {}
        self._activity: Activity | None = None
        self._is_over = False

    def begin(self, peer: CostPeer, *, stall_s: float, connect_s: float) -> None:
        timer = self._clock.after(connect_s, self._give_up_connecting)
        self._parts[peer.rank] = _Part(peer, self._clock.now, timer, stall_s)
        if self._is_over:
            self._notify_failure(self._parts[peer.rank], frozenset(), self._worst_delay_s)
        elif len(self._parts) == len(self.ranks):
            # On open streams, the attempt's name travels one way. Opening a stream takes three round trips before: TCP,
            # TLS 1.3 and our greeting. Streams are opened concurrently, so one new pair takes as long as all pairs.
            is_open = self._swarm.open_streams.issuperset(self.ranks)
            self._clock.after(self._worst_delay_s * (1 if is_open else 7), self._start)

    def leave(self, rank: int) -> None:
        """A member leaves because it was told to, so it is no suspect."""
        if self._parts.pop(rank, None) is not None:
            self._fail(frozenset(), self._worst_delay_s)

    def lose(self, rank: int) -> None:
        """A member is lost: the others notice after their stall timeout and suspect it."""
        if self._parts.pop(rank, None) is not None:
            self._fail(frozenset({rank}), min((part.stall_s for part in self._parts.values()), default=0.0))

    def time_out(self) -> None:
        """The time limit of the attempt is over."""
        self._fail(frozenset(), 0.0)

    def _start(self) -> None:
        if self._is_over:
            return
        for part in self._parts.values():
            part.timer.cancel()
        # Any member's view of the plan will do: shares and volumes are the same for all.
        scenario, aggregation = self._swarm.scenario, self._swarm.settings.aggregation
        plan = reduce_plan_of(
            self.plan,
            self.plan.contributors[0].peer_id,
            scenario.fragment_sizes[self.plan.fragment],
            scenario.codec,
            aggregation.rule,
            aggregation.trim,
        )
        volumes = dict(zip(plan.members, volumes_of(plan), strict=True))
        finish = partial(self._finish, volumes, self._clock.now)
        count = len(self.ranks)
        if count == 1:
            ((rank, volume),) = volumes.items()
            self._clock.after(volume.reduced_bytes / scenario.peers[rank].machine.reduce, finish)
            return
        num_streams = sum(len(plan.grid.neighbours(member)) for member in range(count))
        stream_bytes = sum(volume.sent_bytes for volume in volumes.values()) / num_streams
        usage: dict[Resource, float] = {}
        for rank, volume in volumes.items():
            usage[rank, "up"] = volume.sent_bytes / stream_bytes
            usage[rank, "down"] = volume.received_bytes / stream_bytes
            usage[rank, "processors"] = volume.reduced_bytes / stream_bytes
        # The last contributions have to arrive before the last results leave; in a grid both take two hops.
        round_trip_s = 2 * self._worst_delay_s
        last_s = round_trip_s * (1 if len(plan.grid.columns) == count else 2)
        self._activity = Activity(
            usage,
            stream_bytes,
            lambda: self._clock.after(last_s, finish),
            most=scenario.window_bytes / max(round_trip_s, 1e-9),
        )
        self._swarm.traffic.start(self._activity)

    def _finish(self, volumes: Mapping[int, Volume], started_at: float) -> None:
        if self._is_over:
            return
        self._is_over, parts = True, dict(self._parts)
        self._swarm.open_streams = set(self.ranks)
        reduce_s = self._clock.now - started_at
        for rank, part in parts.items():
            part.peer.reduced(self, started_at - part.begun_at, reduce_s, volumes[rank].sent_bytes)

    def _give_up_connecting(self) -> None:
        self._fail(frozenset(self.ranks) - self._parts.keys(), 0.0)

    def _fail(self, suspects: frozenset[int], notice_s: float) -> None:
        """Fail for all members, who notice it after `notice_s`."""
        if self._is_over:
            return
        self._is_over = True
        self._swarm.open_streams.clear()
        if self._activity is not None:
            self._swarm.traffic.stop(self._activity)
        for part in self._parts.values():
            self._notify_failure(part, suspects, notice_s)

    def _notify_failure(self, part: _Part, suspects: frozenset[int], notice_s: float) -> None:
        part.timer.cancel()
        self._clock.after(notice_s, lambda: part.peer.reduce_failed(self, suspects))
