"""The run directory, and why a process ended, by its log."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig
from diloco.train import run_dir as run_dir_module
from diloco.train.run_dir import created_run_dir, last_words, reason_in, run_dir_of, written_config
from peers import errors as peers_errors

BOX = "step 1\n╭─ diloco failed ─╮\n│ too hot, so      │\n│ it ended         │\n╰──────────────────╯\n"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n'
    "ValueError: too hot\n[W1124 17:53:44] a library says good-bye\n"
)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (BOX, "too hot, so\nit ended"),
        (TRACEBACK, "ValueError: too hot"),
        (f"{TRACEBACK}{TRACEBACK.replace('hot', 'cold')}", "ValueError: too cold"),
        ("step 1\nkilled by hand\n\n", "killed by hand"),
        ("", ""),
    ],
)
def test_a_reason_is_the_last_box_the_last_exception_or_the_last_line(log, reason):
    assert reason_in(log) == reason


def test_last_words_are_those_of_the_box_or_the_end_of_the_log(tmp_path):
    path = tmp_path / "log"
    assert last_words(path) == ""
    path.write_text("\n".join(map(str, range(20))))
    assert last_words(path, max_lines=2) == "18\n19"
    path.write_text(BOX)
    assert last_words(path) == "too hot, so\nit ended"


@pytest.mark.parametrize("error", [UserError, peers_errors.UserError, peers_errors.PeerUnreachable])
def test_a_peer_that_cannot_join_leaves_no_run_directory(tmp_path, error):
    config = TrainConfig(run_dir=str(tmp_path / "mine"))
    with pytest.raises(error), run_dir_of(config) as run_dir:
        assert (run_dir / "logs").is_dir()
        raise error("the swarm trains another model")
    assert not run_dir.exists()


def test_a_run_directory_stays_where_it_was_there_before_or_has_begun_or_failed(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "mine"))
    with pytest.raises(UserError), run_dir_of(config) as run_dir:
        written_config(config, run_dir)
        raise UserError("the worker was refused")
    assert (run_dir / "config.toml").exists()
    (run_dir / "config.toml").unlink()
    with pytest.raises(UserError), run_dir_of(config):
        raise UserError("the swarm trains another model")
    assert run_dir.exists()
    other = TrainConfig(run_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="a bug"), run_dir_of(other) as run_dir:
        raise ValueError("a bug")
    assert run_dir.exists()


def test_a_run_directory_belongs_to_one_process_until_that_ends(tmp_path):
    config = TrainConfig(run_dir=str(tmp_path / "mine"))
    with run_dir_of(config) as run_dir:
        with (
            pytest.raises(UserError, match=f"{run_dir} is in use by process {os.getpid()}"),
            run_dir_of(config),
        ):
            pass
        assert run_dir.exists()
    with run_dir_of(config):
        pass
    holder = "; ".join(
        (
            "import os, signal",
            "from diloco.options.trainer import TrainConfig",
            "from diloco.train.run_dir import run_dir_of",
            f"claim = run_dir_of(TrainConfig(run_dir={str(run_dir)!r}))",
            "claim.__enter__()",
            "os.kill(os.getpid(), signal.SIGKILL)",
        )
    )
    assert subprocess.run([sys.executable, "-c", holder], timeout=60).returncode == -signal.SIGKILL
    with run_dir_of(config):
        pass


def test_a_new_run_directory_clears_what_killed_runs_had_in_transfer_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with run_dir_of(TrainConfig(project="running")) as running:
        killed = tmp_path / "runs" / "killed"
        left = [
            killed / "checkpoints" / "model_step_4-ab",
            killed / "peer-0" / "checkpoints" / "model_step_8-cd",
        ]
        kept = [
            running / "checkpoints" / "model_step_4-ab",
            killed / "checkpoints" / "model_step_4",
            killed / "model",
            tmp_path / "runs" / "no-run" / "checkpoints" / "model_step_4-ab",
        ]
        for path in (*left, *kept):
            path.mkdir(parents=True)
            (path / "rank_0.safetensors").touch()
        (killed / "lock").touch()
        with run_dir_of(TrainConfig(run_dir=str(tmp_path / "runs" / "named"))):
            assert all(path.exists() for path in left)
        with run_dir_of(TrainConfig(project="new")):
            assert not any(path.exists() for path in left)
    assert all((path / "rank_0.safetensors").exists() for path in kept)


def test_a_file_system_without_locks_can_hold_a_run(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with run_dir_of(TrainConfig(run_dir=str(tmp_path))) as run_dir:
        assert run_dir == tmp_path.resolve()


def test_two_runs_that_begin_in_the_same_second_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_dir_module, "default_run_dir", lambda project: Path("runs") / project)
    made = [created_run_dir(TrainConfig(project="mine")).name for _ in range(3)]
    assert made == ["mine", "mine-2", "mine-3"]
