"""What is done to pods needs the state file that knows them: a name that was typed wrongly is no success."""

from __future__ import annotations

import pytest

from diloco.cli.app import USER_ERROR, exit_code

WITHOUT = [
    "pods down --state-file typo.sqlite",
    "pods cost --state-file typo.sqlite",
    "experiments destroy lr_swep",
    "experiments destroy --state-file typo.sqlite",
    "experiments destroy",
]


@pytest.mark.parametrize("command", WITHOUT)
def test_without_a_state_file_nothing_is_said_to_be_done(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert exit_code(command.split()) == USER_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert "There is no state file" in said or "Say which" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["pods logs", "pods down"])
def test_that_there_are_no_pods_is_said(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert exit_code(command.split()) == 0
    assert f"there are no pods in {tmp_path}" in capsys.readouterr().err
