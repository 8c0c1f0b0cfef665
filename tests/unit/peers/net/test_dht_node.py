from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peers.errors import PeersError
from peers.net.dht import node
from peers.net.dht.node import Dht
from peers.tasks import cancelled


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("p2pd", "has died .its last line"),
        ("read", "or lost its connection"),
        ("write", "or lost its connection"),
    ],
)
async def test_a_node_that_lost_p2pd_or_hears_it_no_more_says_so(monkeypatch, ends, words):
    monkeypatch.setattr(node, "PROBE_S", 0.0)

    async def part(name):
        if name != ends:
            await asyncio.Future()
        elif name != "p2pd":
            raise ConnectionResetError
        return "its last line"

    control = SimpleNamespace(
        _read_task=asyncio.create_task(part("read")), _write_task=asyncio.create_task(part("write"))
    )
    dht = object.__new__(Dht)
    dht._p2p = SimpleNamespace(_client=SimpleNamespace(control=control))
    dht._p2pd = SimpleNamespace(wait_dead=lambda: part("p2pd"))
    with pytest.raises(PeersError, match=words):
        async with asyncio.timeout(5):
            await dht.fail_with_p2pd()
    await cancelled([control._read_task, control._write_task])
