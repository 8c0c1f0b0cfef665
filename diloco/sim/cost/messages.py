"""Control messages between peers: each occupies its sender's uplink for its size, one after the other, then is delayed.

Sizes are those of the real encoding, which matters in large swarms, where a plan lists all members and is sent to all
of them. Not simulated: the size of statuses, and queueing behind bulk data on the same link.

Statuses go to all peers. In large swarms, statuses are collected for a short time and delivered together, since the
simulation would otherwise take too long.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

from diloco.sim.clock import Clock
from diloco.sim.cost.scenario import SimulatedPeer
from peers.core import events
from peers.protocol.messages import Certificates, Message, Propose, Status
from peers.protocol.wire import encode
from peers.timing import FULL_MESH

if TYPE_CHECKING:
    from diloco.sim.runtime import Process

_FRAME_BYTES = 60
"""Approximate overhead of the mesh's header, TLS and TCP per message."""
_GATHERED_S = 1e-3
"""Statuses in a large swarm are collected for this time per peer."""


class Messages:
    """Delivers messages to `receivers`, the peers that live, by peer id; messages to other peers are lost."""

    def __init__(
        self, clock: Clock, peers: Mapping[str, SimulatedPeer], receivers: Mapping[str, Process]
    ) -> None:
        self._clock, self._receivers = clock, receivers
        self._links = {peer_id: peer.link for peer_id, peer in peers.items()}
        self._hop_s = {peer_id: peer.machine.hop_s for peer_id, peer in peers.items()}
        """Latency from a peer's socket to its core."""
        self._up_free_at = dict.fromkeys(peers, 0.0)
        self._down_free_at = dict.fromkeys(peers, 0.0)
        self._sizes: dict[object, int] = {}
        self._last_status: dict[str, Status] = {}
        self._usual_delay_s = 2 * statistics.median_low(link.delay_s for link in self._links.values())
        self._gathered_s = _GATHERED_S * len(peers) if len(peers) > FULL_MESH else 0.0
        self._gathered: list[tuple[str, Status]] = []

    def delay_s(self, one: str, other: str) -> float:
        """One-way delay between two peers."""
        return self._links[one].delay_s + self._links[other].delay_s

    def open(self, receiver: Process) -> None:
        """Deliver to this peer from now on, beginning with the last status of every other peer."""
        said = tuple(
            (other, status) for other, status in self._last_status.items() if other in self._receivers
        )
        if said:
            self._clock.after(self._usual_delay_s, lambda: receiver.post(events.StatusesReceived(said)))

    def close(self, peer_id: str) -> None:
        self._last_status.pop(peer_id, None)

    def send(self, sender: str, to: str, message: Message) -> None:
        size = self._size_of(message)
        gone_at = self._uplink_free_at(sender) + size / self._links[sender].up_bytes_per_s
        self._up_free_at[sender] = gone_at
        self._clock.at(gone_at + self.delay_s(sender, to), lambda: self._arrive(sender, to, message, size))

    def broadcast(self, sender: str, message: Message) -> None:
        if isinstance(message, Status):
            self._send_status(sender, message)
            return
        for to in self._receivers:
            if to != sender:
                self.send(sender, to, message)

    def _uplink_free_at(self, sender: str) -> float:
        """The time at which the sender's uplink is free, after all earlier messages."""
        return max(self._clock.now, self._up_free_at[sender])

    def _send_status(self, sender: str, status: Status) -> None:
        """Send a status after all earlier messages of the sender, so that the order is kept."""

        def leave() -> None:
            if sender not in self._receivers:
                return
            self._last_status[sender] = status
            if self._gathered_s:
                self._gather(sender, status)
                return
            for to in self._receivers:
                if to != sender:
                    after_s = self.delay_s(sender, to) + self._hop_s[to]
                    self._clock.after(after_s, lambda to=to: self._deliver(sender, to, status))  # type: ignore[misc]

        if (gone_at := self._uplink_free_at(sender)) > self._clock.now:
            self._clock.at(gone_at, leave)
        else:
            leave()

    def _gather(self, sender: str, status: Status) -> None:
        if not self._gathered:
            self._clock.after(self._gathered_s + self._usual_delay_s, self._deliver_gathered)
        self._gathered.append((sender, status))

    def _deliver_gathered(self) -> None:
        event, self._gathered = events.StatusesReceived(tuple(self._gathered)), []
        for receiver in list(self._receivers.values()):
            receiver.post(event)

    def _arrive(self, sender: str, to: str, message: Message, size: int) -> None:
        here_at = max(self._clock.now, self._down_free_at[to]) + size / self._links[to].down_bytes_per_s
        self._down_free_at[to] = here_at
        self._clock.at(here_at + self._hop_s[to], lambda: self._deliver(sender, to, message))

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        if (receiver := self._receivers.get(to)) is not None:
            receiver.post(events.Received(sender, message))

    def _size_of(self, message: Message) -> int:
        """The encoded size. Messages of one kind about the same plan differ by a few bytes, so only one is encoded."""
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
