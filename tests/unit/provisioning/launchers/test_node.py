"""torchrun on one node, for which a script stands in."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from provisioning.errors import UserError
from provisioning.launchers import node
from provisioning.launchers.job import LOGS, LaunchJob
from tests.support.commands import ROOT

# Ends as torchrun does: with a traceback of its own and with 1.
_TORCHRUN = f"""#!{sys.executable}
import signal
ends = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
print("here", flush=True)
signal.sigwait(ends)
print("Traceback", flush=True)
raise SystemExit(1)
"""
_RUN = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from provisioning.launchers import node
from provisioning.launchers.job import LaunchJob
here = Path.cwd()
job = LaunchJob(config=here / "c.toml", python=str(here / "torchrun"), backend="gloo")
sys.exit(node.run(job, 1, os.environ, here))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_after_a_signal_only_the_log_has_torchruns_traceback(number, tmp_path):
    (tmp_path / "torchrun").write_text(_TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    launch = subprocess.Popen(
        [sys.executable, "-c", _RUN],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        assert launch.stdout.readline() == "here\n"
        launch.send_signal(number)
        rest, _ = launch.communicate(timeout=20)
    finally:
        launch.kill()
        launch.wait()
    assert (rest, launch.returncode) == ("", 128 + number)
    assert (tmp_path / LOGS / "latest_node0.log").read_text() == "here\nTraceback\n"


# As torchrun, it has a rank in a session of its own, which it ends.
_TORCHRUN_OF_A_RANK = f"""#!{sys.executable}
import signal, subprocess, sys
rank = subprocess.Popen(["sleep", "30"], start_new_session=True, stdout=subprocess.DEVNULL)

def end(*_):
    rank.terminate()
    with open("ended", "w") as file:
        file.write(str(rank.wait()))
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
print("here", flush=True)
signal.pause()
"""


def test_where_its_output_fails_a_node_lets_torchrun_end_its_ranks(tmp_path):
    (tmp_path / "torchrun").write_text(_TORCHRUN_OF_A_RANK)
    (tmp_path / "torchrun").chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", _RUN], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as launch:
        launch.stdout.close()
        assert launch.wait(timeout=20) != 0
    assert (tmp_path / "ended").read_text() == str(-signal.SIGTERM)


def test_a_log_that_cannot_be_written_does_not_end_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node, "log_file", lambda *_: Path("/dev/full"))
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho one\necho two\n")
    (tmp_path / "torchrun").chmod(0o755)
    job = LaunchJob(config=Path("c.toml"), python=str(tmp_path / "torchrun"), backend="gloo")
    assert node.run(job, 1, {}, tmp_path) == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_node_says_for_which_one_it_waits_and_for_how_long(monkeypatch, capsys):
    monkeypatch.setattr(node, "_MASTER_TIMEOUT_S", 0.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        job = LaunchJob(
            config=Path("c.toml"), num_nodes=2, node_rank=1, master_addr="127.0.0.1", master_port=port
        )
        with pytest.raises(UserError, match="start node 0 first"):
            node.check_master(job)
    assert capsys.readouterr().out == f"waiting up to 0 s for node 0 at 127.0.0.1:{port}\n"


def test_a_node_waits_for_one_that_imports_torch_for_minutes(monkeypatch):
    clock = [0.0]

    def connect(*_args):
        if clock[0] < 540.0:
            clock[0] += 10.0
            raise ConnectionRefusedError
        return socket.socket()

    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _s: None)
    monkeypatch.setattr(node, "time", fake)
    monkeypatch.setattr(node.socket, "create_connection", connect)
    node.check_master(LaunchJob(config=Path("c.toml"), num_nodes=2, node_rank=1))
    assert clock[0] == 540.0
