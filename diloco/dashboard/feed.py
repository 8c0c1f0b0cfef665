"""The stream of updates to the page: the swarm's state, the rounds when they change, and new points of the curves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Protocol

LEAST_INTERVAL_S = 0.25
INTERVAL_S = 1.0
MAX_READERS = 16
"""Most pages that may be open at once."""

Curves = dict[int, list[tuple[float, int, float | None, float]]]


class Source(Protocol):
    """The part of peers.monitor.observer.Observer that is used here."""

    async def changed(self, timeout_s: float) -> None: ...

    def swarm(self) -> dict[str, Any]: ...

    def curves(self) -> Curves: ...


class Feed:
    """The current state of the swarm, shared by all pages. Used from one event loop."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.swarm: dict[str, Any] = source.swarm()
        self.curves: Curves = source.curves()
        self.num_readers = 0
        self._is_over = False
        self._renewed = asyncio.Event()

    async def run(self) -> None:
        """Update the state until cancelled. Raises PeersError if the source fails for good."""
        try:
            while True:
                await asyncio.sleep(LEAST_INTERVAL_S)
                await self._source.changed(INTERVAL_S)
                self.swarm, self.curves = self._source.swarm(), self._source.curves()
                self._wake()
        finally:
            self._is_over = True
            self._wake()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields one page's server-sent events, first the whole state, until the feed is over."""
        sent = Sent()
        self.num_readers += 1
        try:
            while not self._is_over:
                renewed = self._renewed
                for name, data in sent.due(self.swarm, self.curves):
                    yield server_sent(name, data)
                await renewed.wait()
        finally:
            self.num_readers -= 1

    def _wake(self) -> None:
        self._renewed.set()
        self._renewed = asyncio.Event()


class Sent:
    """What one page has been sent."""

    def __init__(self) -> None:
        self._rounds: str | None = None
        self._until: dict[int, float] = {}

    def due(self, swarm: dict[str, Any], curves: Curves) -> list[tuple[str, Any]]:
        """The (event, data) that are new to the page."""
        messages: list[tuple[str, Any]] = [
            ("swarm", {name: value for name, value in swarm.items() if name != "rounds"})
        ]
        rounds = json.dumps(swarm["rounds"])
        if rounds != self._rounds:
            self._rounds = rounds
            messages.append(("rounds", swarm["rounds"]))
        news = {rank: self._new_points(rank, points) for rank, points in curves.items()}
        if any(news.values()):
            messages.append(("curves", {str(rank): points for rank, points in news.items() if points}))
        return messages

    def _new_points(self, rank: int, points: list[tuple[float, int, float | None, float]]) -> list[Any]:
        until = self._until.get(rank, 0.0)
        self._until[rank] = max([until, *(point[0] for point in points)])
        return [point for point in points if point[0] > until]


def server_sent(name: str, data: Any) -> bytes:
    """An event in the format text/event-stream; compact JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
