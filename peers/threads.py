"""Threads that work on a state: how many, in which floating-point mode, and at which priority beside the training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from peers.system import make_thread_nicer, num_cores

AUTOGROUP = Path("/proc/self/autogroup")
_MAX_THREADS = 16
"""A bound for machines of hundreds of cores: memory bandwidth limits this work."""

T = TypeVar("T")
P = TypeVar("P")


def num_threads() -> int:
    """Threads for work on all values of a state."""
    return min(_MAX_THREADS, num_cores())


def keep_denormals() -> None:
    """Switch flushing of denormals off in the calling thread, whose results must have the same bits on all peers."""
    # Each thread has its own mode, and a library loaded elsewhere may have changed the one that new threads inherit.
    torch.set_flush_denormal(False)


def exact_threads(name: str, niceness: int = 0) -> ThreadPoolExecutor:
    """`num_threads` threads, whose results have the same bits on all peers; `niceness` is relative to the caller's."""

    def begin() -> None:
        keep_denormals()
        if niceness:
            stand_back(niceness)

    return ThreadPoolExecutor(num_threads(), name, begin)


def in_exact_threads(
    name: str, work: Callable[[list[P]], T], parts: Iterable[P], niceness: int = 0
) -> list[T]:
    """Divide these parts evenly among `exact_threads`; each calls `work` once, with its own. Returns the results."""
    every = list(parts)
    count = min(num_threads(), len(every))
    with exact_threads(name, niceness) as pool:
        return list(pool.map(work, [every[first::count] for first in range(count)]))


def stand_back(niceness: int) -> None:
    """Raise the niceness of the calling thread, which must have been started for this task alone.

    It takes privileges to lower the niceness again. On an idle processor the thread runs as fast as before.
    """
    # If this is not allowed, the thread competes with the others at the same priority.
    with contextlib.suppress(OSError):
        make_thread_nicer(niceness)


def give_way(niceness: int) -> None:
    """Give the session that this process leads, if it leads one, a lower priority than the user's other sessions.

    Linux may divide processor time among sessions first (sched_autogroup): then the daemon's threads, however nice,
    would together get as much as the trainer. Does nothing on other systems.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(f"{niceness}\n", encoding="ascii")
