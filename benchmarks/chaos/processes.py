"""Which processes there are, whose they are, and whose a TCP connection of this machine is."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

Ports = tuple[int, int]
"""A connection's port at the end of the process, and at the other end."""
_ESTABLISHED = "01"


class Processes:
    """All processes of this machine, at one moment."""

    def __init__(self) -> None:
        self._by_pid: dict[int, psutil.Process] = {}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        for process in psutil.process_iter(["ppid"]):
            self._by_pid[process.pid] = process
            self._children[process.info["ppid"]].append(process.pid)

    def tree(self, pid: int) -> Iterator[psutil.Process]:
        """This one and all below it; nothing if it is gone."""
        if pid in self._by_pid:
            yield self._by_pid[pid]
            for child in self._children[pid]:
                yield from self.tree(child)


def is_running(process: psutil.Process) -> bool:
    """This very one, and not a later one of the same id."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def owners_of_connections(pids_by_owner: Mapping[int, Collection[int]]) -> dict[Ports, int]:
    """Of every established TCP connection of these processes, whose it is."""
    by_inode: dict[str, int] = {}
    for owner, pids in pids_by_owner.items():
        for pid in pids:
            # One that has ended meanwhile, or whose descriptor has.
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        by_inode[str(descriptor.readlink())] = owner
    return {ports: by_inode[inode] for ports, inode in _connections() if inode in by_inode}


def _connections() -> Iterator[tuple[Ports, str]]:
    """With what a descriptor of it links to."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    here, there = (int(fields[index].rpartition(":")[2], 16) for index in (1, 2))
                    yield (here, there), f"socket:[{fields[9]}]"
