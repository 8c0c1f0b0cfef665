"""Messages on their way: they take a link's time by their size, one after the other, and then its delay.

Their sizes are those of the product's own encoding. In large swarms they matter: a plan names every member and goes to
every member. What is not simulated: the size of statuses, and that bulk data is under way on the same link, where it
would hold a message up by what is queued there.

Statuses go to everybody. In large swarms those of a short time are handed over together, so that they can be computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Protocol

from diloco.sim.clock import Clock
from diloco.sim.cost.links import Link
from peers.core import events
from peers.core.events import Event
from peers.protocol.messages import Certificates, Message, Propose, Status
from peers.protocol.wire import encode

_FRAME_BYTES = 60
"""Of the mesh's own header and of TLS and TCP, about."""
_GATHERED_S = 1e-3
"""Per peer of a large swarm: how long statuses are gathered."""
_LARGE = 32
"""Peers, beyond which statuses are gathered."""


class Receiver(Protocol):
    def post(self, event: Event) -> None: ...


class Messages:
    """`receivers`: everybody who can be written to, by peer id; what comes for others is lost."""

    def __init__(self, clock: Clock, links: Mapping[str, Link], hop_s: Mapping[str, float]) -> None:
        """`hop_s`: what a message takes from a peer's socket to its core."""
        self._clock, self._links, self._hop_s = clock, links, hop_s
        self.receivers: dict[str, Receiver] = {}
        self._up_free_at = dict.fromkeys(links, 0.0)
        self._down_free_at = dict.fromkeys(links, 0.0)
        self._sizes: dict[object, int] = {}
        self._said: dict[str, Status] = {}
        self._usual_delay_s = 2 * statistics.median_low(link.delay_s for link in links.values())
        self._gathered_s = _GATHERED_S * len(links) if len(links) > _LARGE else 0.0
        self._gathered: list[tuple[str, Status]] = []

    def delay_s(self, one: str, other: str) -> float:
        """One way."""
        return self._links[one].delay_s + self._links[other].delay_s

    def open(self, peer_id: str, receiver: Receiver) -> None:
        """It can be written to, and hears where the others stand."""
        self.receivers[peer_id] = receiver
        said = tuple((other, status) for other, status in self._said.items() if other in self.receivers)
        if said:
            self._clock.after(self._usual_delay_s, lambda: receiver.post(events.StatusesReceived(said)))

    def close(self, peer_id: str) -> None:
        self.receivers.pop(peer_id, None)
        self._said.pop(peer_id, None)

    def send(self, sender: str, to: str, message: Message) -> None:
        size = self._size_of(message)
        gone_at = self._gone_at(sender) + size / self._links[sender].up_bytes_per_s
        self._up_free_at[sender] = gone_at
        self._clock.at(gone_at + self.delay_s(sender, to), lambda: self._arrive(sender, to, message, size))

    def broadcast(self, sender: str, message: Message) -> None:
        if isinstance(message, Status):
            self._say(sender, message)
            return
        for to in self.receivers:
            if to != sender:
                self.send(sender, to, message)

    def _gone_at(self, sender: str) -> float:
        """When all that it has sent until now has left: what is sent then comes after it."""
        return max(self._clock.now, self._up_free_at[sender])

    def _say(self, sender: str, status: Status) -> None:
        """Once what it has sent before is on its way: the others hear of it in that order."""

        def leave() -> None:
            if sender not in self.receivers:
                return
            self._said[sender] = status
            if self._gathered_s:
                self._gather(sender, status)
                return
            for to in self.receivers:
                if to != sender:
                    after_s = self.delay_s(sender, to) + self._hop_s[to]
                    self._clock.after(after_s, lambda to=to: self._deliver(sender, to, status))  # type: ignore[misc]

        if (gone_at := self._gone_at(sender)) > self._clock.now:
            self._clock.at(gone_at, leave)
        else:
            leave()

    def _gather(self, sender: str, status: Status) -> None:
        if not self._gathered:
            self._clock.after(self._gathered_s + self._usual_delay_s, self._hand_over)
        self._gathered.append((sender, status))

    def _hand_over(self) -> None:
        event, self._gathered = events.StatusesReceived(tuple(self._gathered)), []
        for receiver in list(self.receivers.values()):
            receiver.post(event)

    def _arrive(self, sender: str, to: str, message: Message, size: int) -> None:
        here_at = max(self._clock.now, self._down_free_at[to]) + size / self._links[to].down_bytes_per_s
        self._down_free_at[to] = here_at
        self._clock.at(here_at + self._hop_s[to], lambda: self._deliver(sender, to, message))

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        if (receiver := self.receivers.get(to)) is not None:
            receiver.post(events.Received(sender, message))

    def _size_of(self, message: Message) -> int:
        """Messages of one kind about the same plan have the same size, to within a few bytes: encoded once."""
        key: object = type(message)
        match message:
            case Propose(plan):
                key = "propose", plan.digest
            case Certificates(certificates=certificates):
                key = "certificates", *(certificate.head for certificate in certificates)
        if (size := self._sizes.get(key)) is None:
            if len(self._sizes) > 1000:
                self._sizes.clear()
            size = self._sizes[key] = _FRAME_BYTES + len(encode(message))
        return size
