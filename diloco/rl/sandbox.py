"""Run code that a model has written, in a process of its own with limits.

The process gets no environment, an empty directory that is deleted afterwards, no standard input, and limits on
processor time, memory, the size of files and open files, and is killed at the deadline; where the kernel lets us (as
root, or with user namespaces) it has no network, and all that it has started dies with it. Elsewhere it can start no
processes.

What this does not protect from: the code runs as this user and can read what the user can read, and write where the
user can write, within the limit of a file's size. It can use what the kernel offers, its faults included. And code
that looks for it can find the runner in its own process and lie about its tests. So train on code only on a machine
that holds nothing but the training, say a container; that is what machines rented for it are.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
# Of what the code prints nothing is kept; of what the runner answers, this much is read.
_MAX_ANSWER_BYTES = 65536
_GRACE_S = 2.0

_RUNNER = """
import ctypes, json, os, resource, signal, sys
told = json.loads(sys.stdin.buffer.read())
child = os.fork()
if child:
    # Where it is the first process of a namespace, everything that it has started dies with it.
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, told["wall_s"])
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
for name, most in told["limits"].items():
    resource.setrlimit(getattr(resource, name), (most, most))
answers = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
names = {"__name__": "__main__"}
def say(passed):
    answers.write((json.dumps([told["nonce"], passed]) + "\\n").encode())
try:
    exec(compile(told["setup"], "setup", "exec"), names)
    exec(compile(told["code"], "answer", "exec"), names)
except BaseException:
    os._exit(1)
for test in told["tests"]:
    try:
        exec(compile(test, "test", "exec"), dict(names))
        passed = True
    except BaseException:
        passed = False
    say(passed)
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What code may use."""

    wall_s: float = 8.0
    cpu_s: int = 5
    memory_bytes: int = 512 * 2**20
    file_bytes: int = 2**20
    num_files: int = 32

    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.num_files,
            "RLIMIT_CORE": 0,
            # No processes of its own. Of root nobody asks that, but root may have namespaces.
            "RLIMIT_NPROC": 0,
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How many of the tests passed. Tests that were not come to have not passed."""

    num_passed: int
    num_tests: int
    why: str = ""
    """What ended it early; empty: nothing did."""


def run_tests(code: str, tests: Sequence[str], *, setup: str = "", limits: Limits = Limits()) -> Verdict:
    """Run the code, then each test on what it defined. Never raises for what the code does."""
    nonce = secrets.token_hex(16)
    told: dict[str, Any] = {"nonce": nonce, "setup": setup, "code": code, "tests": list(tests)}
    told |= {"wall_s": limits.wall_s, "limits": limits.rlimits()}
    reader, writer = os.pipe()
    with (
        _scratch_directory() as directory,
        os.fdopen(reader, "rb") as answers,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _RUNNER, str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env={"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory},
            pass_fds=(writer,),
            start_new_session=True,
            preexec_fn=_isolate,
        )
        os.close(writer)
        why = _until_over(process, json.dumps(told).encode(), limits)
        # Whatever got away from us may still hold the pipe's other end: take what is there.
        os.set_blocking(answers.fileno(), False)
        content = answers.read(_MAX_ANSWER_BYTES) or b""
    passed = _passed(content, nonce, len(tests))
    return Verdict(num_passed=sum(passed), num_tests=len(tests), why=why)


def cuts_network() -> bool:
    """Whether code run here has no network: depends on what the kernel lets this user do."""
    # Of an address that no machine has: without any interface it is unreachable at once.
    probe = "import socket, errno\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    test = "assert s.connect_ex(('192.0.2.1', 9)) == errno.ENETUNREACH"
    with_loopback = "assert s.connect_ex(('127.0.0.1', 9)) != 0"
    return run_tests(probe, [test, with_loopback]).num_passed == 2


@contextlib.contextmanager
def _scratch_directory() -> Iterator[str]:
    """A directory that is gone afterwards, whatever has been made of it."""
    directory = tempfile.mkdtemp(prefix="diloco-sandbox-")
    try:
        yield directory
    finally:
        # Not shutil.rmtree: it recurses, and code can nest directories deeper than Python goes.
        remove = ["rm", "-rf", "--", directory]
        for command in (remove, ["chmod", "-R", "u+rwx", "--", directory], remove):
            if os.path.lexists(directory):
                subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


def _until_over(process: subprocess.Popen[bytes], told: bytes, limits: Limits) -> str:
    """Feed it and wait until it is over; its whole group is gone afterwards. Returns what was wrong."""
    try:
        process.communicate(told, timeout=limits.wall_s + _GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    code = process.returncode
    if code == 128 + signal.SIGKILL or code < 0:
        return f"it took more than {limits.wall_s:g} s, or was killed"
    return f"it ended with {code}" if code else ""


def _passed(content: bytes, nonce: str, num_tests: int) -> list[bool]:
    found: list[bool] = []
    for line in content.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, list) and len(said) == 2 and said[0] == nonce:
            found.append(said[1] is True)
    # More answers than tests are a forgery.
    return found if len(found) <= num_tests else []


def _isolate() -> None:
    """In the child: a network and processes of its own, where that is allowed."""
    # Without a namespace for users only root may make the others.
    if _LIBC.unshare(CLONE_NEWNET | CLONE_NEWPID) != 0:
        _LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID)
