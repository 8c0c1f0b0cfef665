"""The reduction of one attempt: the bytes that it moves, and how it ends.

The streams of all members are one activity with a single rate. Owners add the chunks of the members in order, so no
member gets ahead of the slowest by more than the buffers hold, and the shares are chosen such that all members finish
at the same time (peers/reduce/shares.py). The reduction therefore takes as long as its busiest link or CPU, including
other traffic there, and ends for all members at the same time, up to the delay of the last bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

from diloco.sim.clock import Clock, Timer
from diloco.sim.cost.links import Resource
from diloco.sim.cost.machine import Machine
from diloco.sim.cost.traffic import Activity, Traffic
from peers.protocol.certificates import Plan
from peers.protocol.rules import Rule
from peers.reduce.codecs import Codec, codec_named, result_codec_named
from peers.reduce.frames import HEADER
from peers.reduce.plan import CHUNK_NUMEL, ReducePlan
from peers.reduce.shares import reduce_plan_of

FP32_BYTES = 4


@dataclass(frozen=True)
class Volume:
    """What one member sends, receives and computes."""

    sent_bytes: int
    received_bytes: int
    reduced_bytes: float
    """CPU work in bytes of fp32 weights: the fragment's size if all shares are equal. Two thirds of it, encoding and
    decoding, do not depend on the member's share."""


@dataclass(frozen=True)
class Reduced:
    """The outcome of a reduction for one member."""

    connect_s: float
    reduce_s: float
    volume: Volume


def volumes_of(plan: ReducePlan) -> list[Volume]:
    """The volume of each member, including frame headers."""
    contributions = [_wire_bytes(plan, owner, codec_named(plan.codec)) for owner in range(len(plan.members))]
    results = [_wire_bytes(plan, owner, result_codec_named(plan.codec)) for owner in range(len(plan.members))]
    others, numel = len(plan.members) - 1, plan.bounds[-1]
    volumes = []
    for owner, (start, stop) in enumerate(pairwise(plan.bounds)):
        owned = FP32_BYTES * (stop - start) * (others + 1)
        volumes.append(
            Volume(
                sum(contributions) - contributions[owner] + others * results[owner],
                sum(results) - results[owner] + others * contributions[owner],
                (2 * FP32_BYTES * numel + owned) / 3,
            )
        )
    return volumes


def _wire_bytes(plan: ReducePlan, owner: int, codec: Codec) -> int:
    """Encoded size of an owner's share, with frame headers."""
    numel = plan.bounds[owner + 1] - plan.bounds[owner]
    whole, rest = divmod(numel, CHUNK_NUMEL)
    size = whole * codec.encoded_bytes(CHUNK_NUMEL) + (codec.encoded_bytes(rest) if rest else 0)
    return size + plan.num_chunks(owner) * HEADER.size


