from __future__ import annotations

import contextlib

import pytest

from tests.support.reduction_group import ReductionGroup


@pytest.fixture
def swarm():
    with contextlib.ExitStack() as stack:

        def build(*args, **kwargs):
            return stack.enter_context(contextlib.closing(ReductionGroup(*args, **kwargs)))

        yield build
