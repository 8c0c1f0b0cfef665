"""Starts, watches and stops the worker: one process per rank, restarted together when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers.daemon.restarts import (
    FINISHED,
    MAX_DEATHS,
    USER_ERROR,
    Restarts,
    WorkerEnd,
    last_line,
    restart_delay_s,
)
from peers.errors import PeersError, UserError
from peers.system import free_port, with_parent
from peers.tasks import is_set_within
from peers.timing import OFTEN_S, PROBE_S, STOP_S

log = logging.getLogger(__name__)

_MAX_SAID_BYTES = 1 << 16
"""How much of a log's end is searched for the reason why the worker ended."""


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """The command that the ranks of this peer run. Their environment is `env` and torchrun's variables."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log_path: Path
    """Rank 0's output is appended here; rank k's goes to the same name with `-rank<k>` before the suffix."""
    num_ranks: int = 1
    reason_in: Callable[[str], str] = last_line
    """Reads from the end of a rank's log why it ended, in one or more lines."""

    def log_of(self, rank: int) -> Path:
        name = self.log_path
        return name if rank == 0 else name.with_name(f"{name.stem}-rank{rank}{name.suffix}")


class Supervisor:
    """Runs a worker command until it finishes, fails for good, or is stopped. Used from one event loop."""

    def __init__(
        self,
        command: WorkerCommand,
        on_exit: Callable[[WorkerEnd], None] | None = None,
        *,
        max_deaths: int = MAX_DEATHS,
        stop_timeout_s: float = PROBE_S,
    ) -> None:
        """`on_exit` is called whenever the worker has ended; `stop_timeout_s` lies between SIGTERM and SIGKILL."""
        self.command, self.on_exit, self._stop_timeout_s = command, on_exit, stop_timeout_s
        self.restarts = Restarts(max_deaths)
        """Must be told of the worker's progress (`progressed`, `committed`)."""
        self.log_path = command.log_path
        """The log of the rank that ended the last life of the worker."""
        self._said = ""
        """Why it ended, in that rank's own lines."""
        self._stopping = asyncio.Event()
        self._ranks: list[asyncio.subprocess.Process] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the ranks that are running."""
        return tuple(rank.pid for rank in self._ranks if rank.returncode is None)

    async def run(self) -> WorkerEnd:
        """Run the worker until its last end: it has finished, its user must act, or it was given up on or stopped.

        However this ends, also by cancellation, no process of the worker is left.
        """
        while True:
            logs = [self.command.log_of(rank) for rank in range(self.command.num_ranks)]
            sizes = [_size_of(log_path) for log_path in logs]
            rank, code = await self._run_once()
            self.log_path = logs[rank]
            self._said = self.command.reason_in(_said(self.log_path, sizes[rank]))
            end = self.restarts.ended(code, " ".join(self._said.splitlines()))
            if self._stopping.is_set():
                end = replace(end, restarts=False)
            if self.on_exit:
                self.on_exit(end)
            if not end.restarts or await is_set_within(self._stopping, restart_delay_s(end.num_deaths)):
                return end

    async def run_to_its_end(self) -> None:
        """`run`, with each restart logged. Raises UserError, with the worker's lines, where its user must act, and
        PeersError where it is given up."""
        self.on_exit = _tell_of_restart
        end = await self.run()
        if end.code == USER_ERROR:
            raise UserError(self._said or f"See {self.log_path}.")
        if end.code != FINISHED:
            raise PeersError(f"{end.given_up()}\nIts log: {self.log_path}")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after `stop_timeout_s`. `run` then returns. Safe to repeat."""
        self._stopping.set()
        await self._end()

    async def _run_once(self) -> tuple[int, int]:
        """Returns which rank ended this life, and its exit code: one with an error of the user's, else the first that
        failed."""
        port = free_port()
        try:
            for rank in range(self.command.num_ranks):
                self._ranks.append(await _start(self.command, rank, port))
            failed = await self._first_failure()
        finally:
            await self._end()
            codes = [_shell_code(rank.returncode) for rank in self._ranks if rank.returncode is not None]
            self._ranks = []
        rank = codes.index(USER_ERROR) if USER_ERROR in codes else failed
        return rank, codes[rank]

    async def _first_failure(self) -> int:
        """Returns when all ranks have finished, or shortly after one has failed: the first such rank, else 0.

        The delay lets the other ranks report why: an error of the user's explains more than a broken connection. A rank
        that ended by itself may have had an error that all share, and rank 0 has the most to finish.
        """
        waits = [asyncio.ensure_future(rank.wait()) for rank in self._ranks]
        pending, failed = set(waits), list[int]()
        try:
            while pending and not failed:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                failed = [rank for rank, wait in enumerate(waits) if wait.done() and wait.result()]
            if pending and not self._stopping.is_set():
                ended_itself = any(waits[rank].result() > 0 for rank in failed)
                await asyncio.wait(pending, timeout=STOP_S if ended_itself else OFTEN_S)
        finally:
            for wait in waits:
                wait.cancel()
        return failed[0] if failed else 0

    async def _end(self) -> None:
        ranks = list(self._ranks)
        deadline = time.monotonic() + self._stop_timeout_s
        try:
            for rank in ranks:
                if rank.returncode is None:
                    _signal_group(rank.pid, signal.SIGTERM)
            for rank in ranks:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(rank.wait(), max(deadline - time.monotonic(), 0.01))
        finally:
            # Also where the rank itself has ended: children that it left behind are in its process group.
            for rank in ranks:
                _signal_group(rank.pid, signal.SIGKILL)
        for rank in ranks:
            await rank.wait()


def _tell_of_restart(end: WorkerEnd) -> None:
    if end.restarts:
        log.warning("%s", end.in_words())


async def _start(command: WorkerCommand, rank: int, port: int) -> asyncio.subprocess.Process:
    command.log_path.parent.mkdir(parents=True, exist_ok=True)
    with command.log_of(rank).open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *with_parent(command.argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=command.cwd,
            env={**command.env, **_rank_env(rank, command.num_ranks, port)},
            start_new_session=True,
        )


def _rank_env(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set on a single node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _said(log_path: Path, since: int) -> str:
    """The end of what has been written to a log since it had this size."""
    with contextlib.suppress(FileNotFoundError), log_path.open("rb") as log:
        log.seek(max(since, _size_of(log_path) - _MAX_SAID_BYTES))
        return log.read().decode("utf-8", errors="replace")
    return ""


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
