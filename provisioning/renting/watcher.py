"""The watcher: a background process that gives pods back at their rental end and keeps the swarm (swarm/keeper.py).

It holds the lock `<state file>.watch` while it runs, and ends when nothing is left to watch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from provisioning.ledger.lock import holder

_STOP_TIMEOUT_S = 5.0


def lock_path(state_file: Path) -> Path:
    return state_file.with_name(f"{state_file.name}.watch")


def running_pid(state_file: Path) -> int | None:
    """The process id of the watcher; None: none runs."""
    return holder(lock_path(state_file)) if lock_path(state_file).exists() else None


def start(state_file: Path, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Start a watcher that outlives this command. Returns False if one runs already."""
    if running_pid(state_file) is not None:
        return False
    with state_file.with_name(f"{state_file.name}.watch.log").open("ab") as log:
        subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return True


def stop(state_file: Path) -> None:
    """End the watcher if one runs. May be repeated."""
    pid = running_pid(state_file)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.05)
        pid = running_pid(state_file)
