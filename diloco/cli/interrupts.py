"""Ctrl-C and SIGTERM: what runs is cancelled, cleans up by a deadline, and exits as a shell expects."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any

CLEAN_UP_TIMEOUT_S = 8.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_at_once_on_signals() -> None:
    """Signal handling before `run_interruptible`, while nothing has been started."""

    def leave(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, leave)


def run_interruptible(main: Coroutine[Any, Any, int]) -> int:
    """Run to the end and return its exit code, or 128 + n after signal n, when `main` has been cancelled.

    If cancelling takes longer than CLEAN_UP_TIMEOUT_S the process exits regardless; the kernel then kills its
    children, which were started to die with it.
    """
    # Not at the top: every `--help` imports this module, and needs no event loop.
    import asyncio

    return asyncio.run(_cancelled_by_signals(main))


async def _cancelled_by_signals(main: Coroutine[Any, Any, int]) -> int:
    import asyncio

    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    caught: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        if not caught:
            caught.append(number)
            last_resort = threading.Timer(CLEAN_UP_TIMEOUT_S, os._exit, (128 + number,))
            last_resort.daemon = True
            last_resort.start()
            task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, cancel, number)
    try:
        code = await task
    except asyncio.CancelledError:
        if not caught:
            raise
        code = 0
    return 128 + caught[0] if caught else code
