"""Several ways to the same peer, tried at once, the better ones a little sooner."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping

from peers.errors import PeersError, PeerUnreachable
from peers.protocol.records import Path


async def first_to_stand(
    ways: Mapping[Path, Callable[[], Awaitable[socket.socket]]], head_start_s: float, timeout_s: float
) -> tuple[Path, socket.socket]:
    """The first way that gives a stream; each gets a head start on the next. Raises the first one's PeersError."""
    running: dict[asyncio.Future[socket.socket], Path] = {}
    waiting, failures = list(ways.items()), dict[Path, BaseException]()
    deadline = time.monotonic() + timeout_s
    try:
        while waiting or running:
            if waiting:
                path, way = waiting.pop(0)
                running[asyncio.ensure_future(way())] = path
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            done, _ = await asyncio.wait(
                running,
                timeout=min(head_start_s, left_s) if waiting else left_s,
                return_when="FIRST_COMPLETED",
            )
            for task in done:
                path = running.pop(task)
                error = task.exception()
                if error is None:
                    return path, task.result()
                if not isinstance(error, PeersError):
                    raise error
                failures[path] = error
    finally:
        await _close_late(running)
    raise next((failures[path] for path in ways if path in failures), PeerUnreachable("took too long"))


async def _close_late(running: Mapping[asyncio.Future[socket.socket], Path]) -> None:
    for task in running:
        task.cancel()
    for outcome in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(outcome, socket.socket):
            outcome.close()
