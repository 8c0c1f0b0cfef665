"""Tries several transports at once, preferred ones a little earlier ("happy eyeballs")."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from peers.errors import PeersError, PeerUnreachable
from peers.protocol.records import Path
from peers.tasks import cancelled


class Dial(NamedTuple):
    """One transport. The next one starts `head_start_s` later, or as soon as this one fails."""

    path: Path
    head_start_s: float
    open: Callable[[], Awaitable[socket.socket]]


async def first_connected(dials: Sequence[Dial], timeout_s: float) -> tuple[Path, socket.socket]:
    """The first stream that connects, and its path. Raises the PeersError of the most preferred transport that
    failed.
    """
    running: dict[asyncio.Future[socket.socket], Dial] = {}
    waiting, failures = list(dials), dict[Path, PeersError]()
    deadline = time.monotonic() + timeout_s
    try:
        while (waiting or running) and (left_s := deadline - time.monotonic()) > 0:
            if waiting:
                dial = waiting.pop(0)
                running[asyncio.ensure_future(dial.open())] = dial
                left_s = min(dial.head_start_s, left_s) if waiting else left_s
            done, _ = await asyncio.wait(running, timeout=left_s, return_when="FIRST_COMPLETED")
            for task in done:
                path, error = running.pop(task).path, task.exception()
                if error is None:
                    return path, task.result()
                if not isinstance(error, PeersError):
                    raise error
                failures[path] = error
    finally:
        await _close_late(running)
    in_order = (failures[dial.path] for dial in dials if dial.path in failures)
    raise next(in_order, PeerUnreachable("took too long"))


async def _close_late(running: Iterable[asyncio.Future[socket.socket]]) -> None:
    for outcome in await cancelled(running):
        if isinstance(outcome, socket.socket):
            outcome.close()
