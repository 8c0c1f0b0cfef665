"""A lock that one process holds, and that goes with it: a file, in which it writes its number."""

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
    """Raises Busy with the number of the process that holds it after `wait_s`, and UserError."""
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
        # A full disk takes no number, and the lock holds all the same.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def holder(path: Path) -> int | None:
    """The process that holds it, if there is one."""
    try:
        with held(path):
            return None
    except Busy as busy:
        return int(str(busy)) if str(busy).isdigit() else None
