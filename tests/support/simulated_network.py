"""Simulated time and channels for a swarm of pure parts: what the mesh is to real daemons, with faults on demand.

A channel stands between two lives. It delivers in order after a random delay, and breaks, at each end at a time of its
own, when a life ends or the link is cut; what is under way then is lost. One that is asked to may also lose, double or
reorder messages, which no TCP connection does.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

DELAY_S = (0.001, 0.2)
NOTICE_S = (0.0, 0.5)
"""How long each end takes to see that a channel has broken."""
REDIAL_S = (0.1, 3.0)

Pair = frozenset[int]


class End(Protocol):
    """What owns one end of channels."""

    rank: int

    @property
    def is_running(self) -> bool: ...

    @property
    def is_answering(self) -> bool:
        """It runs, and is not frozen."""

    def status_message(self) -> Any: ...

    def connected(self, other: int, status: Any) -> None: ...

    def disconnected(self, other: int) -> None: ...

    def received(self, sender: int, message: Any) -> None: ...


@dataclass(eq=False)
class SimulatedChannel:
    ends: dict[int, End]
    is_whole: bool = True
    free_at: dict[int, float] = field(default_factory=dict)


class SimulatedNetwork:
    """Also the clock. `now` is in seconds."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.ends: dict[int, End] = {}
        self.cut: set[Pair] = set()
        self.losing: Counter[tuple[int, int]] = Counter()
        """So many of the next messages from one rank to another are lost."""
        self.doubling: Counter[tuple[int, int]] = Counter()
        self.reordering: Counter[tuple[int, int]] = Counter()
        self.on_send: Callable[[int, int, Any], bool] = lambda sender, to, message: True
        """Called before each message leaves; whether it still does."""
        self.on_cut: Callable[[Pair], None] = lambda pair: None
        self.troubled_at: dict[Pair, float] = {}
        """When two ranks last had trouble to talk."""
        self._channels: dict[Pair, SimulatedChannel] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    # Time

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def between(self, bounds: tuple[float, float]) -> float:
        return self.random.uniform(*bounds)

    def run_until(self, when: float) -> None:
        while self._events and self._events[0][0] <= when:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = when

    # Links

    def can_talk(self, one: int, other: int) -> bool:
        ends = self.ends
        return (
            frozenset((one, other)) not in self.cut
            and one in ends
            and other in ends
            and ends[one].is_running
            and ends[other].is_running
        )

    def add(self, end: End) -> None:
        """A new life of its rank (the old one is dead already), or one that calls the others again."""
        self.ends[end.rank] = end
        for other in self.ends:
            if other != end.rank:
                self._dial(frozenset((end.rank, other)))

    def remove(self, rank: int) -> None:
        """This life has ended."""
        self.hang_up(rank)

    def hang_up(self, rank: int) -> None:
        """All its channels break."""
        for pair in [pair for pair in self._channels if rank in pair]:
            self._break(pair)
        for other in self.ends:
            if other != rank:
                self.trouble(frozenset((rank, other)))

    def cut_link(self, pair: Pair) -> None:
        self.cut.add(pair)
        self.trouble(pair)
        self.on_cut(pair)
        self._break(pair)

    def heal_link(self, pair: Pair) -> None:
        if pair in self.cut:
            self.trouble(pair)
            self.cut.discard(pair)
            self._dial(pair)

    def break_channel(self, pair: Pair) -> None:
        """It stands again soon."""
        self.trouble(pair)
        self._break(pair)
        self._dial(pair)

    def trouble(self, pair: Pair) -> None:
        self.troubled_at[pair] = self.now

    def send(self, sender: int, to: int, message: Any) -> None:
        if not self.on_send(sender, to, message):
            return
        pair = frozenset((sender, to))
        channel = self._channels.get(pair)
        if channel is None or not self.ends[sender].is_running:
            return
        if _spend(self.losing, (sender, to)):
            self.trouble(pair)
            return
        for _ in range(2 if _spend(self.doubling, (sender, to)) else 1):
            arrives_at = self.now + self.between(DELAY_S)
            if not _spend(self.reordering, (sender, to)):
                arrives_at = max(arrives_at, channel.free_at.get(sender, 0.0) + 1e-9)
                channel.free_at[sender] = arrives_at
            self.after(arrives_at - self.now, lambda: self._deliver(channel, sender, to, message))

    def _deliver(self, channel: SimulatedChannel, sender: int, to: int, message: Any) -> None:
        if channel.is_whole and channel.ends[to].is_running:
            channel.ends[to].received(sender, message)

    def _dial(self, pair: Pair) -> None:
        self.after(self.between(REDIAL_S), lambda: self._connect(pair))

    def _connect(self, pair: Pair) -> None:
        one, other = sorted(pair)
        if pair in self._channels or not self.can_talk(one, other):
            return
        if not (self.ends[one].is_answering and self.ends[other].is_answering):
            return
        ends = {rank: self.ends[rank] for rank in pair}
        channel = self._channels[pair] = SimulatedChannel(ends)
        for rank, peer in ((one, other), (other, one)):
            status = ends[peer].status_message()
            channel.free_at[peer] = at = self.now + self.between(DELAY_S)
            self.after(
                at - self.now,
                lambda rank=rank, peer=peer, status=status: self._greet(channel, rank, peer, status),
            )  # type: ignore[misc]

    def _greet(self, channel: SimulatedChannel, rank: int, peer: int, status: Any) -> None:
        if channel.is_whole and channel.ends[rank].is_running:
            channel.ends[rank].connected(peer, status)

    def _break(self, pair: Pair) -> None:
        channel = self._channels.pop(pair, None)
        if channel is None:
            return
        channel.is_whole = False
        for rank in pair:
            (other,) = pair - {rank}
            self.after(
                self.between(NOTICE_S),
                lambda rank=rank, other=other: self._notice(channel, rank, other),  # type: ignore[misc]
            )

    def _notice(self, channel: SimulatedChannel, rank: int, other: int) -> None:
        # A new channel may stand by then, and takes the old one's place.
        if channel.ends[rank].is_running and frozenset((rank, other)) not in self._channels:
            channel.ends[rank].disconnected(other)
            self._dial(frozenset((rank, other)))


def _spend(counter: Counter[tuple[int, int]], key: tuple[int, int]) -> bool:
    if not counter[key]:
        return False
    counter[key] -= 1
    return True
