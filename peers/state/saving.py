"""Writing the outer state while rounds go on: held at one moment, written by a thread, asked about later."""

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

# Rounds go first.
_NICENESS = 10
# Two are never under way; a worker that died has not asked what became of its own.
_MAX_REMEMBERED = 4


@dataclass(frozen=True)
class Written:
    """What is in the directory now."""

    files: dict[str, FileRecord]
    head: str


class Saving:
    """Of one daemon. Used from its event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "saving", stand_back, (_NICENESS,))
        self._writing: dict[Path, asyncio.Future[Written]] = {}

    async def begin(self, state: OuterState, residuals: Sequence[Residuals], directory: Path) -> None:
        """Hold the state as it is now, and begin to write it; later commits take nothing from it.

        Raises OSError where the state is being changed.
        """
        held = await asyncio.to_thread(HeldState, state, residuals)
        while len(self._writing) >= _MAX_REMEMBERED:
            self._writing.pop(next(iter(self._writing)))
        writing = asyncio.get_running_loop().run_in_executor(self._pool, _write, held, directory)
        # Nobody may ever ask.
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._writing[directory] = writing

    async def finish(self, directory: Path) -> Written:
        """What was begun for this directory, once it is done; to be asked once. Raises OSError."""
        writing = self._writing.pop(directory, None)
        if writing is None:
            raise OSError(f"nothing is being saved to {directory}")
        return await asyncio.shield(writing)


def _write(held: HeldState, directory: Path) -> Written:
    with held:
        return Written(held.write(directory), held.snapshot.header.head)