class Streams:
    """The peers between which streams are open. A successful reduction leaves them open, a failed one closes them."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()

    def stand_between(self, ranks: Iterable[int]) -> bool:
        return self._ranks.issuperset(ranks)

    def keep(self, ranks: Iterable[int]) -> None:
        self._ranks = set(ranks)

    def lose(self, rank: int) -> None:
        self._ranks.discard(rank)

    def close(self) -> None:
        self._ranks.clear()


@dataclass(eq=False)
class _Part:
    """The state of one member."""

    begun_at: float
    on_reduced: Callable[[Reduced], object]
    on_failed: Callable[[frozenset[int]], object]
    timer: Timer
    """Limits how long this member waits for the others to begin."""
    stall_s: float


@dataclass(eq=False)
class Reduction:
    """The reduction of one attempt. Members join by `begin`; if it fails for one member, it fails for all."""

    plan: Plan
    numel: int
    codec: str
    rule: Rule
    trim: float
    clock: Clock
    traffic: Traffic
    delay_s: Mapping[int, float]
    """One-way delay from each peer to the core of the network, by world rank."""
    machines: Mapping[int, Machine]
    window_bytes: float
    streams: Streams
    _parts: dict[int, _Part] = field(default_factory=dict)
    _activity: Activity | None = None
    _is_over: bool = False

    def begin(
        self,
        rank: int,
        on_reduced: Callable[[Reduced], object],
        on_failed: Callable[[frozenset[int]], object],
        *,
        stall_s: float,
        connect_s: float,
    ) -> None:
        timer = self.clock.after(connect_s, self._give_up_connecting)
        self._parts[rank] = _Part(self.clock.now, on_reduced, on_failed, timer, stall_s)
        if self._is_over:
            self._notify_failure(rank, frozenset(), self._worst_delay_s)
        elif len(self._parts) == len(self.ranks):
            self.clock.after(self._connect_s, self._start)

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

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The members' world ranks."""
        return tuple(contributor.world_rank for contributor in self.plan.contributors)

    @cached_property
    def _worst_delay_s(self) -> float:
        """One-way delay between the two members that are farthest apart."""
        delays = sorted(self.delay_s[rank] for rank in self.ranks)
        return sum(delays[-2:])

    @property
    def _connect_s(self) -> float:
        """Time to set up the streams. On open streams, the attempt's name travels one way. Opening a stream takes three
        round trips before: TCP, TLS 1.3 and our greeting."""
        # Streams are opened concurrently, so one new pair takes as long as all pairs.
        return self._worst_delay_s * (1 if self.streams.stand_between(self.ranks) else 7)

    def _start(self) -> None:
        if self._is_over:
            return
        for part in self._parts.values():
            part.timer.cancel()
        # Any member's view of the plan will do: shares and volumes are the same for all.
        first = self.plan.contributors[0].peer_id
        plan = reduce_plan_of(self.plan, first, self.numel, self.codec, self.rule, self.trim)
        volumes = dict(zip(self.ranks, volumes_of(plan), strict=True))
        started_at, count = self.clock.now, len(self.ranks)
        if count == 1:
            ((rank, volume),) = volumes.items()
            seconds = volume.reduced_bytes / self.machines[rank].reduce
            self.clock.after(seconds, partial(self._finish, volumes, started_at))
            return
        stream_bytes = sum(volume.sent_bytes for volume in volumes.values()) / (count * (count - 1))
        usage: dict[Resource, float] = {}
        for rank, volume in volumes.items():
            usage[rank, "up"] = volume.sent_bytes / stream_bytes
            usage[rank, "down"] = volume.received_bytes / stream_bytes
            usage[rank, "processors"] = volume.reduced_bytes / stream_bytes
        # The last contributions have to arrive before the last sums leave.
        last_s = 2 * self._worst_delay_s
        self._activity = Activity(
            usage,
            stream_bytes,
            lambda: self.clock.after(last_s, partial(self._finish, volumes, started_at)),
            most=self.window_bytes / max(2 * self._worst_delay_s, 1e-9),
        )
        self.traffic.start(self._activity)

    def _finish(self, volumes: Mapping[int, Volume], started_at: float) -> None:
        if self._is_over:
            return
        self._is_over, parts = True, dict(self._parts)
        self.streams.keep(self.ranks)
        for rank, part in parts.items():
            reduced = Reduced(started_at - part.begun_at, self.clock.now - started_at, volumes[rank])
            part.on_reduced(reduced)

    def _give_up_connecting(self) -> None:
        self._fail(frozenset(self.ranks) - self._parts.keys(), 0.0)

    def _fail(self, suspects: frozenset[int], notice_s: float) -> None:
        """Fail for all members, who notice it after `notice_s`."""
        if self._is_over:
            return
        self._is_over = True
        self.streams.close()
        if self._activity is not None:
            self.traffic.stop(self._activity)
        for rank in self._parts:
            self._notify_failure(rank, suspects, notice_s)

    def _notify_failure(self, rank: int, suspects: frozenset[int], notice_s: float) -> None:
        part = self._parts[rank]
        part.timer.cancel()
        self.clock.after(notice_s, lambda: part.on_failed(suspects))
