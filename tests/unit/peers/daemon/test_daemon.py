from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from peers.daemon.daemon import Daemon
from peers.errors import PeersError, UserError
from peers.tasks import cancelled


class WaitingDaemon(Daemon):
    """A daemon that waits for other peers until it is told to leave."""

    def __init__(self, fail):
        self._tasks, self.is_waiting = [], asyncio.Event()
        self._host, self.told = self, []
        self._dht = SimpleNamespace(fail_with_p2pd=lambda: fail(self))
        self._admission = SimpleNamespace(run=asyncio.Event().wait)

    async def serve(self, accept):
        await asyncio.Future()

    async def refuse(self, error, *, wait):
        self.told.append((str(error), wait))

    async def _enter(self):
        self.is_waiting.set()
        await asyncio.Future()


async def test_a_peer_that_loses_p2pd_while_it_waits_for_others_ends_at_once():
    async def fail(daemon):
        await daemon.is_waiting.wait()
        raise PeersError("p2pd has died")

    daemon = WaitingDaemon(fail)
    with pytest.raises(UserError, match="p2pd has died"):
        async with asyncio.timeout(20):
            await daemon.live(None, None, None, None)
    assert daemon.told == [("p2pd has died", True)]
    await cancelled(daemon._tasks)
