"""Finds the descendants of processes, and the owners of this machine's TCP connections."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

Ports = tuple[int, int]
"""A connection's local and remote port, as seen by the process that owns it."""
_ESTABLISHED = "01"


class Processes:
    """A snapshot of all processes of this machine."""

    def __init__(self) -> None:
        self._by_pid: dict[int, psutil.Process] = {}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for process in psutil.process_iter(["ppid"]):
            self._by_pid[process.pid] = process
            self._children[process.info["ppid"]].append(process.pid)

    def tree(self, pid: int) -> Iterator[psutil.Process]:
        """The process and its descendants; nothing if it does not exist."""
        if pid in self._by_pid:
            yield self._by_pid[pid]
            for child in self._children[pid]:
                yield from self.tree(child)


def is_running(process: psutil.Process) -> bool:
    """Whether this process is running; a later process with the same pid does not count."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def owners_of_connections(pids_by_owner: Mapping[int, Collection[int]]) -> dict[Ports, int]:
    """The owner of every established TCP connection of these processes."""
    by_inode: dict[str, int] = {}
    for owner, pids in pids_by_owner.items():
        for pid in pids:
            # The process or its descriptor may be gone by now.
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        by_inode[str(descriptor.readlink())] = owner
    return {ports: by_inode[inode] for ports, inode in _connections() if inode in by_inode}


def _connections() -> Iterator[tuple[Ports, str]]:
    """Yields the ports of each established connection, with the link target of its file descriptors."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    here, there = (int(fields[index].rpartition(":")[2], 16) for index in (1, 2))
                    yield (here, there), f"socket:[{fields[9]}]"
