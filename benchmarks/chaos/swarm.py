"""The swarm that chaos strikes: a coordinator, and light peers behind doors, each with a life that is written down."""

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

from benchmarks.chaos import inside
from benchmarks.chaos.coordinator import Coordinator
from benchmarks.chaos.links import Doors, free_port
from benchmarks.light_swarm import LightPeer, LightSwarm, children_of, wait_until

RUN_ID = "chaos"
COORDINATOR = -1
GONE_WITHIN_S = 10.0


@dataclass
class Life:
    """Of a peer's process. Times in Unix seconds."""

    rank: int
    started_at: float
    pid: int
    ended_at: float | None = None
    ended_by: str = ""
    """The kind of fault; empty: nobody did this."""
    frozen: list[tuple[float, float]] = field(default_factory=list)
    """From when until when."""


class ChaosSwarm(LightSwarm):
    """Peers come back under the same ports, doors and keys. A context manager."""

    def __init__(self, directory: Path, num_peers: int, **worker: Any) -> None:
        super().__init__(directory, [], RUN_ID, **worker)
        self.galaxy_size = num_peers
        self.doors = Doors(self._pids_of)
        self.lives: list[Life] = []
        self._seen: dict[int, tuple[str, int]] = {}
        """When each process began that a life has had, and whose it was, by its id."""
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
        self._see(self._coordinator.pid, COORDINATOR)

    def kill_coordinator(self) -> None:
        self._see(self._coordinator.pid, COORDINATOR)
        self._coordinator.kill()

    # Peers

    def start(self, rank: int, **overrides: Any) -> LightPeer:
        # Its ports are free once its p2pd is gone too.
        wait_until(lambda: not self.left_over(rank), f"the end of peer {rank}'s processes", GONE_WITHIN_S)
        peer = super().start(rank, **overrides)
        self.lives.append(Life(rank, time.time(), peer.process.pid))
        self._see(peer.process.pid, rank)
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
        """The one that lasts."""
        return next(
            (life for life in reversed(self.lives) if life.rank == rank and life.ended_at is None), None
        )

    def end(self, rank: int, kind: str) -> None:
        """By the fault of this kind."""
        life = self.life_of(rank)
        if life is None:
            return
        self._see(life.pid, rank)
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
        """No file of its daemon's may grow, as under a quota."""
        if (life := self.life_of(rank)) is not None:
            with contextlib.suppress(ProcessLookupError):
                most = 0 if is_full else resource.RLIM_INFINITY
                resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def tell(self, rank: int, **what: float) -> None:
        inside.tell(self.directory / f"peer{rank}", what)

    # Processes

    def notice_ends(self) -> list[Life]:
        """Lives that have ended though nothing was done to them, since the last call."""
        ended = []
        for life in self.lives:
            if life.ended_at is None:
                self._see(life.pid, life.rank)
                if not self.peers[life.rank].process.is_alive():
                    life.ended_at = time.time()
                    ended.append(life)
        return ended

    def leave_all(self) -> None:
        """As at Ctrl-C."""
        for rank in self.peers:
            self.end(rank, "end")
        for process in self._processes:
            process.join(GONE_WITHIN_S)

    def left_over(self, rank: int | None = None) -> list[int]:
        """Processes of lives (of this rank) that have ended which are there still."""
        lasting = {pid for life in self.lives if life.ended_at is None for pid in self._tree_of(life.pid)}
        return [
            pid
            for pid, (began, owner) in self._seen.items()
            if rank in (None, owner) and _began(pid) == began and pid not in lasting
        ]

    def _see(self, root: int, rank: int) -> None:
        for pid in self._tree_of(root):
            if (began := _began(pid)) and self._seen.get(pid, ("", 0))[0] != began:
                self._seen[pid] = began, rank

    def _tree_of(self, pid: int) -> list[int]:
        with contextlib.suppress(ProcessLookupError):
            return [pid, *(below for child, _ in children_of(pid) for below in self._tree_of(child))]
        return []

    def _signal(self, life: Life, number: signal.Signals) -> None:
        for pid in self._tree_of(life.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _pids_of(self) -> dict[int, list[int]]:
        lives = [life for life in list(self.lives) if life.ended_at is None]
        return {life.rank: self._tree_of(life.pid) for life in lives}


def _began(pid: int) -> str:
    """When this process began, in the kernel's ticks; empty where it runs no more."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
        )
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
