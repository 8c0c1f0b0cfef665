"""Runs one process (player) behind each link, which takes part in a round for every number of bytes on its stdin.

A player's module is started with its rank and all addresses. It prints `ready` once it is connected to all others, and
after each round its start and end times, on the monotonic clock, which all processes share.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from benchmarks.lab.lab import Lab, LabError

_START_TIMEOUT_S = 60.0
_ROUND_TIMEOUT_S = 600.0
_ROOT = Path(__file__).parents[2]


class Players:
    """The players behind the first `num_peers` links."""

    def __init__(self, lab: Lab, module: str, num_peers: int) -> None:
        """Start the players. Raises LabError if they do not connect in time."""
        addresses = ",".join(lab.address(peer) for peer in range(num_peers))
        self._processes = [
            lab.popen(
                rank,
                [sys.executable, "-m", module, str(rank), addresses],
                cwd=_ROOT,
                # Suppresses torch's warnings that these addresses have no host names.
                env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(num_peers)
        ]
        for process in self._processes:
            if _line(process, _START_TIMEOUT_S) != "ready":
                raise LabError(f"{module} could not connect")

    def __enter__(self) -> Players:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def round_s(self, tensor_bytes: int) -> float:
        """Run a round on `tensor_bytes` bytes. Returns the time from the first player's start to the last one's end."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{tensor_bytes}\n".encode())
            process.stdin.flush()
        spans = [json.loads(_line(process, _ROUND_TIMEOUT_S)) for process in self._processes]
        return float(max(ended_at for _, ended_at in spans) - min(started_at for started_at, _ in spans))

    def close(self) -> None:
        """Repeating it is safe."""
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.wait(_START_TIMEOUT_S)
            process.stdout.close()


def play(take_part: Callable[[int], tuple[float, float]]) -> None:
    """The player's main loop: take part in rounds and print the times, until stdin ends."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(take_part(int(line))), flush=True)


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise LabError(f"a player was silent for {timeout_s:g} s")
    return process.stdout.readline().decode().strip()
