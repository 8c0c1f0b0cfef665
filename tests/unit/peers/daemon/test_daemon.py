from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from peers.daemon.daemon import Daemon
from peers.daemon.supervisor import WorkerCommand
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


@pytest.mark.parametrize("error", [PeersError("p2pd has died"), UserError("its rank is taken")])
async def test_a_peer_that_fails_while_it_waits_for_others_ends_at_once_with_that_error(error):
    async def fail(daemon):
        await daemon.is_waiting.wait()
        raise error

    daemon = WaitingDaemon(fail)
    with pytest.raises(PeersError) as raised:
        async with asyncio.timeout(20):
            await daemon.live(None, None, None, None)
    assert raised.value is error
    assert daemon.told == [(str(error), True)]
    await cancelled(daemon._tasks)


class TrainingDaemon(Daemon):
    """A daemon that may train; `has_met_worker`: whether its worker joins."""

    def __init__(self, *, has_met_worker):
        self._host = SimpleNamespace(has_met_worker=has_met_worker, may_train=lambda _runtime: None)
        self._agreement = SimpleNamespace(manifest={}, is_own=True)
        self._monitor = SimpleNamespace()


@pytest.mark.parametrize("has_met_worker", [True, False])
async def test_a_program_that_ends_without_joining_is_an_error_of_its_user(has_met_worker, tmp_path):
    def worker(*_):
        return WorkerCommand(argv=("true",), env=os.environ, cwd=tmp_path, log_path=tmp_path / "worker.log")

    runtime = SimpleNamespace(core=SimpleNamespace(world_rank=0))
    training = TrainingDaemon(has_met_worker=has_met_worker)._train(runtime, tmp_path / "link", worker)
    if has_met_worker:
        await training
    else:
        with pytest.raises(UserError, match=r"without calling diloco.Diloco\(model\).*worker.log"):
            await training
