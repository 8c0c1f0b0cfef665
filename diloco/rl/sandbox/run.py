"""Runs two processes in two sandboxes: one runs the model's code, the other runs the tests and gives the verdict.

Each sees Python's standard library, read-only, and nothing else of this machine: no network, no other processes, no
environment, no writable files. It cannot start processes, and is killed at the deadline. The sandbox does not protect
against bugs of the kernel or of bubblewrap.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pwd
import secrets
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.errors import UserError

_CHECK_TIMEOUT_S = 30.0
_HIGHEST_USER = 2_100_000_000
_INSIDE = "/sandbox"
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


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
    if platform.machine() not in _ARCHITECTURES:
        raise UserError("code that a model has written is run on x86-64 and aarch64 only")
    try:
        with _sandboxed("check", Limits(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as trial:
            _, complaint = trial.communicate(timeout=_CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"bubblewrap did not run a process within {_CHECK_TIMEOUT_S:g} s") from error
    if trial.returncode:
        reason = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise UserError(
            f"bubblewrap is installed, but cannot isolate a process here: {reason}. It needs user "
            "namespaces: allow them (sysctl kernel.unprivileged_userns_clone=1, or an AppArmor profile for "
            "bwrap), or start the container with --cap-add SYS_ADMIN --security-opt seccomp=unconfined "
            "--security-opt apparmor=unconfined"
        )


@contextlib.contextmanager
def _sandboxed(
    program: str, limits: Limits, *, connection: socket.socket | None = None, **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program of inside.py in a sandbox, and kill it on exit; it inherits `connection`."""
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


def unused_user() -> int | None:
    """A random user id without an account, for root to switch to; None if we are not root or have too few user ids."""
    if os.geteuid() != 0:
        return None
    ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    end = min(max(inside + count for inside, _, count in ranges), _HIGHEST_USER)
    if end < 1000:
        return None
    while True:
        user = end - 1 - secrets.randbelow(min(end // 4, 10**8))
        try:
            pwd.getpwuid(user)
        except KeyError:
            return user


def bubblewrap(program: str, arguments: list[str], *, user: int | None, filter_fd: int) -> list[str]:
    """The command that runs a program of inside.py, with only Python's standard library."""
    prefix = Path(sys.base_prefix).resolve()
    command = ["bwrap", "--die-with-parent", "--new-session", *_NAMESPACES]
    if user is None:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    else:
        # The process switches to that user by itself, after starting: as that user, bwrap could not read a Python
        # in root's home.
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    if not prefix.is_relative_to("/usr"):
        for parent in reversed(prefix.parents[:-1]):
            command += ["--dir", str(parent)]
        command += ["--ro-bind", str(prefix), str(prefix)]
    command += [
        "--ro-bind",
        str(Path(__file__).resolve().parent),
        f"{_INSIDE}/{__package__.replace('.', '/')}",
    ]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for place in ("/proc", "/dev", "/"):
        command += ["--remount-ro", place]
    command += ["--chdir", "/", "--seccomp", str(filter_fd)]
    python = str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]
    start = (
        f"import sys; sys.path.insert(0, {_INSIDE!r}); from {__package__} import inside; inside.{program}()"
    )
    return [*command, python, "-I", "-S", "-B", "-c", start, *arguments]


# System call numbers on x86-64 and aarch64; None if there is no such call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "socket": (41, 198),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    # These allocate memory that the limits of a process do not count.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_KILL, _ALLOW, _EPERM = 0x80000000, 0x7FFF0000, 0x00050001
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06


def refused_calls() -> bytes:
    """A seccomp filter (classic BPF) that makes the system calls in _REFUSED fail with EPERM."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    numbers = sorted(number for row in _REFUSED.values() if (number := row[column]) is not None)
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        # Numbers from here on are x86-64's x32 ABI, which has the same calls under other numbers.
        (_AT_LEAST, len(numbers) + 1, 0, 0x40000000),
        *((_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
