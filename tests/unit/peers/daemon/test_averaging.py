"""Which weights a worker goes on from, depending on what became of the work that it handed over."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from peers.daemon.averaging import WorkInHand

LOCAL, OLD, NEW = (torch.full((8,), value) for value in (5.0, 3.0, 10.0))


def put_back(how: str, *, is_rebased: bool) -> torch.Tensor:
    """What a worker finds in `inn` if its weights were LOCAL, on the anchor OLD, and the state's anchor is NEW."""

    async def answered() -> torch.Tensor:
        memories = SimpleNamespace(out=[LOCAL.clone()], inn=[torch.zeros(8)])
        work = WorkInHand(memories, 0, tokens=1, step=1, last=False)
        if is_rebased:
            work.rebase([OLD], [NEW])
        work.put_back(how, SimpleNamespace(anchor=[NEW]))
        return memories.inn[0]

    return asyncio.run(answered())


@pytest.mark.parametrize("how", ["rebase", "keep"])
def test_who_trains_on_does_so_from_the_work_where_it_stands(how):
    torch.testing.assert_close(put_back(how, is_rebased=False), LOCAL)
    torch.testing.assert_close(put_back(how, is_rebased=True), LOCAL - OLD + NEW)


@pytest.mark.parametrize("is_rebased", [False, True])
def test_who_has_contributed_goes_on_from_the_anchor(is_rebased):
    torch.testing.assert_close(put_back("contributed", is_rebased=is_rebased), NEW)
