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


def test_a_command_without_a_program_takes_nothing_after_the_dashes(capsys):
    assert exit_code(["pods", "ssh", "pod-0", "--", "ls"]) == 2
    assert 'Unexpected argument "ls"' in capsys.readouterr().err
