"""One peer that is heard of through a channel: when to speak to it, and when its silence means something."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from peers.errors import PeerUnreachable
from peers.net.channel import Channel
from peers.protocol.mesh import Announced, Said
from peers.protocol.records import Announcement

HEARTBEAT_S = 0.5
"""Whatever else is said meanwhile: who waits for a peer says a lot to it, and has to notice its silence."""
SILENCE_S, LONGEST_SILENCE_S = 8.0, 30.0
"""A peer that says nothing for so long counts as lost. Far above a heartbeat: a busy machine is not a dead one. Longer
among many, who may share machines; rounds wait for none of them meanwhile, and a broken channel tells at once."""
QUIET_S, QUIET_BEATS = 3.0, 4
"""A peer that says nothing while this one sends heartbeats for so long, and at least so many, is not waited for. Own
beats count and not seconds: whoever was frozen itself has missed nothing."""
DOUBT_BEATS = 4
"""After so many beats without an answer the next streams to a peer go another way, if there is one: the link may carry
nothing. Not where more than a quarter of the peers are so silent: then it is this one that hears badly."""
_MANY_BEATS, _MANY_PEERS = 8, 16
"""From so many peers on heartbeats get rarer, since all hear all and it is what membership costs; and from so many on
silence may last longer."""
_MAX_QUEUED = 1024


class LivePeer:
    """The other end of a channel: its newest status, what it is yet to be sent, how long it has not answered."""

    def __init__(self, channel: Channel, status: Announcement) -> None:
        self.channel, self.status = channel, status
        self._num_unanswered, self._quiet_at = 0, QUIET_BEATS
        self._queue: asyncio.Queue[Said | None] = asyncio.Queue(_MAX_QUEUED)

    @property
    def is_quiet(self) -> bool:
        return self._num_unanswered >= self._quiet_at

    @property
    def is_doubted(self) -> bool:
        return self._num_unanswered >= DOUBT_BEATS

    def heard(self) -> None:
        """It has said something."""
        self._num_unanswered = 0

    def enqueue(self, message: Said | None) -> None:
        """None ends the channel, once all before it is sent."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            # It takes nothing any more: losing it now is what its silence would lead to.
            self.channel.break_off()

    async def send_forever(
        self,
        status: Callable[[], bytes],
        interval_s: Callable[[], float],
        *,
        on_doubt: Callable[[], None],
    ) -> None:
        clock = asyncio.get_running_loop().time
        beat_at = clock() + interval_s()
        try:
            while True:
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that meets a message.
                    async with asyncio.timeout_at(beat_at):
                        message = await self._queue.get()
                except TimeoutError:
                    message = Announced(record=status())
                    interval = interval_s()
                    beat_at = clock() + interval
                    self._num_unanswered += 1
                    self._quiet_at = max(QUIET_BEATS, math.ceil(QUIET_S / interval))
                    if self._num_unanswered == DOUBT_BEATS:
                        on_doubt()
                if message is None:
                    self.channel.break_off()
                    return
                await self.channel.send(message, timeout_s=SILENCE_S)
        except PeerUnreachable:
            self.channel.break_off()


def heartbeat_s(num_peers: int) -> float:
    """Between two heartbeats to each of so many peers."""
    return min(HEARTBEAT_S * max(1.0, num_peers / _MANY_BEATS), SILENCE_S / 3)


def silence_s(num_peers: int) -> float:
    """After which each of so many peers counts as lost."""
    return min(SILENCE_S * max(1.0, num_peers / _MANY_PEERS), LONGEST_SILENCE_S)
