"""Stands between a trainer and the server it has started: when either is gone, all of the server's processes are,
and the directory of its sockets.

    python -m diloco.rl.guardian <command> [argument...]

Standard input is held open by the trainer; its end means that the trainer is gone, however it went. The command runs
in a session of its own, which is killed whole. Ends with the command's exit code. Needs nothing but Python.
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
    # Ctrl-C reaches us too, where we share the terminal's group; the end of our input says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.close(0))
    # The server's own choice would be below TMPDIR, which may be too long for a socket's address.
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
    """SIGTERM to the whole group, then SIGKILL; also to what a dead leader has left behind."""
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
