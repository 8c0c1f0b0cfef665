"""What `diloco launch` refuses before it starts anything, and what it passes on."""

from __future__ import annotations

import pytest

from diloco.cli.app import exit_code


def test_a_program_whose_quotes_are_not_closed_is_refused(capsys):
    assert exit_code(["launch", "train.toml", "--program", 'train.py "a']) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert '--program train.py "a: No closing quotation.' in said


@pytest.mark.parametrize("given", ["", "2", "2 0", "--num-nodes 2", "2 0 localhost 29500"])
def test_what_follows_the_dashes_goes_to_the_program_whatever_else_is_given(
    given, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.toml").write_text("seed = 7\n")
    words = ["launch", "train.toml", *given.split(), "--engine", "slurm", "--dry-run"]
    assert exit_code([*words, "--", "--no-torch-compile", "--lr", "1"]) == 0
    script = capsys.readouterr().out
    assert " -- --no-torch-compile --lr 1" in script
    assert "no-torch-compile" not in script.replace(" -- --no-torch-compile", "")


def script_of(engine, *flags, directory, monkeypatch, capsys):
    monkeypatch.chdir(directory)
    (directory / "train.toml").write_text("seed = 7\n")
    words = ["launch", "train.toml", "16", "--engine", engine, "--gpus-per-node", "8", *flags, "--dry-run"]
    assert exit_code(words) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("flags", "cpus"), [((), []), (("--cpus-per-node", "96"), ["--cpus-per-task=96"])])
def test_a_slurm_job_has_all_cores_and_all_memory_of_its_nodes(flags, cpus, tmp_path, monkeypatch, capsys):
    lines = script_of("slurm", *flags, directory=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --gpus-per-node=8"} <= set(lines)
    assert [line.split()[1] for line in lines if "cpus-per-task" in line] == cpus
    (start,) = [line.split() for line in lines if "srun " in line]
    assert "--cpu-bind=none" in start


@pytest.mark.parametrize(("flags", "cpus"), [((), ""), (("--cpus-per-node", "96"), ":ncpus=96")])
def test_a_pbs_job_has_its_nodes_to_itself_and_the_cores_asked_for(
    flags, cpus, tmp_path, monkeypatch, capsys
):
    lines = script_of("pbs", *flags, directory=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert f"#PBS -l select=16:mpiprocs=1{cpus}:ngpus=8" in lines
    assert "#PBS -l place=scatter:excl" in lines


def test_a_command_without_a_program_takes_nothing_after_the_dashes(capsys):
    assert exit_code(["pods", "ssh", "pod-0", "--", "ls"]) == 2
    assert 'Unexpected argument "ls"' in capsys.readouterr().err
