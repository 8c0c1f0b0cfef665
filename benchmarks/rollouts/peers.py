"""Starts a run of GRPO as users do, each peer with its share of the CPUs, and reads the peers' records."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rollouts.shares import share
from benchmarks.swarm_harness import started

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 15.0
_MARK = "--initial-peers "


@dataclass
class Peer:
    """One `diloco peer`, running or not."""

    process: subprocess.Popen[bytes]
    directory: Path
    was_killed: bool = False

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.directory / "run" / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # The last line may be incomplete.
        lines = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return [record for record in lines if record["kind"] == kind]

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """SIGKILL the peer and all processes that it has started."""
        self.was_killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Run:
    """A context manager: one `diloco dht start`, and the peers that are started."""

    def __init__(self, directory: Path, *, num_cores: float) -> None:
        """`num_cores`: the CPU time of each peer, in cores."""
        self._directory, self._num_cores = directory, num_cores
        self._stack = contextlib.ExitStack()
        self.peers: list[Peer] = []

    def __enter__(self) -> Run:
        with contextlib.ExitStack() as stack:
            coordinator = self._started(
                stack, "coordinator", ["dht", "start", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"], ()
            )
            self._wait(lambda: _MARK in coordinator.output, "the coordinator's address", _START_TIMEOUT_S)
            self._address = coordinator.output.partition(_MARK)[2].split()[0]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, *words: object) -> Peer:
        """Start `diloco peer` with these flags."""
        name = f"peer-{len(self.peers)}"
        prefix = self._stack.enter_context(share(name, self._num_cores))
        run_dir = self._directory / name / "run"
        argv = ["peer", "--initial-peers", self._address, "--device", "cpu", "--run-dir", str(run_dir)]
        peer = self._started(self._stack, name, [*argv, *map(str, words)], prefix)
        self.peers.append(peer)
        return peer

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll until the condition holds. Raises SystemExit after the timeout, or if a peer has ended by itself."""
        self._wait(condition, what, timeout_s, self.peers)

    def _wait(
        self, condition: Callable[[], bool], what: str, timeout_s: float, watched: Sequence[Peer] = ()
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for peer in watched:
                if peer.process.poll() is not None and not peer.was_killed:
                    raise SystemExit(f"a peer ended before {what}:\n{peer.output[-3000:]}")
            if time.monotonic() > deadline:
                said = "\n".join(peer.output[-1000:] for peer in self.peers)
                raise SystemExit(f"{what} did not come in {timeout_s:g} s:\n{said}")
            time.sleep(0.5)

    def _started(
        self, stack: contextlib.ExitStack, name: str, argv: Sequence[str], prefix: Sequence[str]
    ) -> Peer:
        directory = self._directory / name
        directory.mkdir(parents=True)
        peer = Peer(started(argv, directory, prefix), directory)
        stack.callback(ended, peer)
        return peer


def ended(peer: Peer) -> None:
    if peer.process.poll() is None:
        peer.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            peer.process.wait(_STOP_TIMEOUT_S)
    peer.kill()
