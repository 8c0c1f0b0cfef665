"""Saving the outer state while rounds go on: `begin` takes a snapshot that a thread writes, `finish` waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from peers.reduce.residuals import Residuals
from peers.state.files import HeldState
from peers.state.outer_state import OuterState
from peers.state.whole_files import FileRecord
from peers.threads import stand_back

# Below the priority of rounds.
_NICENESS = 10
# More than the one that is being written: a worker that died never asks for the outcome of its own.
_MAX_REMEMBERED = 4


@dataclass(frozen=True)
class Written:
    """What was written to the directory."""

    files: dict[str, FileRecord]
    head: str


class Saving:
    """Used from the daemon's event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "saving", stand_back, (_NICENESS,))
        self._writing: dict[Path, asyncio.Future[Written]] = {}

    async def begin(self, state: OuterState, residuals: Sequence[Residuals], directory: Path) -> None:
        """Take a snapshot of the state, and begin to write it; later commits do not change what is written.

        Raises OSError if a commit is being applied.
        """
        held = await asyncio.to_thread(HeldState, state, residuals)
        while len(self._writing) >= _MAX_REMEMBERED:
            self._writing.pop(next(iter(self._writing)))
        writing = asyncio.get_running_loop().run_in_executor(self._pool, _write, held, directory)
        # Retrieve the exception: perhaps nobody ever calls `finish`.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._writing[directory] = writing

    async def finish(self, directory: Path) -> Written:
        """Wait for what `begin` started for this directory. To be called once. Raises OSError."""
        writing = self._writing.pop(directory, None)
        if writing is None:
            raise OSError(f"nothing is being saved to {directory}")
        return await asyncio.shield(writing)


def _write(held: HeldState, directory: Path) -> Written:
    with held:
        return Written(held.write(directory), held.snapshot.header.head)
