"""What goes wrong, and what is noted, inside the process of a light peer: set up before it becomes a peer.

Commands come one a line through the FIFO `control` in its directory: {"clock": seconds} and {"disorder": share}.
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
from peers.protocol.mesh import Said
from peers.protocol.messages import Message
from peers.state.header import StateHeader
from peers.state.outer_state import OuterState

LATE_S = 0.3
_wrong: dict[str, float] = {"clock": 0.0, "disorder": 0.0}


def control_of(directory: Path) -> Path:
    return directory / "control"


def tell(directory: Path, what: Mapping[str, float]) -> None:
    """To the process, if there is one."""
    with contextlib.suppress(OSError):
        fd = os.open(control_of(directory), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(fd, (json.dumps(what) + "\n").encode())
        finally:
            os.close(fd)


def prepare(directory: Path, rank: int) -> None:
    """In the process of the peer."""
    _note_commits(directory / "commits.jsonl", rank)
    _let_clock_jump()
    _let_messages_stray(random.Random(os.getpid()))
    control = control_of(directory)
    if not control.exists():
        os.mkfifo(control)
    # Both ways, so that it never comes to an end.
    fd = os.open(control, os.O_RDWR)
    threading.Thread(target=_obey, args=(fd,), name="control", daemon=True).start()


def _obey(fd: int) -> None:
    with os.fdopen(fd, encoding="utf-8") as commands:
        for line in commands:
            _wrong.update(json.loads(line))


def _note_commits(path: Path, rank: int) -> None:
    """One line for each state that this process has come to by a commit."""
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
            # Also where its disk is full.
            file.write(json.dumps(record) + "\n")
            file.flush()

    OuterState.end_change = end_change  # type: ignore[assignment, method-assign]


def _let_clock_jump() -> None:
    really = time.time
    time.time = lambda: really() + _wrong["clock"]


def _let_messages_stray(chance: random.Random) -> None:
    """What peers say goes out twice, or late: past those that follow."""
    really_enqueue = LivePeer.enqueue

    def enqueue(self: LivePeer, message: Said | None) -> None:
        # How the peer stands for people, and lists and manifests, go in order.
        if not isinstance(message, Message):
            really_enqueue(self, message)
            return
        if chance.random() < _wrong["disorder"]:
            really_enqueue(self, message)
        if chance.random() < _wrong["disorder"]:
            late_s = chance.uniform(0.0, LATE_S)
            asyncio.get_running_loop().call_later(late_s, really_enqueue, self, message)
        else:
            really_enqueue(self, message)

    LivePeer.enqueue = enqueue  # type: ignore[method-assign]
