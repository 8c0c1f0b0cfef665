"""The simulated network: delay, jitter, loss, duplication, reordering, cuts and broken channels.

Every two live peers have a channel, which reopens by itself. If a link is cut in both directions, or a process dies,
the channel breaks and each end is told after a short while. A link that is cut in one direction drops what is sent that
way, and nobody is told. Messages really are encoded and decoded, once for all their receivers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.sim.clock import Clock
from peers.core import events
from peers.errors import ProtocolError
from peers.protocol.messages import Message, decode_message
from peers.protocol.wire import encode

if TYPE_CHECKING:
    from diloco.sim.runtime import Process

CONNECT_S = (0.05, 0.8)
NOTICE_S = (0.0, 0.5)
"""How long an end takes to notice that a channel has broken."""
FIFO_GAP_S = 1e-6


@dataclass(kw_only=True)
class Quality:
    """The quality of all links."""

    delay_s: tuple[float, float] = (0.001, 0.05)
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    """The probability that a message is held back, so that later ones overtake it."""
    held_back_s: float = 1.0


class Network:
    """`encodes=False` delivers the message objects themselves, which is faster."""

    def __init__(
        self, clock: Clock, rng: random.Random, quality: Quality | None = None, *, encodes: bool = True
    ) -> None:
        self.quality = quality or Quality()
        self.num_refused = 0
        """Messages that could not be decoded; honest peers send none."""
        self.on_channel: Callable[[str, str, bool], None] = lambda one, other, is_open: None
        """Called when the channel between two peers opens, and when it breaks."""
        self.tamper: Callable[[str, str, Message], Message | None] = lambda sender, receiver, message: message
        """What arrives instead of a message; None: nothing."""
        self._clock, self._rng, self._encodes = clock, rng, encodes
        self._ports: dict[str, Process] = {}
        self._cut: set[tuple[str, str]] = set()
        self._channels: set[tuple[str, str]] = set()
        """Each channel in both directions."""
        self._last_arrival: dict[tuple[str, str], float] = {}

    # Processes and links

    def open(self, port: Process) -> None:
        """This process starts, and dials all others."""
        self._ports[port.peer_id] = port
        for other in self._others(port.peer_id):
            self._dial(port.peer_id, other)

    def close(self, peer_id: str, *, notice_s: tuple[float, float] = NOTICE_S) -> None:
        """This process ends. Messages that it has sent still arrive."""
        del self._ports[peer_id]
        for other in self._others(peer_id):
            self._break(peer_id, other, notice_s)

    def cut(self, sender: str, receiver: str) -> None:
        """Drop everything from sender to receiver; once both directions are cut, the channel breaks."""
        self._cut.add((sender, receiver))
        if (receiver, sender) in self._cut:
            self._break(sender, receiver, NOTICE_S)

    def heal(self, sender: str, receiver: str) -> None:
        self._cut.discard((sender, receiver))
        self._dial(sender, receiver)

    def carries(self, sender: str, receiver: str) -> bool:
        """Whether messages get from sender to receiver, random loss aside."""
        return sender in self._ports and receiver in self._ports and (sender, receiver) not in self._cut

    def is_linked(self, one: str, other: str) -> bool:
        """Both ways."""
        return self.carries(one, other) and self.carries(other, one)

    @property
    def cuts(self) -> tuple[tuple[str, str], ...]:
        """(sender, receiver), in order."""
        return tuple(sorted(self._cut))

    # Messages

    def send(self, sender: str, receiver: str, message: Message) -> None:
        """A message without an open channel is lost."""
        if (sender, receiver) in self._channels and (known := self._through_wire(message)) is not None:
            self._transmit(sender, receiver, known)

    def broadcast(self, sender: str, message: Message) -> None:
        if (known := self._through_wire(message)) is None:
            return
        for receiver in self._others(sender):
            if (sender, receiver) in self._channels:
                self._transmit(sender, receiver, known)

    def _through_wire(self, message: Message) -> Message | None:
        if not self._encodes:
            return message
        try:
            return decode_message(encode(message))
        except ProtocolError:
            self.num_refused += 1
            return None

    def _transmit(self, sender: str, receiver: str, message: Message) -> None:
        quality, rng = self.quality, self._rng
        if quality.loss and rng.random() < quality.loss:
            return
        if (arrives := self.tamper(sender, receiver, message)) is None:
            return
        self._deliver_after(sender, receiver, arrives)
        if quality.duplication and rng.random() < quality.duplication:
            self._deliver_after(sender, receiver, arrives)

    def _deliver_after(self, sender: str, receiver: str, message: Message) -> None:
        quality, rng, pair = self.quality, self._rng, (sender, receiver)
        arrives_at = self._clock.now + rng.uniform(*quality.delay_s)
        if quality.reordering and rng.random() < quality.reordering:
            arrives_at += rng.random() * quality.held_back_s
        else:
            arrives_at = max(arrives_at, self._last_arrival.get(pair, 0.0) + FIFO_GAP_S)
            self._last_arrival[pair] = arrives_at
        port = self._ports[receiver]

        def arrive() -> None:
            if pair not in self._cut and self._ports.get(receiver) is port:
                port.post(events.Received(sender, message))

        self._clock.at(arrives_at, arrive)

    # Channels

    def _others(self, peer_id: str) -> Iterator[str]:
        return (other for other in list(self._ports) if other != peer_id)

    def _dial(self, one: str, other: str) -> None:
        self._clock.after(self._rng.uniform(*CONNECT_S), lambda: self._connect(one, other))

    def _connect(self, one: str, other: str) -> None:
        if self.is_linked(one, other) and (one, other) not in self._channels:
            self._channels |= {(one, other), (other, one)}
            self.on_channel(one, other, True)
            # Measured once here; the mesh measures it again and again, and takes the least of the last times.
            round_trip_s = sum(self._rng.uniform(*self.quality.delay_s) for _ in range(2))
            for end, far in ((one, other), (other, one)):
                if (port := self._ports.get(end)) is not None:
                    port.post(events.Connected(far))
                    port.post(events.RoundTrip(far, round_trip_s))

    def _break(self, one: str, other: str, notice_s: tuple[float, float]) -> None:
        if (one, other) not in self._channels:
            return
        self._channels -= {(one, other), (other, one)}
        self.on_channel(one, other, False)
        for end, far in ((one, other), (other, one)):
            if (port := self._ports.get(end)) is not None:
                self._notice_after(self._rng.uniform(*notice_s), port, far)

    def _notice_after(self, seconds: float, port: Process, far: str) -> None:
        def notice() -> None:
            # If a new channel has opened meanwhile, it has replaced the broken one.
            if self._ports.get(port.peer_id) is port and (port.peer_id, far) not in self._channels:
                port.post(events.Disconnected(far))

        self._clock.after(seconds, notice)
