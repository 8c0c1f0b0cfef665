from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.commands import Command


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """Commands that a test has started; what they leave running ends with the test."""
    started: list[Command] = []
    yield started
    for command in started:
        command.close()
