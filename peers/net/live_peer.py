"""A channel of the mesh with one peer: what is sent on it and when, and whether the peer still answers."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from peers.errors import PeerUnreachable, ProtocolError
from peers.net.channel import Channel
from peers.protocol.mesh import Announced, Ping, Said
from peers.timing import DOUBT_BEATS, LEAST_SILENCE_S, LOST_BEATS, heartbeat_s

_MAX_QUEUED = 1024
_LATE = 1.5
_PING_BEATS = 8
"""Heartbeats between two measurements of the round trip."""
_LAST_ROUND_TRIPS = 4
"""The least of so many counts: a busy machine answers late."""


class LivePeer:
    """A channel, its queue, and its unanswered heartbeats. `caller`: the peer id of the end that opened the channel."""

    def __init__(self, channel: Channel, caller: str) -> None:
        self.channel, self.caller = channel, caller
        self.used_at = time.monotonic()
        """When the last message of a core or about the manifest went over the channel, in either direction."""
        self._num_unanswered = 0
        self._pinged_at = math.inf
        """When the Ping was sent that is not answered yet."""
        self._round_trips = deque[float](maxlen=_LAST_ROUND_TRIPS)
        self._queue: asyncio.Queue[Said | None] = asyncio.Queue(_MAX_QUEUED)

    @property
    def is_silent(self) -> bool:
        """The peer has not answered several heartbeats."""
        return self._num_unanswered >= DOUBT_BEATS

    def heard(self) -> None:
        """The peer has sent something, which counts as an answer."""
        self._num_unanswered = 0

    def ponged(self) -> float | None:
        """The answer to a Ping has come. Returns the round trip in seconds; None if there was no Ping."""
        if math.isinf(self._pinged_at):
            return None
        self._round_trips.append(time.monotonic() - self._pinged_at)
        self._pinged_at = math.inf
        return min(self._round_trips)

    def enqueue(self, message: Said | None) -> None:
        """Queue a message. None closes the channel once everything before it is sent."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            # The peer has stopped reading: treat that like silence.
            self.channel.break_off()

    async def send_forever(
        self,
        status: Callable[[], bytes],
        interval_s: Callable[[], float],
        *,
        on_silence: Callable[[], None],
    ) -> None:
        """Send what is queued. If no status has been queued for somewhat longer than `interval_s`, send the current
        one: a core queues a status in each interval, but not while it is busy with a commit."""
        clock = asyncio.get_running_loop().time
        told_at = counted_at = clock()
        pings_at = -math.inf
        try:
            while True:
                try:
                    # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with a message.
                    async with asyncio.timeout_at(told_at + _LATE * interval_s()):
                        message = await self._queue.get()
                except TimeoutError:
                    message = Announced(record=status())
                if message is None:
                    self.channel.break_off()
                    return
                if isinstance(message, Announced):
                    told_at = clock()
                    if told_at >= counted_at + interval_s():
                        counted_at = told_at
                        self._num_unanswered += 1
                        if self._num_unanswered == DOUBT_BEATS:
                            on_silence()
                await self.channel.send(message, timeout_s=LEAST_SILENCE_S)
                if clock() >= pings_at and math.isinf(self._pinged_at):
                    pings_at, self._pinged_at = clock() + _PING_BEATS * interval_s(), time.monotonic()
                    await self.channel.send(Ping(), timeout_s=LEAST_SILENCE_S)
        except (PeerUnreachable, ProtocolError):
            self.channel.break_off()


def silence_s(num_peers: int, beat_s: Callable[[int], float] = heartbeat_s) -> float:
    """After this long, a silent peer that should send every `beat_s` counts as lost; default: heartbeats."""
    return max(LEAST_SILENCE_S, LOST_BEATS * beat_s(num_peers))
