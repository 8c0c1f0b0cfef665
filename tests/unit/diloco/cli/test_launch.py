"""What `diloco launch` refuses before it starts anything, and what it passes on."""

from __future__ import annotations

import subprocess

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


def script_of(engine, *flags, directory, monkeypatch, capsys, config="seed = 7\n"):
    monkeypatch.chdir(directory)
    (directory / "train.toml").write_text(config)
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


RESUMES = '[ckpt]\nresume = "auto"\ninterval = 100\npath = "/shared"\n'
SHORT, LONG = 700, 2000


@pytest.mark.parametrize(
    ("config", "lives", "num_lives"),
    [
        (RESUMES, [(LONG, 1), (LONG, 137), (SHORT, 1), (SHORT, 1), (LONG, 1), (SHORT, 0)], 6),
        (RESUMES, [(LONG, 1), *[(SHORT, 1)] * 4], 4),
        (RESUMES, [(LONG, 2), (SHORT, 0)], 1),
        (RESUMES, [(LONG, 1)] * 21, 20),
        ("seed = 7\n", [(LONG, 1), (SHORT, 0)], 1),
        ('[ckpt]\nresume = "auto"\npath = "/shared"\n', [(LONG, 1), (SHORT, 0)], 1),
        ('[ckpt]\nresume = "auto"\ninterval = 100\n', [(LONG, 1), (SHORT, 0)], 1),
    ],
    ids=[
        "several long lives",
        "three short lives",
        "an error of the user's",
        "twenty lives",
        "one that does not resume",
        "one without interval",
        "one without path",
    ],
)
@pytest.mark.parametrize("engine", ["slurm", "pbs"])
def test_a_batch_job_starts_a_training_again_that_resumes(
    engine, config, lives, num_lives, tmp_path, monkeypatch, capsys
):
    """Shell scripts stand in for the batch system's commands and for the clock; the job script is run unchanged."""
    lines = script_of(engine, directory=tmp_path, monkeypatch=monkeypatch, capsys=capsys, config=config)
    assert ("#SBATCH --open-mode=append" in lines) == (engine == "slurm")
    requeue = {"slurm": "#SBATCH --requeue", "pbs": "#PBS -r y"}[engine]
    assert (requeue in lines) == (config == RESUMES)
    (tmp_path / "lives").write_text("".join(f"{length_s} {code}\n" for length_s, code in lives))
    (tmp_path / "clock").write_text("0")
    (tmp_path / "calls").touch()
    srun = """echo >>calls
set -- $(sed -n "$(wc -l <calls)p" lives)
echo $(($(cat clock) + $1)) >clock
exit $2
"""
    # It returns 0 whatever the task returns. The training fails on the second of two nodes.
    pbsdsh = """[ "$3" = 0 ] && code=0 || { srun && code=0 || code=$?; }
echo "pbsdsh: task 0x00000000 exit status $code"
"""
    commands = {
        "srun": srun,
        "scontrol": "echo NodeAddr=127.0.0.1\n",
        "pbsdsh": pbsdsh,
        "date": "cat clock\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "nodes").write_text("n1\nn2\n")
    env = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_NODELIST": "n[1-16]",
        "PBS_NODEFILE": "nodes",
    }
    script = "\n".join(lines)
    ran = subprocess.run(["bash"], input=script, env=env, text=True, timeout=20, check=False)
    assert (tmp_path / "calls").read_text() == "\n" * num_lives
    assert ran.returncode == lives[num_lives - 1][1]


@pytest.mark.parametrize(
    ("said", "returned", "code"),
    [
        ("pbsdsh: task 0x00000000 exit status 0", 0, 0),
        (
            "pbsdsh: spawned task 0x00000000 on logical node 0 event 2\npbsdsh: task 0x00000000 exit status 3",
            0,
            3,
        ),
        # Signal 9.
        ("pbsdsh: task 0x00000000 exit status 265", 0, 9),
        # The node could not be reached.
        ("", 0, 1),
        ("", 7, 7),
    ],
)
def test_a_pbs_job_ends_as_its_training_does(said, returned, code, tmp_path, monkeypatch, capsys):
    lines = script_of("pbs", directory=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/pbsdsh").write_text(f"#!/bin/sh\necho '{said}'\nexit {returned}\n")
    (tmp_path / "bin/pbsdsh").chmod(0o755)
    (tmp_path / "nodes").write_text("n1\n")
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PBS_NODEFILE": "nodes"}
    ran = subprocess.run(["bash"], input="\n".join(lines), env=env, text=True, timeout=20, check=False)
    assert ran.returncode == code


def test_a_command_without_a_program_takes_nothing_after_the_dashes(capsys):
    assert exit_code(["pods", "ssh", "pod-0", "--", "ls"]) == 2
    assert 'Unexpected argument "ls"' in capsys.readouterr().err
