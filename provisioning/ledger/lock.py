"""A file lock. It is released when the process that holds it ends; the file contains its process id."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from provisioning.errors import Busy, UserError

_POLL_S = 0.05


@contextlib.contextmanager
def held(path: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock. Raises Busy (holder's process id) after `wait_s`, or UserError if the file cannot be opened."""
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from error
    with file:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise Busy(file.read().strip() or "unknown") from None
                time.sleep(_POLL_S)
        # On a full disk the process id cannot be written, but the lock works.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        try:
            yield
        finally:
            # Erase the process id: it must not be read as that of the next holder.
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), 0)


def holder(path: Path) -> int | None:
    """The id of the process that holds the lock; None: nobody holds it. Raises OSError if the file cannot be read."""
    with path.open(encoding="utf-8") as file:
        try:
            # A shared lock, so that two concurrent calls do not mistake each other for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = file.read().strip()
            return int(text) if text.isdigit() else None
        return None
