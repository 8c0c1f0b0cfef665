"""The swarm of the chaos benchmark: a coordinator, and light peers behind doors, whose starts and ends are recorded."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos import inside
from benchmarks.chaos.coordinator import Coordinator
from benchmarks.chaos.links import Doors, free_port
from benchmarks.chaos.processes import Processes, is_running
from benchmarks.light_swarm import LightPeer, LightSwarm, children_of, wait_until
from peers.daemon import pledges

RUN_ID = "chaos"
COORDINATOR = -1
GONE_WITHIN_S = 10.0
SNAPSHOT_INTERVAL_S = 1.0
"""Interval between snapshots of the peers' processes."""


@dataclass
class Life:
    """A peer's process from its start to its end. Times in Unix seconds."""

    rank: int
    started_at: float
    pid: int
    ended_at: float | None = None
    ended_by: str = ""
    """The kind of fault that ended it; empty if it ended by itself."""
    frozen: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which it was frozen."""


class ChaosSwarm(LightSwarm):
    """A context manager. Restarted peers have the same ports, doors and keys."""

    def __init__(self, directory: Path, num_peers: int, **worker: Any) -> None:
        super().__init__(directory, [], RUN_ID, **worker)
        self.galaxy_size = num_peers
        self.doors = Doors(self._pids_of)
        self.lives: list[Life] = []
        self._snapshot_at = 0.0
        self._seen: dict[psutil.Process, int] = {}
        """All processes of peers that were ever seen, with their ranks."""
        self._ports = {rank: (free_port(), free_port()) for rank in range(num_peers)}
        self._doors: dict[int, tuple[int, int]] = {}
        self._coordinator = Coordinator(directory / "coordinator", RUN_ID, free_port())

    def __enter__(self) -> ChaosSwarm:
        self.doors.__enter__()
        try:
            for rank, (control, data) in self._ports.items():
                self._doors[rank] = self.doors.open(rank, control), self.doors.open(rank, data)
            self.start_coordinator()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._coordinator.kill()
        for life in self.lives:
            if life.ended_at is None:
                self._signal(life, signal.SIGCONT)
        self.close()
        self.doors.__exit__()

    # The coordinator

    def start_coordinator(self) -> None:
        self.initial_peers = [self._coordinator.start()]

    def kill_coordinator(self) -> None:
        self._snapshot()
        self._coordinator.kill()

    # Peers

    def start(self, rank: int, **overrides: Any) -> LightPeer:
        # The peer's ports are free only after its p2pd has ended, too.
        wait_until(lambda: not self.left_over(rank), f"the end of peer {rank}'s processes", GONE_WITHIN_S)
        peer = super().start(rank, **overrides)
        self.lives.append(Life(rank, time.time(), peer.process.pid))
        return peer

    def config_of(self, rank: int, directory: Path, worker: dict[str, Any]) -> dict[str, Any]:
        others = [other for other in self._doors if other != rank][:2]
        control, data = self._doors[rank]
        return super().config_of(rank, directory, worker) | {
            "initial_peers": [
                *self.initial_peers,
                *(f"/ip4/127.0.0.1/tcp/{self._doors[o][0]}/p2p/{self.peer_id(o)}" for o in others),
            ],
            "host_maddrs": [f"/ip4/127.0.0.1/tcp/{self._ports[rank][0]}"],
            "announce_maddrs": [f"/ip4/127.0.0.1/tcp/{control}"],
            "data_port": self._ports[rank][1],
            "announce_data_maddrs": [f"/ip4/127.0.0.1/tcp/{data}"],
        }

    def preparation_of(self, rank: int) -> Callable[[], object]:
        return partial(inside.prepare, self.directory / f"peer{rank}", rank)

    def life_of(self, rank: int) -> Life | None:
        """The current life of a rank, if its process is running."""
        return next(
            (life for life in reversed(self.lives) if life.rank == rank and life.ended_at is None), None
        )

    def end(self, rank: int, kind: str) -> None:
        """End the peer's process by a fault of this kind."""
        life = self.life_of(rank)
        if life is None:
            return
        self._snapshot()
        life.ended_at, life.ended_by = time.time(), kind
        with contextlib.suppress(ProcessLookupError, StopIteration):
            match kind:
                case "kill p2pd":
                    os.kill(
                        next(pid for pid, argv in children_of(life.pid) if "p2pd" in argv[0]), signal.SIGKILL
                    )
                case "leave":
                    os.kill(life.pid, signal.SIGTERM)
                case _:
                    os.kill(life.pid, signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        if (life := self.life_of(rank)) is not None:
            self._signal(life, signal.SIGSTOP)
            life.frozen.append((time.time(), float("inf")))

    def thaw(self, rank: int) -> None:
        if (life := self.life_of(rank)) is not None and life.frozen:
            self._signal(life, signal.SIGCONT)
            life.frozen[-1] = (life.frozen[-1][0], time.time())

    def fill_disk(self, rank: int, is_full: bool) -> None:
        """Limit all files of the daemon to the size of its pledges', or lift that. As with a full disk, checkpoints
        cannot be written, but what is overwritten in place can."""
        if (life := self.life_of(rank)) is not None:
            with contextlib.suppress(ProcessLookupError):
                most = pledges.FILE_BYTES if is_full else resource.RLIM_INFINITY
                resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def tell(self, rank: int, **what: float) -> None:
        inside.tell(self.directory / f"peer{rank}", what)

    # Processes

    def notice_ends(self) -> list[Life]:
        """Lives that have ended without a fault since the last call."""
        ended = []
        if time.monotonic() > self._snapshot_at + SNAPSHOT_INTERVAL_S:
            self._snapshot()
        for life in self.lives:
            if life.ended_at is None and not self.peers[life.rank].process.is_alive():
                life.ended_at = time.time()
                ended.append(life)
        return ended

    def leave_all(self) -> None:
        """End all peers by SIGKILL and wait for their processes."""
        for rank in self.peers:
            self.end(rank, "end")
        for process in self._processes:
            process.join(GONE_WITHIN_S)

    def left_over(self, rank: int | None = None) -> list[int]:
        """Pids of processes that are still running although their peer (of this rank) has ended."""
        lasting = {process for processes in self._snapshot().values() for process in processes}
        return [
            process.pid
            for process, owner in list(self._seen.items())
            if rank in (None, owner) and process not in lasting and is_running(process)
        ]

    def _snapshot(self) -> dict[int, list[psutil.Process]]:
        """The processes of the coordinator and of every running peer, by rank. Also notes them in `_seen`, since the
        owner of a process that outlives its parent could not be determined later."""
        self._snapshot_at = time.monotonic()
        roots = {life.rank: life.pid for life in list(self.lives) if life.ended_at is None}
        if self._coordinator.pid is not None:
            roots[COORDINATOR] = self._coordinator.pid
        processes = Processes()
        found = {rank: list(processes.tree(pid)) for rank, pid in roots.items()}
        self._seen |= {process: rank for rank, tree in found.items() for process in tree}
        return found

    def _signal(self, life: Life, number: signal.Signals) -> None:
        for process in Processes().tree(life.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _pids_of(self) -> dict[int, list[int]]:
        return {rank: [process.pid for process in tree] for rank, tree in self._snapshot().items()}
