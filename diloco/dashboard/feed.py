"""The stream of updates to the page: the swarm's state, its rounds when they change, and new points of the curves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers.monitor.observer import Observer

MIN_INTERVAL_S = 0.25
INTERVAL_S = 1.0
MAX_READERS = 16
"""Maximum number of pages that can be open at the same time."""

Curves = dict[int, list[tuple[float, int, float | None, float]]]


class Feed:
    """The current state of the swarm, shared by all pages. Used from one event loop."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.swarm: dict[str, Any] = observer.swarm()
        self.curves: Curves = observer.curves()
        self.num_readers = 0
        self._has_ended = False
        self._updated = asyncio.Event()

    async def run(self) -> None:
        """Update the state until cancelled. Raises PeersError if the observer fails for good."""
        try:
            while True:
                await asyncio.sleep(MIN_INTERVAL_S)
                await self._observer.changed(INTERVAL_S)
                self.swarm, self.curves = self._observer.swarm(), self._observer.curves()
                self._wake()
        finally:
            self._has_ended = True
            self._wake()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields one page's server-sent events, first the whole state, until the feed is over."""
        sent = SentState()
        self.num_readers += 1
        try:
            while not self._has_ended:
                updated = self._updated
                for name, data in sent.due(self.swarm, self.curves):
                    yield event_bytes(name, data)
                await updated.wait()
        finally:
            self.num_readers -= 1

    def _wake(self) -> None:
        self._updated.set()
        self._updated = asyncio.Event()


class SentState:
    """Records what one page has been sent."""

    def __init__(self) -> None:
        self._rounds: list[Any] | None = None
        self._last_times: dict[int, float] = {}

    def due(self, swarm: dict[str, Any], curves: Curves) -> list[tuple[str, Any]]:
        """The events that are new to the page, as (event name, data)."""
        messages: list[tuple[str, Any]] = [
            ("swarm", {name: value for name, value in swarm.items() if name != "rounds"})
        ]
        if swarm["rounds"] != self._rounds:
            self._rounds = swarm["rounds"]
            messages.append(("rounds", self._rounds))
        new_points = {rank: self._new_points(rank, points) for rank, points in curves.items()}
        if any(new_points.values()):
            messages.append(("curves", {str(rank): points for rank, points in new_points.items() if points}))
        return messages

    def _new_points(self, rank: int, points: list[tuple[float, int, float | None, float]]) -> list[Any]:
        last_time = self._last_times.get(rank, 0.0)
        self._last_times[rank] = max([last_time, *(point[0] for point in points)])
        return [point for point in points if point[0] > last_time]


def event_bytes(name: str, data: Any) -> bytes:
    """An event in the format text/event-stream; compact JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
