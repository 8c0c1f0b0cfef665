from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Command, model_directory

Start = Callable[..., Command]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that trains in milliseconds."""
    return model_directory(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(*argv, name="…")` runs a command in tmp_path/<name> and ends all of its processes after the test."""
    commands: list[Command] = []

    def make(*argv: Any, name: str = "command", cwd: Path | None = None) -> Command:
        commands.append(Command([str(word) for word in argv], tmp_path / name, cwd))
        return commands[-1]

    yield make
    for command in commands:
        command.close()
