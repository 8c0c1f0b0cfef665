"""The signals that end a process, and the closed terminal that one of them reports."""

from __future__ import annotations

import os
import select
import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """SIGINT, SIGTERM and SIGHUP; not SIGHUP if this process ignores it, as under nohup."""
    ignores_hang_up = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *(() if ignores_hang_up else (signal.SIGHUP,)))


def drop_closed_output() -> None:
    """Send stdout and stderr to /dev/null from now on if their terminal is closed.

    Otherwise each print would fail, and with it what a command does before it ends.
    """
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
