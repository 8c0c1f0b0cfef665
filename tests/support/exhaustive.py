"""Which cases of a parametrised test `make test` runs, and which only `make test-all`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def exhaustive_but(kept: Container[Any], cases: Iterable[Any]) -> list[ParameterSet]:
    """All cases. Those that are not in `kept` are marked exhaustive."""
    return [pytest.param(case, marks=() if case in kept else pytest.mark.exhaustive) for case in cases]
