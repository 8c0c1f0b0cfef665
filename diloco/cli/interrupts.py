"""Handles Ctrl-C and SIGTERM: cancels the running coroutine, limits its clean-up time, and exits with 128 + n."""

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
    """Exit at once on a signal. For the time before `run_interruptible`, when there is nothing to clean up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, leave)


def run_interruptible(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` and return its exit code. Signal n cancels it; the exit code is then 128 + n.

    If the clean-up takes longer than CLEAN_UP_TIMEOUT_S, the process exits regardless. The kernel then kills its child
    processes, which were started with that setting (die_with_parent).
    """
    # Not at the top: every `--help` imports this module, and asyncio would slow it down.
    import asyncio

    return asyncio.run(_cancelled_by_signals(main))


def run_with_hivemind(main: Coroutine[Any, Any, int]) -> int:
    """As `run_interruptible`, for what joins a DHT.

    Loading hivemind takes seconds, during which an event loop could not handle signals; so it is loaded before.
    """
    from peers.net.dht.node import load_hivemind

    load_hivemind()
    return run_interruptible(main)


async def _cancelled_by_signals(main: Coroutine[Any, Any, int]) -> int:
    import asyncio

    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main)
    caught: list[signal.Signals] = []

    def cancel(number: signal.Signals) -> None:
        if not caught:
            caught.append(number)
            forced_exit = threading.Timer(CLEAN_UP_TIMEOUT_S, os._exit, (128 + number,))
            forced_exit.daemon = True
            forced_exit.start()
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
