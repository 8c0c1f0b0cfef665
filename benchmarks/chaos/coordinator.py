"""Runs a coordinator as a process that can be killed and restarted with the same address and ledger."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.light_swarm import FORK_SERVER, wait_until

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

_MARK = "--initial-peers "


class Coordinator:
    """The process is not running until `start`; the caller must `kill` it."""

    def __init__(self, directory: Path, run_id: str, port: int) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self._run_id, self._port = directory, run_id, port
        self._process: BaseProcess | None = None

    @property
    def pid(self) -> int | None:
        """None before the first start."""
        return self._process.pid if self._process is not None else None

    def start(self) -> str:
        """Start the process, wait until it serves, and return its address."""
        said = self._directory / "said"
        said.unlink(missing_ok=True)
        self._process = FORK_SERVER.Process(
            target=run_coordinator, args=(str(self._directory), self._run_id, self._port)
        )
        self._process.start()

        def line() -> str:
            lines = said.read_text(encoding="utf-8").splitlines(keepends=True) if said.exists() else []
            return next((line for line in lines if line.startswith(_MARK) and line.endswith("\n")), "")

        return str(wait_until(line, "the coordinator's address")).removeprefix(_MARK).strip()

    def kill(self) -> None:
        """Repeating it is safe."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


def run_coordinator(directory: str, run_id: str, port: int) -> None:
    from peers.daemon.coordinator import CoordinatorConfig, serve

    logging.basicConfig(
        filename=f"{directory}/log", level=logging.INFO, format="%(asctime)s %(message)s", force=True
    )
    config = CoordinatorConfig(
        state_dir=Path(directory), run_id=run_id, host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",)
    )
    with Path(directory, "said").open("a", encoding="utf-8") as said:

        def say(line: str) -> None:
            said.write(line + "\n")
            said.flush()

        asyncio.run(serve(config, say))
