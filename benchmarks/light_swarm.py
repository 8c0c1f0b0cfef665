"""Real daemons on loopback with light workers, for the fault tests and the chaos benchmark.

Every peer is a process with its own p2pd and worker process; it is always started by the same call and killed by its
pid. Daemons are forked from a fork server that has imported torch and hivemind once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from diloco.train.metrics_file import Tail
from peers.net.identity import load, load_or_create

_ROOT = Path(__file__).parent.parent
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["peers.daemon.main", "hivemind.dht.node", "peers.net.libp2p.transport"])

DEADLINE_S = 180.0


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """Poll until the condition is true, and return its value. Raises AssertionError after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about in {timeout_s:g} s")
        time.sleep(0.02)
    return value


@dataclass
class LightPeer:
    """One peer of a swarm, running or not, and the records of its worker over all its starts."""

    rank: int
    process: Any
    directory: Path
    killed: list[float] = field(default_factory=list)

    @property
    def history(self) -> list[dict[str, Any]]:
        return [dict(record) for record in Tail(self.directory / "history.jsonl").read()]

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.history if record["kind"] == kind]

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return self.records("epoch")

    @property
    def epoch(self) -> int:
        return self.epochs[-1]["epoch"] if self.epochs else 0

    @property
    def log(self) -> str:
        path = self.directory / "daemon.log"
        return path.read_text() if path.exists() else ""

    def kill(self) -> None:
        """SIGKILL the daemon only; its p2pd and its worker must end by themselves."""
        self.killed.append(time.time())
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def freeze(self) -> None:
        """SIGSTOP the daemon and its children."""
        for pid in (self.process.pid, *(pid for pid, _ in children_of(self.process.pid))):
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in (self.process.pid, *(pid for pid, _ in children_of(self.process.pid))):
            os.kill(pid, signal.SIGCONT)

    @property
    def error(self) -> str:
        """The error that ended the daemon; empty if there was none."""
        path = self.directory / "error"
        return path.read_text() if path.exists() else ""

    @property
    def address(self) -> str:
        """An address of the peer's DHT node."""
        found = re.findall(r"listening on (\S+)", self.log)
        return found[-1] if found else ""

    def kill_worker(self) -> int:
        pid = self.worker_pid
        os.kill(pid, signal.SIGKILL)
        return pid

    @property
    def worker_pid(self) -> int:
        return next(pid for pid, argv in children_of(self.process.pid) if "-m" in argv)


def children_of(pid: int) -> Iterator[tuple[int, list[str]]]:
    """Pids and command lines of a process's direct children. Raises ProcessLookupError if it does not exist."""
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        raise ProcessLookupError(f"no process {pid}") from None
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            if argv := child.cmdline():
                yield child.pid, argv


