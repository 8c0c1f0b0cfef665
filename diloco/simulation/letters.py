"""Control messages on their way: they take a link's time by their size, one after the other, and then its delay.

Their sizes are those of the product's own encoding. In large swarms they matter: a group's record names every member
and goes to every member. What is not simulated: heartbeats, and that bulk data is under way on the same link, where it
would hold a message up by what is queued there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgpack

from diloco.sim.clock import Clock
from diloco.simulation.links import Link
from peers.round import messages as round_messages
from peers.round.messages import Commit, Group, RoundMessage, Vote

_FRAME_BYTES = 60
"""Of the mesh's own header and of TLS and TCP, about."""

Deliver = Callable[[int, RoundMessage], None]


class Letters:
    """`receivers` has everybody who can be written to, by world rank; what comes for others is lost."""

    def __init__(self, clock: Clock, links: Mapping[int, Link], hop_s: Mapping[int, float]) -> None:
        """`hop_s`: what a message takes from a peer's socket to its round."""
        self._clock, self._links, self._hop_s = clock, links, hop_s
        self.receivers: dict[int, Deliver] = {}
        self._up_free_at = dict.fromkeys(links, 0.0)
        self._down_free_at = dict.fromkeys(links, 0.0)
        self._sizes: dict[tuple[object, ...], int] = {}

    def delay_s(self, one: int, other: int) -> float:
        """One way."""
        return self._links[one].delay_s + self._links[other].delay_s

    def gone_at(self, sender: int) -> float:
        """When all that it has sent until now has left: what is sent then comes after it."""
        return max(self._clock.now, self._up_free_at[sender])

    def send(self, sender: int, to: int, message: RoundMessage) -> None:
        size, now = self._size_of(message), self._clock.now
        gone_at = max(now, self._up_free_at[sender]) + size / self._links[sender].up_bytes_per_s
        self._up_free_at[sender] = gone_at
        self._clock.at(gone_at + self.delay_s(sender, to), lambda: self._arrive(sender, to, message, size))

    def _arrive(self, sender: int, to: int, message: RoundMessage, size: int) -> None:
        here_at = max(self._clock.now, self._down_free_at[to]) + size / self._links[to].down_bytes_per_s
        self._down_free_at[to] = here_at
        self._clock.at(here_at + self._hop_s[to], lambda: self._deliver(sender, to, message))

    def _deliver(self, sender: int, to: int, message: RoundMessage) -> None:
        if (receive := self.receivers.get(to)) is not None:
            receive(sender, message)

    def _size_of(self, message: RoundMessage) -> int:
        """Messages of one kind and one attempt have the same size, to within a few bytes: encoded once."""
        key = _likeness(message)
        if (size := self._sizes.get(key)) is None:
            if len(self._sizes) > 1000:
                self._sizes.clear()
            size = self._sizes[key] = _FRAME_BYTES + len(msgpack.packb(round_messages.to_message(message)))
        return size


def _likeness(message: RoundMessage) -> tuple[object, ...]:
    match message:
        case Group(attempt=attempt):
            return "group", attempt
        case Commit(group=group):
            return "commit", group.attempt
        case Vote(shares=shares, suspects=suspects):
            return "vote", len(shares), len(suspects)
    return (message.kind,)
