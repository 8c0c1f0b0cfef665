"""Supervises the server of a trainer: if either process ends, kills all of the server's processes and removes its
sockets.

    python -m diloco.rl.guardian <command> [argument...]

The trainer holds the guardian's standard input open, so end of file means that the trainer is gone, even if it was
killed. The command runs in a session of its own, and its whole process group is killed. Exits with the command's exit
code. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

STOP_TIMEOUT_S = 5.0
_POLL_S = 0.1


def main() -> int:
    # Ctrl-C may reach the guardian too, if it shares the terminal's process group; only end of file should stop it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.close(0))
    # vLLM would put its sockets below TMPDIR, whose path may be too long for the address of a Unix socket.
    with tempfile.TemporaryDirectory(
        prefix="diloco-vllm-", dir="/tmp", ignore_cleanup_errors=True
    ) as sockets:
        child = subprocess.Popen(
            sys.argv[1:],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "VLLM_RPC_BASE_PATH": sockets},
            start_new_session=True,
        )
        try:
            while child.poll() is None and not _has_ended(0):
                time.sleep(_POLL_S)
        finally:
            stop(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def stop(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the whole process group, then SIGKILL; also if the group's leader is already dead."""
    _signal(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(STOP_TIMEOUT_S)
    _signal(child.pid, signal.SIGKILL)
    child.wait()


def _has_ended(descriptor: int) -> bool:
    try:
        readable, _, _ = select.select([descriptor], [], [], 0)
        return bool(readable) and os.read(descriptor, 4096) == b""
    except (OSError, ValueError):
        return True


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
