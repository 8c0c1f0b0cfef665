"""How many threads work on a state, how they round, and which of this machine's go first, where rounds run beside the
training."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from peers.system import make_thread_nicer

AUTOGROUP = Path("/proc/self/autogroup")
_MAX_THREADS = 4


def num_threads() -> int:
    """Threads for work on all values of a state."""
    return min(_MAX_THREADS, os.cpu_count() or 1)


def keep_denormals() -> None:
    """Switch flushing of denormals off, in a thread whose results must have the same bits on all peers."""
    # Flushing is a state of each thread, and a library loaded elsewhere may have changed what new threads inherit.
    torch.set_flush_denormal(False)


def exact_threads(name: str) -> ThreadPoolExecutor:
    """`num_threads` threads, whose results have the same bits on all peers."""
    return ThreadPoolExecutor(num_threads(), name, keep_denormals)


def stand_back(niceness: int) -> None:
    """Have the calling thread be so much nicer to all others than it was; only for one that was begun for its task.

    It cannot be taken back without privileges. Where nothing else wants the processor it changes nothing.
    """
    # Where that is not allowed it is merely in the others' way.
    with contextlib.suppress(OSError):
        make_thread_nicer(niceness)


def give_way(niceness: int) -> None:
    """Let other sessions of this user come first, where this process leads a session of its own.

    Linux may share out time by session before it looks at threads (sched_autogroup): then those of the daemon, however
    nice, take as much together as the trainer. Does nothing elsewhere.
    """
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text(f"{niceness}\n", encoding="ascii")
