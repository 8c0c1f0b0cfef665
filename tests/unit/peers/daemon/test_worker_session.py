"""The daemon's side of a worker that dies while its work is averaged, over the real link."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers.daemon.link import WorkerLink, listen
from peers.daemon.worker_session import serve_workers
from peers.errors import PeersError, UserError
from peers.state.handover import EpochOutcome, Memories, Start
from peers.state.layout import Layout, ParameterSlot
from peers.state.saving import Written
from peers.state.whole_files import FileRecord

NUMEL = 8
LAYOUT = Layout(((ParameterSlot("w", (NUMEL,), 0),),))


class SlowHost:
    """Averages for as long as the test likes."""

    run_id, world_rank, waits_for = "t", 0, "the test"

    def __init__(self) -> None:
        self.averaging, self.go_on = asyncio.Event(), asyncio.Event()
        self.averaged: list[float] = []

    async def manifest(self) -> Mapping[str, Any]:
        return {}

    async def admit(self, layout: Layout) -> None:
        if layout.digest != LAYOUT.digest:
            raise UserError("another model")

    async def start(self, memories: Memories, offer: dict[str, Any]) -> Start:
        raise AssertionError("no test gets so far")

    async def average(self, memories: Memories, ready: dict[str, Any]) -> EpochOutcome:
        self.averaging.set()
        await self.go_on.wait()
        self.averaged.append(float(memories.out[0][0]))
        raise UserError("that is all the test needs")

    async def snapshot(self, directory: Path) -> None:
        if "nowhere" in directory.parts:
            raise OSError("there is no such place")

    async def written(self, directory: Path) -> Written:
        await self.go_on.wait()
        return Written({"a": FileRecord(5, "digest")}, "head")

    def progressed(self, progress: dict[str, Any]) -> None: ...
    def finished(self) -> None: ...
    def refused(self) -> None: ...
    def worker_lost(self) -> None: ...


def connect(path: Path, weight: float) -> WorkerLink:
    link = WorkerLink.connect(path)
    link.hello(LAYOUT, local_rank=0, num_local_ranks=1)
    np.frombuffer(link.memories[0].out, np.float32, NUMEL)[:] = weight
    return link


def hang_up(link: WorkerLink) -> None:
    """As a death does it; returns once the daemon has noticed."""
    link._sock.shutdown(socket.SHUT_WR)
    link._sock.settimeout(5.0)
    while link._sock.recv(1):
        pass


def test_the_next_life_of_a_worker_does_not_write_into_what_is_still_averaged(tmp_path):
    async def scenario() -> None:
        host = SlowHost()
        async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
            serving = asyncio.create_task(serve_workers(accept, host))
            first = await asyncio.to_thread(connect, tmp_path / "link", 1.0)
            first.send("ready", fragment=0, tokens=1, step=1, last=False)
            await host.averaging.wait()
            await asyncio.to_thread(hang_up, first)
            second = await asyncio.to_thread(connect, tmp_path / "link", 2.0)
            host.go_on.set()
            while not host.averaged:
                await asyncio.sleep(0.01)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            first.close()
            second.close()
        assert host.averaged == [1.0]

    asyncio.run(scenario())


class FailingHost(SlowHost):
    async def average(self, memories: Memories, ready: dict[str, Any]) -> EpochOutcome:
        raise PeersError("its weights are not finite any more")


def test_a_worker_is_told_why_its_work_cannot_be_averaged(tmp_path):
    def work() -> None:
        link = connect(tmp_path / "link", 1.0)
        link.send("ready", fragment=0, tokens=1, step=1, last=False)
        link.send("collect")
        try:
            with pytest.raises(PeersError, match="not finite any more") as failure:
                link.receive("committed")
        finally:
            link.close()
        assert type(failure.value) is PeersError

    async def scenario() -> None:
        async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
            serving = asyncio.create_task(serve_workers(accept, FailingHost()))
            await asyncio.to_thread(work)
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(scenario())


def test_a_worker_goes_on_while_its_daemon_writes_and_hears_of_it_on_another_connection(tmp_path):
    def work(host: SlowHost, loop: asyncio.AbstractEventLoop) -> dict[str, Any]:
        training, waiting = connect(tmp_path / "link", 1.0), WorkerLink.connect(tmp_path / "link")
        training.send("snapshot", directory=str(tmp_path / "nowhere"))
        assert training.receive("snapped", "failed")["reason"] == "there is no such place"
        training.send("snapshot", directory=str(tmp_path))
        assert training.receive("snapped", "failed")["kind"] == "snapped"
        waiting.send("written", directory=str(tmp_path))
        # Served while the other connection still has no answer.
        training.send("finished")
        training.receive("bye")
        loop.call_soon_threadsafe(host.go_on.set)
        answer = waiting.receive("checkpointed", "failed")
        for link in (waiting, training):
            link.close()
        return answer

    async def scenario() -> None:
        host = SlowHost()
        async with listen(tmp_path / "link") as accept, asyncio.timeout(20):
            serving = asyncio.create_task(serve_workers(accept, host))
            answer = await asyncio.to_thread(work, host, asyncio.get_running_loop())
            assert (answer["files"], answer["head"]) == ({"a": [5, "digest"]}, "head")
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(scenario())
