"""How a rank's process begins and ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.errors import UserError
from diloco.launch.worker import exit_code, make_assignment
from diloco.options.trainer import TrainConfig
from diloco.outer.world import World
from diloco.train.run_dir import run_dir_of
from peers.daemon.link import LINK_ENV
from tests.support.full_disk import full_disk

# A collective that holds the last reference to its tensor; gloo's thread cannot drop it before the process ends.
ENDS = """
import atexit, sys, time
import torch
import torch.distributed as dist
from diloco.process_end import exit_process

atexit.register(print, "registered with atexit")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sys.setswitchinterval(100)
dist.all_reduce(torch.ones(4), async_op=True)
until = time.monotonic() + 0.2
while time.monotonic() < until:
    pass
print("done")
exit_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 2])
def test_the_end_of_a_rank_is_not_disturbed_by_what_collectives_have_left(code):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(code)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (code, "done\nregistered with atexit\n"), ended.stderr


def test_a_rank_without_stdout_ends_by_its_own_code_too():
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from diloco.process_end import exit_process; sys.stdout = None; exit_process(2)",
        ],
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (2, b"")


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_trainer_whose_extra_is_missing_names_it_and_makes_no_run_directory(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    config = TrainConfig(run_dir=str(tmp_path / "run"), metric_logger_type=name)
    with pytest.raises(UserError, match=rf"pip install 'diloco\[{name}\]'"):
        make_assignment(config, frozenset(), World(), [], contextlib.ExitStack())
    assert not (tmp_path / "run").exists()


def test_a_trainer_takes_no_run_directory_of_another_but_that_of_the_peer_that_started_it(
    tmp_path, monkeypatch
):
    config = TrainConfig(run_dir=str(tmp_path))
    monkeypatch.delenv(LINK_ENV, raising=False)
    with run_dir_of(config):
        with pytest.raises(UserError, match="is in use by process"), contextlib.ExitStack() as stack:
            make_assignment(config, frozenset(), World(), [], stack)
        assert not (tmp_path / "config.toml").exists()
        monkeypatch.setenv(LINK_ENV, str(tmp_path / "link.sock"))
        with contextlib.ExitStack() as stack:
            assignment, _ = make_assignment(config, frozenset(), World(), [], stack)
        assert assignment.run_dir == tmp_path.resolve()


@pytest.mark.parametrize("has_own_log", [True, False])
def test_each_rank_says_why_it_ends_and_under_torchrun_leaves_the_first_one_time_to_do_so(
    monkeypatch, capsys, has_own_log
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    if has_own_log:
        monkeypatch.setenv(LINK_ENV, "link.sock")
    else:
        monkeypatch.delenv(LINK_ENV, raising=False)
    said = []
    monkeypatch.setattr("diloco.launch.worker.time.sleep", lambda _s: said.append(capsys.readouterr().err))

    def fail() -> None:
        raise UserError("its disk is full")

    assert exit_code(fail) == 2
    assert "its disk is full" in capsys.readouterr().err
    assert said == ([] if has_own_log else [""])


def test_a_full_disk_ends_no_rank_of_a_peer(tmp_path, monkeypatch):
    monkeypatch.setenv(LINK_ENV, str(tmp_path / "link.sock"))
    with full_disk(0), contextlib.ExitStack() as stack:
        make_assignment(TrainConfig(run_dir=str(tmp_path)), frozenset(), World(), [], stack)
    with Path("/dev/full").open("w") as full:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, full)
            monkeypatch.setattr(sys, f"__{name}__", full)
        assert exit_code(lambda: print("what the daemon does", flush=True)) == 0
