"""Start, watch and stop the worker: one process per rank, restarted together when one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FINISHED = 0
USER_ERROR = 2
"""Exit code of a worker whose user must mend something: starting it again would change nothing."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
# How long after the first rank's death the others may still tell why (a UserError beats a broken connection).
_LAST_WORDS_S = 1.0
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class WorkerCommand:
    """What to run as the ranks of this peer. `env` is all they get, but for torchrun's variables."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log_path: Path
    """Where rank 0's output is appended; rank k's goes to the same name with `-rank<k>` before the suffix."""
    num_ranks: int = 1

    def log_of(self, rank: int) -> Path:
        name = self.log_path
        return name if rank == 0 else name.with_name(f"{name.stem}-rank{rank}{name.suffix}")


@dataclass(frozen=True)
class RestartPolicy:
    """When to give up on a worker, and how long its end may take."""

    max_deaths: int = 5
    """Deaths in a row without progress."""
    stop_timeout_s: float = 3.0
    """Between SIGTERM and SIGKILL."""


@dataclass
class Supervisor:
    """Runs a worker command until it finishes, fails for good, or is stopped. Used from one event loop.

    `on_exit(code, restarts)` is called after every end of the worker; codes are a shell's (128 + signal).
    """

    command: WorkerCommand
    on_exit: Callable[[int, bool], None] | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)

    def __post_init__(self) -> None:
        self._stopping = asyncio.Event()
        self._deaths = 0
        self._ranks: list[asyncio.subprocess.Process] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks that are running now."""
        return tuple(rank.pid for rank in self._ranks if rank.returncode is None)

    async def run(self) -> int:
        """The worker's last exit code: 0 finished, 2 the user's mistake, else it was given up or stopped.

        Whatever way this ends, cancellation included, no process of the worker is left.
        """
        while True:
            code = await self._run_once()
            final = self._stopping.is_set() or code in (FINISHED, USER_ERROR)
            self._deaths += 1
            restarts = not final and self._deaths < self.policy.max_deaths
            if self.on_exit:
                self.on_exit(code, restarts)
            if not restarts or await self._stopped_within(restart_delay_s(self._deaths)):
                return code

    def notify_progress(self) -> None:
        """The worker got somewhere: earlier deaths no longer count against it."""
        self._deaths = 0

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the policy's deadline. `run` then returns. Safe to repeat."""
        self._stopping.set()
        await self._end(self.policy.stop_timeout_s)

    async def _run_once(self) -> int:
        port = _free_port()
        try:
            for rank in range(self.command.num_ranks):
                self._ranks.append(await _start(self.command, rank, port))
            await self._first_failure()
        finally:
            await self._end(self.policy.stop_timeout_s)
            codes = [_shell_code(rank.returncode) for rank in self._ranks if rank.returncode is not None]
            self._ranks = []
        return USER_ERROR if USER_ERROR in codes else next((code for code in codes if code), FINISHED)

    async def _first_failure(self) -> None:
        """Returns when all ranks have finished, or shortly after one has failed."""
        waits = {asyncio.ensure_future(rank.wait()) for rank in self._ranks}
        pending = waits
        try:
            while pending and not any(wait.done() and wait.result() for wait in waits):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending and not self._stopping.is_set():
                await asyncio.wait(pending, timeout=_LAST_WORDS_S)
        finally:
            for wait in waits:
                wait.cancel()

    async def _end(self, timeout_s: float) -> None:
        ranks = list(self._ranks)
        deadline = time.monotonic() + timeout_s
        try:
            for rank in ranks:
                if rank.returncode is None:
                    _signal_group(rank.pid, signal.SIGTERM)
            for rank in ranks:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(rank.wait(), max(deadline - time.monotonic(), 0.01))
        finally:
            # Also where the rank itself is gone: children it left behind share its group.
            for rank in ranks:
                _signal_group(rank.pid, signal.SIGKILL)
        for rank in ranks:
            await rank.wait()

    async def _stopped_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self._stopping.wait(), timeout_s)
        return False


def restart_delay_s(deaths: int) -> float:
    """Seconds before the next start after so many deaths in a row."""
    return min(_FIRST_DELAY_S * 2 ** (deaths - 1), _MAX_DELAY_S)


def die_with_parent(parent_pid: int) -> None:
    """From now on SIGKILL this process when the thread that started it ends. Call it in the child."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the call.
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


async def _start(command: WorkerCommand, rank: int, port: int) -> asyncio.subprocess.Process:
    parent_pid = os.getpid()
    command.log_path.parent.mkdir(parents=True, exist_ok=True)
    with command.log_of(rank).open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=command.cwd,
            env={**command.env, **_rank_env(rank, command.num_ranks, port)},
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent_pid),
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
