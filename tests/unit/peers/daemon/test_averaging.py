"""What a worker goes on from, by what became of the work that it has handed over."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from peers.daemon.averaging import WorkInHand

LOCAL, OLD, NEW = (torch.full((8,), value) for value in (5.0, 3.0, 10.0))


def put_back(how: str, *, is_rebased: bool) -> torch.Tensor:
    """What is in *in* for a worker whose weights were LOCAL, on the anchor OLD, while the state's is NEW."""

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