class LightSwarm:
    """A swarm of light peers. `start(rank)` starts a peer, also to join a running swarm or to return after a death."""

    def __init__(self, directory: Path, initial_peers: list[str], run_id: str, **worker: Any) -> None:
        self.directory, self.initial_peers, self.run_id = directory, initial_peers, run_id
        self.worker = {"numel": 1000, "local_steps": 4, "max_steps": 40, "step_s": 0.02, **worker}
        self.peers: dict[int, LightPeer] = {}
        self._processes: list[Any] = []
        self.galaxy_size = 1
        self.extra: dict[str, Any] = {}
        self.manifest: dict[str, Any] = {}
        self.worker_module = "benchmarks.light_worker"

    @property
    def num_started(self) -> int:
        """Number of processes started for all peers, restarts included."""
        return len(self._processes)

    def start(self, rank: int, **overrides: Any) -> LightPeer:
        directory = self.directory / f"peer{rank}"
        directory.mkdir(exist_ok=True)
        # Create the peer's key before its process starts: creating it holds the key's lock for a moment.
        self.peer_id(rank)
        worker = {**self.worker, "history": str(directory / "history.jsonl"), **overrides}
        process = FORK_SERVER.Process(
            target=run_light_peer,
            args=(
                self.config_of(rank, directory, worker),
                self.worker_module,
                worker,
                str(directory),
                self.preparation_of(rank),
            ),
        )
        process.start()
        # A rank may have two processes at once; `close` must end both.
        self._processes.append(process)
        known = self.peers.get(rank)
        self.peers[rank] = LightPeer(rank, process, directory, known.killed if known else [])
        return self.peers[rank]

    def peer_id(self, rank: int) -> str:
        """The peer id of a rank, even if it has not been started yet."""
        path = self.directory / f"peer{rank}" / self.run_id / f"{rank}.key"
        if not path.exists():
            load_or_create(path).release()
        return load(path).peer_id

    def config_of(self, rank: int, directory: Path, worker: dict[str, Any]) -> dict[str, Any]:
        """The fields of the DaemonConfig of a peer."""
        return {
            "run_id": self.run_id,
            "initial_peers": self.initial_peers,
            "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
            "world_rank": rank,
            "galaxy_size": self.galaxy_size,
            "manifest": {
                "hv.local_steps": worker["local_steps"],
                "hv.outer_lr": 0.7,
                "hv.outer_momentum": 0.9,
                "numel": worker["numel"],
                **self.manifest,
            },
            "state_dir": str(directory),
            **self.extra,
        }

    def preparation_of(self, rank: int) -> Callable[[], object] | None:
        """A function that the peer's process calls before it starts the daemon."""
        return None

    def start_all(self, num_peers: int, **overrides: Any) -> list[LightPeer]:
        self.galaxy_size = num_peers
        return [self.start(rank, **overrides) for rank in range(num_peers)]

    def wait_finished(self, ranks: list[int] | None = None, timeout_s: float = DEADLINE_S) -> None:
        for rank in ranks if ranks is not None else list(self.peers):
            peer = self.peers[rank]
            peer.process.join(timeout_s)
            assert peer.process.exitcode == 0, (
                f"peer {rank} ended with {peer.process.exitcode}:\n{peer.log[-3000:]}"
            )

    def check_digests(self) -> dict[int, str]:
        """Assert that all peers reported the same anchor digest for each epoch. Returns the digests by epoch."""
        digests: dict[int, set[str]] = {}
        for peer in self.peers.values():
            for record in peer.epochs:
                digests.setdefault(record["epoch"], set()).add(record["anchor_digest"])
        assert digests and all(len(found) == 1 for found in digests.values()), digests
        return {epoch: found.pop() for epoch, found in digests.items()}

    def close(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()


def run_light_peer(
    config: dict[str, Any],
    module: str,
    worker: dict[str, Any],
    directory: str,
    prepare: Callable[[], object] | None,
) -> None:
    """The main function of a peer's process."""
    from peers.daemon.config import DaemonConfig
    from peers.daemon.main import run_daemon
    from peers.daemon.supervisor import WorkerCommand

    logging.basicConfig(
        filename=f"{directory}/daemon.log",
        level=logging.DEBUG,
        format="%(asctime)s %(name)s %(message)s",
        force=True,
    )
    logging.getLogger("asyncio").setLevel(logging.INFO)
    if prepare is not None:
        prepare()

    def command(manifest: Any, _is_own: bool, world_rank: int, link: Path) -> WorkerCommand:
        return WorkerCommand(
            argv=[sys.executable, "-m", module, json.dumps(worker)],
            env={**os.environ, "DILOCO_LINK": str(link), "OMP_NUM_THREADS": "1"},
            cwd=_ROOT,
            log_path=Path(directory) / "worker.log",
        )

    async def live() -> int:
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
        return await run_daemon(DaemonConfig(**config), worker=command)

    try:
        sys.exit(asyncio.run(live()))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    except Exception as error:
        logging.exception("it ended")
        Path(directory, "error").write_text(str(error))
        sys.exit(1)
