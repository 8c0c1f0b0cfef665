"""Runs two processes in two sandboxes: one runs the model's code, the other runs the tests and gives the verdict.

Each sees Python's standard library, read-only, and nothing else of this machine: no network, no other processes, no
environment, no writable files. It cannot start processes, and is killed at the deadline. The sandbox does not protect
against bugs of the kernel or of bubblewrap.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.errors import UserError
from diloco.rl.sandbox.isolation import bubblewrap, is_known_machine, refused_calls, unused_user

_CHECK_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of each of the two processes."""

    wall_s: float = 8.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    num_files: int = 32

    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_NOFILE": self.num_files,
            "RLIMIT_FSIZE": 0,
            "RLIMIT_CORE": 0,
            # No child processes, so that the limits of the process hold for the whole sandbox.
            "RLIMIT_NPROC": 0,
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How many of the tests passed. Tests that were not run count as not passed."""

    num_passed: int
    num_tests: int


def run_tests(code: str, tests: Sequence[str], *, setup: str = "", limits: Limits = Limits()) -> Verdict:
    """Run the code, then each test on its definitions. Never raises because of what the code does."""
    order = json.dumps({"setup": setup, "code": code, "tests": list(tests)}).encode()
    of_judge, of_answer = socket.socketpair()
    with contextlib.ExitStack() as running:
        with of_judge, of_answer:
            running.enter_context(_sandboxed("answer", limits, stdin=of_answer))
            judge = running.enter_context(
                _sandboxed(
                    "judge", limits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, connection=of_judge
                )
            )
        # Our own ends of the socket are closed, so each process notices when the other is gone.
        try:
            verdicts, _ = judge.communicate(order, timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            judge.kill()
            verdicts, _ = judge.communicate()
    return Verdict(num_passed=verdicts.splitlines().count(b"true"), num_tests=len(tests))


def check_sandbox() -> None:
    """Raise UserError, with the remedy, unless the sandbox works on this machine."""
    if shutil.which("bwrap") is None:
        raise UserError(
            "code that a model has written runs in bubblewrap, which is not installed here: install your system's "
            "package bubblewrap (apt-get install bubblewrap)"
        )
    if not is_known_machine():
        raise UserError("code that a model has written is run on x86-64 and aarch64 only")
    try:
        with _sandboxed("confined", Limits(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as trial:
            _, complaint = trial.communicate(timeout=_CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"bubblewrap did not run a process within {_CHECK_TIMEOUT_S:g} s") from error
    if trial.returncode:
        reason = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(
            f"bubblewrap is installed, and cannot isolate a process here: {reason}. It needs namespaces: let users "
            "have them (sysctl kernel.unprivileged_userns_clone=1, or an AppArmor profile for bwrap), or start the "
            "container with --cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
        )


@contextlib.contextmanager
def _sandboxed(
    program: str, limits: Limits, *, connection: socket.socket | None = None, **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a module of this folder in a sandbox, and kill it on exit; it inherits `connection`."""
    user = unused_user()
    arguments = [json.dumps({"limits": limits.rlimits(), "user": user})]
    passed = [connection.fileno()] if connection else []
    filter_fd, writer = os.pipe()
    try:
        os.write(writer, refused_calls())
        os.close(writer)
        process = subprocess.Popen(
            bubblewrap(program, [*arguments, *map(str, passed)], user=user, filter_fd=filter_fd),
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams},
            env={"PATH": os.environ.get("PATH", os.defpath)},
            pass_fds=(filter_fd, *passed),
        )
    finally:
        os.close(filter_fd)
    with process:
        try:
            yield process
        finally:
            # Killing bwrap kills the first process of its PID namespace, and thereby all others in it.
            process.kill()
