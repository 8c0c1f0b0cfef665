from __future__ import annotations

from pathlib import Path

from provisioning.machines.setup import source_directory


def test_the_source_is_the_same_for_a_process_in_another_directory(tmp_path, monkeypatch):
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert source_directory(Path("clone")) == tmp_path / "clone"
