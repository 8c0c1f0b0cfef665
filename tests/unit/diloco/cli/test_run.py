"""What `diloco run` refuses before it starts anything; tests/e2e/test_wrong_input.py types more of it."""

from __future__ import annotations

import os
from collections.abc import Coroutine

import pytest

from diloco.cli.app import exit_code
from diloco.options.trainer import TrainConfig
from diloco.train import devices
from diloco.train.run_dir import run_dir_of


@pytest.mark.parametrize(("peers", "is_refused"), [("2", True), ("1", False)])
def test_servers_without_a_gpu_are_noticed_before_the_start(tmp_path, monkeypatch, capsys, peers, is_refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    # The command is refused in either case, as the data set does not exist.
    assert exit_code(["run", "--mode", "grpo", "--dataset", "none.py:None", "--peers", peers]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ("need 4 GPUs, two each, but this machine has 3" in said) == is_refused


@pytest.mark.parametrize("command", ["run", "grpo-sweep"])
def test_peers_do_not_all_get_the_first_of_several_gpus(tmp_path, monkeypatch, capsys, command):
    for device in ("nvidia0", "nvidia1"):
        (tmp_path / device).touch()
    monkeypatch.setattr(devices, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert exit_code([command, "--run-dir", str(tmp_path / "mine")]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "this machine has 2 GPUs" in said and "set CUDA_VISIBLE_DEVICES" in said


@pytest.mark.parametrize("command", [["run"], ["peer", "--world-rank", "0"]], ids=["run", "peer"])
def test_a_second_command_leaves_the_directory_of_a_live_run_as_it_is(tmp_path, monkeypatch, capsys, command):
    for module in ("diloco.cli.interrupts.run_interruptible", "diloco.cli.peer.run_with_hivemind"):
        monkeypatch.setattr(module, lambda main: main.close())
    with run_dir_of(TrainConfig(run_dir=str(tmp_path))) as run_dir:
        (run_dir / "config.toml").write_text("total_steps = 40\n")
        before = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
        assert exit_code([*command, "--device", "cpu", "--run-dir", str(run_dir)]) == 2
        assert {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"--run-dir {run_dir} is in use by process {os.getpid()}" in said


@pytest.mark.parametrize("more", [[], ["--ckpt.resume", "auto"]], ids=["new", "resumed"])
def test_two_runs_do_not_save_in_one_directory_at_once(tmp_path, monkeypatch, capsys, more):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared").mkdir()
    codes = []

    def runs(*flags: str) -> int:
        return exit_code(["run", "--device", "cpu", "--ckpt.interval", "5", *flags])

    def train(main: Coroutine[None, None, int]) -> int:
        main.close()
        if not codes:
            codes.append(0)
            codes.extend([runs("--ckpt.path", "shared", *more), runs("--ckpt.path", "another", *more)])
        return 0

    monkeypatch.setattr("diloco.cli.interrupts.run_interruptible", train)
    # The directory of the run and its checkpoints may be the same.
    assert runs("--ckpt.path", "shared", "--run-dir", "shared", *more) == 0
    assert codes == [0, 2, 0]
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"--ckpt.path shared is in use by process {os.getpid()}" in said
    assert runs("--ckpt.path", "shared", *more) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        (["--ckpt.interval", "5"], True),
        (["--ckpt.interval", "5", "--ckpt.path", "elsewhere"], False),
        ([], False),
    ],
)
def test_a_new_run_does_not_overwrite_the_checkpoints_of_another(
    tmp_path, monkeypatch, capsys, flags, is_refused
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "model_step_50").mkdir(parents=True)
    (tmp_path / "mine" / "peer-0").mkdir(parents=True)
    (tmp_path / "mine" / "peer-0" / "metrics.jsonl").touch()
    # The command is refused in each case, as this run directory already holds a run.
    assert exit_code(["run", *flags, "--run-dir", "mine"]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ("outputs already holds checkpoints, which this run would overwrite" in said) == is_refused
    assert ("already holds a run" in said) != is_refused
