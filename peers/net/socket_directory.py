"""Private directories for Unix sockets, and the removal of those that killed processes left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Self

from peers.timing import COMMIT_S

_PREFIX = "diloco-sockets-"
_LOCK = "lock"
# A Unix socket's path has 108 bytes, and the longest name in the directory is short.
_MAX_PATH_BYTES = 80


class SocketDirectory:
    """A new directory that only this user can enter, with a path short enough for Unix sockets. A context manager."""

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) + len(_PREFIX) > _MAX_PATH_BYTES - 10:
            parent = "/tmp"
        _sweep(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # Held as long as the process lives, so that another one's clean-up can tell live directories from stale ones.
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """May be repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _sweep(parent: Path) -> None:
    """Remove the directories of this user's dead processes."""
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            # A younger directory's owner may be about to lock it.
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < COMMIT_S:
                continue
            with (directory / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
