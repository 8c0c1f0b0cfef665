"""The command line of bubblewrap, which defines the files, the user and the system calls of a sandboxed process."""

from __future__ import annotations

import os
import platform
import pwd
import secrets
import struct
import sys
from pathlib import Path

_HIGHEST_USER = 2_100_000_000
_INSIDE = "/sandbox"
_NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


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
    """The command that runs `main` of a module in this folder, with only Python's standard library."""
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
        f"import sys; sys.path.insert(0, {_INSIDE!r}); from {__package__} import {program}; {program}.main()"
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


def is_known_machine() -> bool:
    """Whether `refused_calls` supports this processor."""
    return platform.machine() in _ARCHITECTURES


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
