from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provisioning.ledger.ledger import Ledger
from tests.support.commands import Command
from tests.support.fleets import TestFleet
from tests.support.pods_commands import argv_of

Run = Callable[..., Command]


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """Commands that a test has started; the processes that they leave running are ended after the test."""
    started: list[Command] = []
    yield started
    for command in started:
        command.close()


@pytest.fixture
def run(tmp_path: Path, commands: list[Command]) -> Run:
    """`run("diloco pods …", …)` runs a command with the further arguments appended, and waits for its end.

    All commands run in the directory `here` and share the state in it.
    """

    def make(command: str | list[str], *more: Any, timeout_s: float = 900.0) -> Command:
        argv = argv_of(command, *more) if isinstance(command, str) else [*command, *map(str, more)]
        commands.append(Command(argv, tmp_path / "here"))
        commands[-1].wait(timeout_s)
        return commands[-1]

    return make


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home and working directory for the test: Lium's client writes below ~ and reads a .env."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ledger(fleet: TestFleet) -> Iterator[Ledger]:
    """The ledger that the commands of a fleet write."""
    opened = Ledger(fleet.ledger_path)
    yield opened
    opened.close()
