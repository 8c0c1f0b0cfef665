"""What this program asks of the operating system; features of Linux have substitutes on systems that lack them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

IS_LINUX = sys.platform.startswith("linux")
PR_SET_PDEATHSIG = 1
# The parent may have ended before prctl is called, hence the check of getppid.
_EXEC_WITH_PARENT = f"""
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, int(sys.argv[2]))
except (OSError, AttributeError):
    pass
# Python ignores these, which `argv` would inherit.
for ignored in signal.SIGPIPE, signal.SIGXFSZ:
    signal.signal(ignored, signal.SIG_DFL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[3], sys.argv[3:])
"""


def with_parent(argv: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """A command line that runs `argv` as a child of this process, and has the kernel signal it when this thread ends.

    Linux only: elsewhere a child has to watch its parent. A preexec_fn would fork this process with its threads.
    """
    return [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(os.getpid()), str(int(number)), *argv]


def num_cores() -> int:
    """Cores that this process may run on; where the system does not tell, all cores."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port() -> int:
    """A TCP port that is free on all addresses of this machine now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def anonymous_file(name: str) -> int:
    """A descriptor of a new, empty file that is freed with its last user. The caller closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    Path(path).unlink()
    return descriptor


@contextlib.contextmanager
def private_file(content: bytes) -> Iterator[str]:
    """A path to the content while the context lasts, which only this process (without memfd: this user) can read."""
    if hasattr(os, "memfd_create"):
        descriptor = anonymous_file("diloco-private")
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(prefix="diloco-private-") as file:
        file.write(content)
        file.flush()
        yield file.name


def make_thread_nicer(niceness: int) -> None:
    """Raise the calling thread's niceness by this much. Does nothing except on Linux. Raises OSError."""
    if IS_LINUX:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)


def keepalive_options(*, idle_s: int, interval_s: int, count: int) -> list[tuple[int, int]]:
    """The keepalive options of a TCP socket that this system has, and their values."""
    wanted = {
        "TCP_KEEPIDLE": idle_s,
        "TCP_KEEPALIVE": idle_s,
        "TCP_KEEPINTVL": interval_s,
        "TCP_KEEPCNT": count,
    }
    if hasattr(socket, "TCP_KEEPIDLE"):
        # TCP_KEEPALIVE is macOS's name for the same option.
        del wanted["TCP_KEEPALIVE"]
    return [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]


def tcp_info(sock: socket.socket, num_bytes: int) -> bytes:
    """The beginning of struct tcp_info (linux/tcp.h). Raises OSError where there is none."""
    option = getattr(socket, "TCP_INFO", None)
    if not IS_LINUX or option is None:
        raise OSError(errno.ENOPROTOOPT, "no struct tcp_info here")
    return sock.getsockopt(socket.IPPROTO_TCP, option, num_bytes)


def tcp_buffer_bytes() -> int | None:
    """The size to which this machine's TCP lets the buffers of a connection grow: as many bytes are on their way at
    most, whatever the link. None: this system does not tell."""
    if not IS_LINUX:
        return None
    try:
        files = [Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text() for name in ("wmem", "rmem")]
        return min(int(text.split()[2]) for text in files)
    except (OSError, ValueError, IndexError):
        return None


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """The minimum of the free memory of the machine and of every enclosing cgroup; None if none is known."""
    left = [_meminfo_available(_read(root / "proc/meminfo"))]
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left += _cgroup_left(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            left += _cgroup_left(root / "sys/fs/cgroup/memory", path, *names)
    known = [amount for amount in left if amount is not None]
    return min(known) if known else None


def _cgroup_left(mount: Path, path: str, limit: str, usage: str, prefix: str) -> list[int | None]:
    """Free memory in the cgroup and each of its ancestors up to the mount, where a container may have its files."""
    inner = mount / path.lstrip("/")
    groups = [inner, *(parent for parent in inner.parents if parent.is_relative_to(mount))]
    return [_group_left(group, limit, usage, prefix) for group in groups]


def _group_left(group: Path, limit: str, usage: str, prefix: str) -> int | None:
    limit_text, usage_text = _read(group / limit), _read(group / usage)
    if limit_text is None or usage_text is None or not limit_text.strip().isdigit():
        return None
    # Usage includes file cache, which the kernel reclaims on demand.
    cache = 0
    for line in (_read(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in (f"{prefix}inactive_file", f"{prefix}active_file"):
            cache += int(value)
    return max(0, int(limit_text) - int(usage_text) + cache)


def _meminfo_available(text: str | None) -> int | None:
    for line in (text or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
