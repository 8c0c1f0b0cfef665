from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.coordinator import Coordinator
from benchmarks.chaos.links import free_port


@pytest.fixture
def coordinator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Coordinator]:
    """The coordinator, not started yet, of the run that the test's file names in RUN."""
    made = Coordinator(tmp_path / "coordinator", request.module.RUN, free_port())
    yield made
    made.kill()
