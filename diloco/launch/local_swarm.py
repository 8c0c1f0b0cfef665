"""Runs a swarm on this machine: a coordinator and peers, as supervised processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.errors import USER_ERROR, DilocoError, UserError
from diloco.launch.live import PeerRow
from diloco.launch.phase_file import write_phase
from diloco.options.trainer import TrainConfig, to_toml
from diloco.train.devices import needs_two_gpus, thread_settings
from diloco.train.file_tail import FileTail
from diloco.train.run_dir import reason_in, run_id_of
from peers.admission.secrets import SECRET_ENV
from peers.daemon.restarts import WORKER_ENDED, WorkerEnd
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.protocol.reports import Phase

ADDRESS_FLAG = "--initial-peers "
_PORTS = range(20_000, 30_000)
_START_TIMEOUT_S = 60.0
_LOG_INTERVAL_S = 1.0
# A peer needs a few seconds to stop its own workers and p2pd.
_STOP_TIMEOUT_S = 6.0
# Fields that LocalSwarm sets for each peer.
PER_PEER_FIELDS = frozenset(
    {"run_dir", "hv.initial_peers", "hv.world_rank", "hv.galaxy_size", "hv.host_maddrs", "hv.data_port"}
    # The coordinator of a local swarm listens on loopback and admits every peer.
    | {"hv.swarm_secret_file", "hv.admission_key_file", "hv.allowlist_file"}
)


@dataclass
class LocalPeer:
    """A peer's process and its row in the live view."""

    world_rank: int
    supervisor: Supervisor
    row: PeerRow
    log: FileTail

    def lose(self) -> int:
        """Simulate the loss of the machine: SIGKILL all of the peer's processes. Returns their number."""
        pids = [pid for root in self.supervisor.pids for pid in (root, *descendants(root))]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)


