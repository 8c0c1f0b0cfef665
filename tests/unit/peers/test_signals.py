"""What a peer does when the terminal that it runs in is closed."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.support.commands import ROOT

# Prints and then tells the pipe when it is cancelled, as a peer does that leaves its swarm.
_SCRIPT = f"""
import asyncio, os, sys
sys.path.insert(0, {str(ROOT)!r})
from peers.tasks import until_signal
async def main():
    print("ready", flush=True)
    try:
        await asyncio.sleep(600)
    finally:
        print("leaving", flush=True)
        os.write(int(sys.argv[1]), b"left")
sys.exit(asyncio.run(until_signal(main(), 10.0)))
"""


def test_a_command_cleans_up_when_its_terminal_is_closed():
    told, tells = os.pipe()
    os.set_inheritable(tells, True)
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", _SCRIPT, str(tells)])
    os.close(tells)
    try:
        seen = b""
        # The whole line: before, the command may still be printing it.
        while b"ready\r\n" not in seen:
            seen += os.read(terminal, 100)
    finally:
        os.close(terminal)
        _, status = os.waitpid(child, 0)
    with os.fdopen(told, "rb") as pipe:
        assert pipe.read() == b"left"
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP


@pytest.mark.parametrize("is_under_nohup", [True, False])
def test_a_hang_up_ends_a_command_unless_it_runs_under_nohup(is_under_nohup):
    handler = signal.SIG_IGN if is_under_nohup else signal.SIG_DFL
    command = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, "1"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, handler),
    )
    try:
        assert command.stdout.readline() == "ready\n"
        command.send_signal(signal.SIGHUP)
        if is_under_nohup:
            command.send_signal(signal.SIGTERM)
        said, _ = command.communicate(timeout=20)
    finally:
        command.kill()
        command.wait()
    assert (said, command.returncode) == ("leaving\nleft", 143 if is_under_nohup else 129)
