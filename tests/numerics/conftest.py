from __future__ import annotations

from pathlib import Path

import pytest

from peers.daemon.link import LINK_ENV


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep trainers from connecting to a daemon that the environment of the test run names."""
    monkeypatch.delenv(LINK_ENV, raising=False)


@pytest.fixture
def link(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path where daemons listen, named in the environment."""
    monkeypatch.setenv(LINK_ENV, str(tmp_path / "link.sock"))
    return tmp_path / "link.sock"
