"""Asyncio tasks that end with the object they belong to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from peers.signals import drop_closed_output, ending_signals

T = TypeVar("T")

log = logging.getLogger(__name__)


class Tasks:
    """The background tasks of one object. Used from one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run this until it ends, or `close` is called. An error that it raises is logged."""
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def ended_within(self, timeout_s: float) -> None:
        """Wait until all have ended by themselves, at most this long."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)

    async def close(self) -> None:
        """Cancel what still runs, and wait until it has ended. May be repeated."""
        await cancelled(self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)


async def cancelled(tasks: Iterable[asyncio.Future[Any]]) -> list[Any]:
    """Cancel these, wait until they have ended, and return the outcome of each. May be repeated."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    return await asyncio.gather(*ending, return_exceptions=True)


async def first_of(*coroutines: Coroutine[Any, Any, Any]) -> Any:
    """Run these concurrently until one ends, then cancel the rest. Returns its result, or raises its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # If several have ended, an error takes precedence over a result.
        first, *_ = [task.result() for task in tasks if task in done]
        return first
    finally:
        await cancelled(tasks)


async def is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event, at most this long. Returns whether it was set."""
    with contextlib.suppress(TimeoutError):
        # Not wait_for: in Python 3.11 it swallows a cancellation that arrives together with the event.
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    return False


async def until_signal(main: Coroutine[Any, Any, int], timeout_s: float) -> int:
    """Run `main` and return its exit code. A signal that ends a process cancels it; the code is then 128 + its number.

    If it takes longer than `timeout_s` to end, the process exits regardless. The kernel then kills its child processes,
    which were started with that setting (with_parent).
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    caught: list[int] = []

    def cancel(number: int) -> None:
        if not caught:
            caught.append(number)
            drop_closed_output()
            forced_exit = threading.Timer(timeout_s, os._exit, (128 + number,))
            forced_exit.daemon = True
            forced_exit.start()
            task.cancel()

    for number in ending_signals():
        loop.add_signal_handler(number, cancel, number)
    try:
        code = await task
    except asyncio.CancelledError:
        if not caught:
            raise
        code = 0
    return 128 + caught[0] if caught else code
