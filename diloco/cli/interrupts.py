"""Handles signals that end a process: cancels the running coroutine, limits its clean-up time, exits with 128 + n."""

from __future__ import annotations

import os
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any

from peers.signals import ending_signals

CLEAN_UP_TIMEOUT_S = 8.0


def exit_at_once_on_signals() -> None:
    """Exit at once on a signal. For the time before `run_interruptible`, when there is nothing to clean up."""

    def leave(number: int, _frame: FrameType | None) -> None:
        os._exit(128 + number)

    for number in ending_signals():
        signal.signal(number, leave)


def run_interruptible(main: Coroutine[Any, Any, int]) -> int:
    """Run `main` and return its exit code. Signal n cancels it; the exit code is then 128 + n.

    If the clean-up takes longer than CLEAN_UP_TIMEOUT_S, the process exits regardless.
    """
    # Not at the top: every `--help` imports this module, and asyncio would slow it down.
    import asyncio

    from peers.tasks import until_signal

    before = {number: signal.getsignal(number) for number in ending_signals()}
    try:
        return asyncio.run(until_signal(main, CLEAN_UP_TIMEOUT_S))
    finally:
        # asyncio has restored Python's default handlers, which print a traceback.
        for number, handler in before.items():
            signal.signal(number, handler)


def run_with_hivemind(main: Coroutine[Any, Any, int]) -> int:
    """As `run_interruptible`, for a `main` that joins a DHT.

    Loads hivemind before the event loop starts: loading takes seconds, in which the loop could not handle signals.
    """
    from peers.net.dht.node import load_hivemind

    load_hivemind()
    return run_interruptible(main)
