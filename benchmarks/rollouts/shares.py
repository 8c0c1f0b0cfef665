"""Emulates equal machines on one machine: a cgroup for each peer limits its CPU time, whatever the others do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup/cpu")
_PERIOD_US = 100_000
_EMPTY_TIMEOUT_S = 10.0


def unavailable() -> str | None:
    """Why CPU time cannot be shared out here; None if it can."""
    if os.access(_ROOT / "cgroup.procs", os.W_OK) and (_ROOT / "cpu.cfs_quota_us").exists():
        return None
    return f"equal shares of the CPUs need root and the cpu controller at {_ROOT}"


@contextlib.contextmanager
def share(name: str, num_cores: float) -> Iterator[Sequence[str]]:
    """Words to put in front of a command, which limit all its processes together to this much CPU time."""
    group = _ROOT / f"diloco-bench-{os.getpid()}-{name}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(num_cores * _PERIOD_US)))
        yield ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"))
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _EMPTY_TIMEOUT_S
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            # Killed processes leave the group a moment later.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
