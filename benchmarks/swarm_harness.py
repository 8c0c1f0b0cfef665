"""Starts a swarm as users do, with one `diloco dht start` and N `diloco peer`, and collects its loops' records.

with Swarm(job, directory, seats=[Seat(address="127.0.0.1")] * 2) as swarm:
    for record in swarm.run_epoch(1): ...
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.light_loop import Paced

_ROOT = Path(__file__).parent.parent
_START_TIMEOUT_S = 120.0
_START_EACH_S = 5.0
_ROUND_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2
"""Not shorter, since polling uses the CPU that peers are measured on."""
_RUN_ID = "bench"


class SwarmError(RuntimeError):
    """A process has ended or missed a deadline, or peers have different anchors."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a peer runs."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    """Words in front of the peer's command, to run it in a network namespace."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training loop of the peers, and their flags."""

    loop: Paced
    worker: str = "benchmarks.light_loop"
    """The module that runs the loop."""
    local_steps: int = 1
    is_gated: bool = True
    """Whether an epoch ends only when `run_epoch` is called for it."""
    flags: tuple[str, ...] = ()
    """Additional flags of `diloco peer`, for all peers."""
    slower: Mapping[int, float] = field(default_factory=dict)
    """By world rank, the factor by which a peer's steps last longer than those of the others."""


@dataclass
class Peer:
    """One `diloco peer`, running or not."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.directory / "history.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # The last line may be incomplete.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def epochs(self) -> dict[int, dict[str, Any]]:
        return {record["epoch"]: record for record in self.records if record["kind"] == "epoch"}

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """SIGKILL the daemon only; its child processes end by themselves."""
        self.process.kill()
        self.process.wait()


@dataclass
class Swarm:
    """A context manager that starts the processes and ends them."""

    job: Job
    directory: Path
    seats: Sequence[Seat]
    coordinator: Seat = field(default_factory=Seat)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._gate = self.directory / "gate"
        self._gate.write_text("0")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.peers: list[Peer] = []
        try:
            self._initial_peer = self._start_coordinator()
            for rank in range(len(self.seats)):
                self.start_peer(rank)
            self._wait(
                lambda: all(any(r["kind"] == "start" for r in peer.records) for peer in self.peers),
                "the start of all peers",
                _START_TIMEOUT_S + _START_EACH_S * len(self.seats),
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_peer(self, rank: int) -> Peer:
        directory = self.directory / f"peer-{rank}"
        directory.mkdir(exist_ok=True)
        gate = str(self._gate) if self.job.is_gated else ""
        loop = replace(
            self.job.loop,
            history=str(directory / "history.jsonl"),
            gate=gate,
            wait_s=self.job.loop.wait_s * self.job.slower.get(rank, 1.0),
        )
        worker = shlex.join(["python", "-m", self.job.worker, json.dumps(asdict(loop))])
        seat = self.seats[rank]
        argv = ["peer", "--initial-peers", self._initial_peer, "--host-maddrs", f"/ip4/{seat.address}/tcp/0"]
        argv += ["--run-id", _RUN_ID, "--world-rank", str(rank), "--galaxy-size", str(len(self.seats))]
        argv += ["--run-dir", str(directory / "run"), "--device", "cpu", "--worker", worker]
        argv += ["--hv.local-steps", str(self.job.local_steps), *self.job.flags]
        peer = Peer(self._popen(argv, seat, directory), directory)
        self.peers[rank:] = [peer]
        return peer

    def run_epoch(self, epoch: int, *, ranks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Let a gated epoch end. Returns each peer's record of it, after checking that the anchors are the same."""
        self._gate.with_suffix(".new").write_text(str(epoch))
        self._gate.with_suffix(".new").replace(self._gate)
        peers = [self.peers[rank] for rank in ranks] if ranks is not None else self.peers
        self._wait(
            lambda: all(epoch in peer.epochs for peer in peers), f"epoch {epoch}", _ROUND_TIMEOUT_S, peers
        )
        records = [peer.epochs[epoch] for peer in peers]
        if len(digests := {record["anchor_digest"] for record in records}) != 1:
            raise SwarmError(f"epoch {epoch} has the anchors {sorted(digests)}")
        return records

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until every peer has the commit of this epoch, or of a later one."""
        self._wait(
            lambda: all(max(peer.epochs, default=0) >= epoch for peer in self.peers),
            f"epoch {epoch}",
            _ROUND_TIMEOUT_S,
        )

    def wait_for_end(self) -> None:
        """Wait until every loop has ended, and check that all peers had the same anchor after each epoch."""
        self._wait(
            lambda: all(any(r["kind"] == "end" for r in peer.records) for peer in self.peers),
            "the end of all loops",
            _ROUND_TIMEOUT_S,
        )
        epochs = [{epoch: record["anchor_digest"] for epoch, record in p.epochs.items()} for p in self.peers]
        for epoch in set().union(*epochs):
            if len(digests := {found[epoch] for found in epochs if epoch in found}) != 1:
                raise SwarmError(f"epoch {epoch} has the anchors {sorted(digests)}")

    def close(self) -> None:
        """Repeating it is safe."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            # Kill what is left of the process's session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start_coordinator(self) -> str:
        directory = self.directory / "coordinator"
        directory.mkdir(exist_ok=True)
        argv = [
            "dht",
            "start",
            "--run-id",
            _RUN_ID,
            "--host-maddrs",
            f"/ip4/{self.coordinator.address}/tcp/0",
        ]
        self._popen(argv, self.coordinator, directory)
        output = directory / "output"
        mark = "--initial-peers "

        def address() -> str:
            lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
            return next((line.partition(mark)[2] for line in lines if mark in line), "")

        self._wait(lambda: bool(address()), "the coordinator's address", _START_TIMEOUT_S)
        return address()

    def _popen(self, argv: Sequence[str], seat: Seat, directory: Path) -> subprocess.Popen[bytes]:
        process = started(argv, directory, seat.prefix)
        self._processes.append(process)
        return process

    def _wait(
        self,
        condition: Callable[[], bool],
        what: str,
        timeout_s: float,
        peers: Sequence[Peer] | None = None,
    ) -> None:
        """Poll until the condition holds. Raises SwarmError after the timeout, or if a peer has ended with an error."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            for peer in self.peers if peers is None else peers:
                if peer.process.poll() not in (None, 0):
                    raise SwarmError(f"a peer ended before {what}:\n{peer.output[-2000:]}")
            if time.monotonic() > deadline:
                said = "\n".join(peer.output[-1000:] for peer in self.peers)
                raise SwarmError(f"{what} did not come in {timeout_s:g} s:\n{said}")
            time.sleep(_POLL_S)


def started(argv: Sequence[str], directory: Path, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `diloco` with these words and one thread, in its own session. Its output and state go to `directory`."""
    with (directory / "output").open("ab") as output:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "diloco", *argv],
            cwd=_ROOT,
            env={
                **os.environ,
                "XDG_STATE_HOME": str(directory / "state"),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