@dataclass
class LocalSwarm:
    """All peers have the configuration `config`; the user has set the fields `named`. `say` prints messages."""

    config: TrainConfig
    named: frozenset[str]
    run_dir: Path
    num_peers: int
    say: Callable[[str], None]
    gpus: Sequence[str] = ()
    """This machine's GPUs, to divide among the peers."""
    peers: list[LocalPeer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._config_path = self.run_dir / "config.toml"
        self._config_path.write_text(
            to_toml(self.config, only=self.named - PER_PEER_FIELDS), encoding="utf-8"
        )
        self._environment = environment_of_peers(os.environ, self.run_dir, self.num_peers)
        # The runs at wandb, for instance, are grouped by it.
        self._run_id = self.config.hv.run_id if "hv.run_id" in self.named else run_id_of(self.run_dir)
        command = coordinator_command(
            self._run_id, _lasting_port(), self._environment, self.run_dir / "logs" / "dht.log"
        )
        self._coordinator = Supervisor(command, stop_timeout_s=_STOP_TIMEOUT_S)
        # Files of an earlier run in this directory must be ignored.
        now = time.time()
        self.rows = [
            PeerRow(f"peer {rank}", self.run_dir / f"peer-{rank}", since=now)
            for rank in range(self.num_peers)
        ]

    async def run(self) -> None:
        """Run until all peers have finished. If one fails, raises UserError or DilocoError with its last output.

        No process is left afterwards, even if cancelled.
        """
        for row in self.rows:
            row.run_dir.mkdir(parents=True, exist_ok=True)
            write_phase(row.run_dir, Phase(name="waiting for the coordinator"))
        log = FileTail(self._coordinator.command.log_path)
        coordinator = asyncio.create_task(self._coordinator.run())
        tasks: list[asyncio.Task[Any]] = [coordinator]
        try:
            address = await coordinator_address(coordinator, log)
            self.peers += [self._peer(rank, address) for rank in range(self.num_peers)]
            ends = {asyncio.create_task(peer.supervisor.run()): peer for peer in self.peers}
            tasks += ends
            tasks += [asyncio.create_task(self._relay_failures(peer)) for peer in self.peers]
            pending: set[asyncio.Task[WorkerEnd]] = set(ends)
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for end in done:
                    peer = ends[end]
                    _check_end(end.result().code, peer.row.name, peer.log)
                    peer.row.state = "done"
                late = {end for end in pending if ends[end].row.state in ("starting", "restarting")}
                await asyncio.gather(*(self._give_up(ends[end]) for end in late))
                pending -= late
        finally:
            supervisors = [self._coordinator, *(peer.supervisor for peer in self.peers)]
            await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_up(self, peer: LocalPeer) -> None:
        """Stop a peer that was still restarting when another one finished, since it would train alone."""
        self.say(f"{peer.row.name} was still restarting when the training ended")
        await peer.supervisor.stop()
        peer.row.state = "late"

    async def _relay_failures(self, peer: LocalPeer) -> None:
        """Print why a peer's worker has ended, which the peer writes to its log only; until cancelled."""
        while True:
            await asyncio.sleep(_LOG_INTERVAL_S)
            for line in peer.log.read_lines():
                if line.startswith(WORKER_ENDED):
                    self.say(f"{peer.row.name}: {line}")

    def _peer(self, rank: int, address: str) -> LocalPeer:
        row = self.rows[rank]
        flags = {
            "--config": str(self._config_path),
            "--run-id": self._run_id,
            "--initial-peers": address,
            "--world-rank": str(rank),
            "--galaxy-size": str(self.num_peers),
            "--host-maddrs": "/ip4/127.0.0.1/tcp/0",
            "--run-dir": str(row.run_dir),
            "--nproc-per-node": "1",
        }
        if "hv.transport" not in self.named:
            # Over loopback, TLS would cost time and protect from nobody: the swarm is open to whoever can connect.
            flags["--hv.transport"] = "tcp"
        command = WorkerCommand(
            argv=(sys.executable, "-m", "diloco", "peer", *(part for pair in flags.items() for part in pair)),
            env={**self._environment, **self._gpus_of(rank)},
            cwd=Path.cwd(),
            log_path=row.run_dir / "logs" / "peer.log",
            reason_in=reason_in,
        )

        def on_exit(end: WorkerEnd) -> None:
            row.state = "ended"
            if end.restarts:
                row.restarted(time.time())
                why = f": {end.reason}" if end.reason and end.num_same == 1 else ""
                self.say(f"{row.name} ended with exit code {end.code}; restarting it{why}")

        supervisor = Supervisor(command, on_exit, stop_timeout_s=_STOP_TIMEOUT_S)
        return LocalPeer(rank, supervisor, row, FileTail(command.log_path))

    def _gpus_of(self, rank: int) -> dict[str, str]:
        """The GPU of the peer's trainer, followed by that of its vLLM server if it starts one, as in a sweep."""
        if self.gpus and needs_two_gpus(self.config):
            return {"CUDA_VISIBLE_DEVICES": f"{self.gpus[2 * rank + 1]},{self.gpus[2 * rank]}"}
        return gpu_of_peer(rank, self.gpus)


def coordinator_command(
    run_id: str, port: int, environment: Mapping[str, str], log_path: Path
) -> WorkerCommand:
    """The command of a coordinator on loopback. Its port is fixed, so that peers find it again after a restart."""
    flags = ("--run-id", run_id, "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
    return WorkerCommand(
        argv=(sys.executable, "-m", "diloco", "dht", "start", *flags),
        env=environment,
        cwd=Path.cwd(),
        log_path=log_path,
    )


async def coordinator_address(end: asyncio.Future[WorkerEnd], log: FileTail) -> str:
    """Wait until the coordinator prints its address to the log. `end` is done when its process has ended.

    Raises UserError or DilocoError with the coordinator's last output.
    """
    deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline:
        if end.done():
            _check_end(end.result().code or 1, "diloco dht start", log)
        for line in log.read_lines():
            if line.startswith(ADDRESS_FLAG):
                return line.removeprefix(ADDRESS_FLAG).split()[0]
        await asyncio.sleep(0.05)
    raise DilocoError(f"`diloco dht start` printed no address within {_START_TIMEOUT_S:g} s; see {log.path}")


def environment_of_peers(environment: Mapping[str, str], run_dir: Path, num_peers: int) -> dict[str, str]:
    """The environment of the peers and the coordinator, which keep their keys and ledger in the run's directory."""
    inherited = {name: value for name, value in environment.items() if name != SECRET_ENV}
    own = {"XDG_STATE_HOME": str(run_dir / "state"), "PYTHONUNBUFFERED": "1"}
    return {**inherited, **thread_settings(environment, num_peers), **own}


def gpu_of_peer(rank: int, gpus: Sequence[str]) -> dict[str, str]:
    """The GPU of a peer, assigned round-robin; peers share GPUs if there are more peers than GPUs."""
    return {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} if gpus else {}


def descendants(root: int) -> list[int]:
    """The process ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            # The command's name, in parentheses, may contain spaces and parentheses.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, unseen = [], [root]
    while unseen:
        for child in children.get(unseen.pop(), []):
            found.append(child)
            unseen.append(child)
    return found


def _check_end(code: int, name: str, log: FileTail) -> None:
    if code == USER_ERROR:
        raise UserError(log.last_words() or f"{name} was refused; see {log.path}")
    if code:
        raise DilocoError(f"{name} ended with exit code {code}. The end of {log.path}:\n{log.last_words()}")


def _lasting_port() -> int:
    """A free port outside the ephemeral range, whose ports an outgoing connection could take before they are bound."""
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DilocoError(
        f"none of a hundred random ports from {_PORTS.start} to {_PORTS.stop - 1} is free on this machine"
    )
