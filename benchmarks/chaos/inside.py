"""Faults and records inside the process of a light peer, set up before its daemon starts.

Commands arrive as lines of the FIFO `control` in its directory: {"clock": seconds} and {"disorder": share}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers.net.live_peer import LivePeer
from peers.protocol.mesh import Announced, Said
from peers.protocol.messages import Directed
from peers.state.header import StateHeader
from peers.state.outer_state import OuterState

LATE_S = 0.3
_faults: dict[str, float] = {"clock": 0.0, "disorder": 0.0}


def control_of(directory: Path) -> Path:
    return directory / "control"


def tell(directory: Path, what: Mapping[str, float]) -> None:
    """Send a command to the process, if it is running."""
    with contextlib.suppress(OSError):
        fd = os.open(control_of(directory), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, (json.dumps(what) + "\n").encode())
        finally:
            os.close(fd)


def prepare(directory: Path, rank: int) -> None:
    """Set up the faults and records; called in the process of the peer."""
    _record_commits(directory / "commits.jsonl", rank)
    _patch_clock()
    _patch_enqueue(random.Random(os.getpid()))
    control = control_of(directory)
    if not control.exists():
        os.mkfifo(control)
    # Opened for reading and writing, so that there is never an end of file.
    fd = os.open(control, os.O_RDWR)
    threading.Thread(target=_read_commands, args=(fd,), name="control", daemon=True).start()


def _read_commands(fd: int) -> None:
    with os.fdopen(fd, encoding="utf-8") as commands:
        for line in commands:
            _faults.update(json.loads(line))


def _record_commits(path: Path, rank: int) -> None:
    """Write a line for each commit that this process applies."""
    really_end, clock = OuterState.end_change, time.time
    file = path.open("a", encoding="utf-8")

    def end_change(self: OuterState, header: StateHeader, *rest: Any) -> None:
        before = self.header
        really_end(self, header, *rest)
        record = {
            "rank": rank,
            "pid": os.getpid(),
            "time": clock(),
            "epoch": header.epoch,
            "parent": before.head,
            "head": header.head,
            "tokens": header.committed_tokens - before.committed_tokens,
            "committed_tokens": header.committed_tokens,
            "anchor_digest": header.anchor_digest,
            "momentum_digest": header.momentum_digest,
        }
        with contextlib.suppress(OSError):
            # The disk may be full, which is one of the faults.
            file.write(json.dumps(record) + "\n")
            file.flush()

    OuterState.end_change = end_change  # type: ignore[assignment, method-assign]


def _patch_clock() -> None:
    really = time.time
    time.time = lambda: really() + _faults["clock"]


def _patch_enqueue(chance: random.Random) -> None:
    """Send some messages twice, and delay some so that later ones overtake them."""
    really_enqueue = LivePeer.enqueue

    def enqueue(self: LivePeer, message: Said | None) -> None:
        # Reports, lists and manifests are not reordered.
        if not isinstance(message, Announced | Directed):
            really_enqueue(self, message)
            return
        if chance.random() < _faults["disorder"]:
            really_enqueue(self, message)
        if chance.random() < _faults["disorder"]:
            late_s = chance.uniform(0.0, LATE_S)
            asyncio.get_running_loop().call_later(late_s, really_enqueue, self, message)
        else:
            really_enqueue(self, message)

    LivePeer.enqueue = enqueue  # type: ignore[method-assign]
