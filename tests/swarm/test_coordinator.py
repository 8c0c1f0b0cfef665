from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from peers.admission.ranks import request_rank
from peers.daemon.coordinator import CoordinatorConfig, serve
from peers.errors import UserError
from peers.net.dht.node import Dht
from peers.net.gate import Gate
from peers.net.identity import Identity, load
from peers.protocol.admission import Grant
from peers.protocol.records import PEERS_KEY, Announcement
from tests.support.announcements import announced
from tests.support.members import LOOPBACK, eventually, joined

RUN = "coordinated"


class Coordinator:
    """A coordinator in this event loop, and the lines that it printed."""

    def __init__(self, state_dir: Path, **options) -> None:
        self.lines: list[str] = []
        config = CoordinatorConfig(
            **({"run_id": RUN, "host_maddrs": LOOPBACK, "state_dir": state_dir} | options)
        )
        self.task = asyncio.create_task(serve(config, self.lines.append))

    async def address(self) -> str:
        await eventually(self.has_said("--initial-peers "))
        return self.lines[0].removeprefix("--initial-peers ")

    def has_said(self, text: str):
        async def condition() -> bool:
            if self.task.done():
                self.task.result()
            return any(text in line for line in self.lines)

        return condition


@asynccontextmanager
async def coordinating(state_dir: Path, **options) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(state_dir, **options)
    try:
        yield coordinator
    finally:
        coordinator.task.cancel()
        await asyncio.gather(coordinator.task, return_exceptions=True)


def announcement(dht: Dht, rank: int) -> Announcement:
    return announced(dht.peer_id, run_id=RUN, world_rank=rank, tokens_per_s=10.0)


async def rank_for(dht: Dht, wanted: int | None) -> Grant | None:
    return await request_rank(dht, RUN, wanted, timeout_s=10, gate=Gate(RUN))


async def announce(dht: Dht, identity: Identity, record: Announcement) -> None:
    record = replace(record, time=time.time())
    assert await dht.store(PEERS_KEY(RUN), dht.peer_id, record.encode(identity), 20)


async def test_ranks_are_assigned_kept_across_restarts_and_never_shared(tmp_path):
    async with coordinating(tmp_path / "state") as coordinator:
        address = await coordinator.address()
        async with joined(tmp_path, "a", address) as a, joined(tmp_path, "b", address) as b:
            first = await rank_for(a, None)
            second = await rank_for(b, None)
            assert (first.world_rank, second.world_rank) == (0, 1)
            assert (first.galaxy_size, second.galaxy_size) == (1, 2)
            with pytest.raises(UserError, match=f"world rank 0 is taken by the live peer {a.peer_id}"):
                await rank_for(b, 0)
    async with coordinating(tmp_path / "state") as coordinator:
        address = await coordinator.address()
        async with joined(tmp_path, "c", address) as c, joined(tmp_path, "b", address) as b:
            assert (await rank_for(c, None)).world_rank == 2
            assert (await rank_for(b, None)).world_rank == 1


async def test_a_coordinator_at_another_address_finds_the_peers_that_it_knew(tmp_path):
    async with AsyncExitStack() as stack:
        async with coordinating(tmp_path / "state") as coordinator:
            a = await stack.enter_async_context(joined(tmp_path, "a", await coordinator.address()))
            identity, record = load(tmp_path / "a.key"), announcement(a, 0)
            record = replace(record, maddrs=tuple(await a.maddrs()))
            await announce(a, identity, record)
            await eventually(coordinator.has_said("joined, 1 peer"))
        await announce(a, identity, record)
        async with coordinating(tmp_path / "state") as coordinator:
            address = await coordinator.address()
            await eventually(
                coordinator.has_said(f"the run {RUN} goes on at epoch {record.epoch}: 1 peer is here")
            )
            # Nobody has told it, or the peer, where the other is.
            async with joined(tmp_path, "b", address) as b:
                await announce(a, identity, record)
                await eventually(coordinator.has_said("joined, 1 peer"))
                assert (await rank_for(b, None)).galaxy_size == 2


async def test_a_holder_that_does_not_answer_yields_its_rank(tmp_path):
    async with coordinating(tmp_path / "state") as coordinator:
        address = await coordinator.address()
        async with joined(tmp_path, "a", address) as a:
            assert (await rank_for(a, 5)).world_rank == 5
        async with joined(tmp_path, "b", address) as b:
            assert (await rank_for(b, 5)).world_rank == 5


async def test_ranks_that_peers_brought_along_are_respected(tmp_path):
    async with coordinating(tmp_path / "state") as coordinator:
        address = await coordinator.address()
        async with joined(tmp_path, "a", address) as a, joined(tmp_path, "b", address) as b:
            await announce(a, load(tmp_path / "a.key"), announcement(a, 0))
            assert (await rank_for(b, None)).world_rank == 1
            with pytest.raises(UserError, match="taken"):
                await rank_for(b, 0)


async def test_a_coordinator_tells_of_joins_epochs_and_leaves(tmp_path):
    async with coordinating(tmp_path / "state") as coordinator:
        address = await coordinator.address()
        async with joined(tmp_path, "a", address) as a:
            identity, record = load(tmp_path / "a.key"), announcement(a, 0)
            await announce(a, identity, record)
            await eventually(coordinator.has_said("joined, 1 peer"))
            await announce(a, identity, replace(record, epoch=1))
            await eventually(coordinator.has_said("epoch 1: 1 peer"))
            await announce(a, identity, replace(record, state="leaving"))
            await eventually(coordinator.has_said("left at epoch"))


async def test_without_a_coordinator_there_is_no_grant(tmp_path, bootstrap, monkeypatch):
    monkeypatch.setattr("peers.admission.ranks.OFTEN_S", 120)
    async with joined(tmp_path, "a", bootstrap) as a:
        began = time.monotonic()
        assert await request_rank(a, "uncoordinated", 0, timeout_s=120, gate=Gate("uncoordinated")) is None
        # It gave up because the initial peer knows no coordinator, not because its time was over.
        assert time.monotonic() - began < 120


async def test_a_second_coordinator_of_a_run_on_this_machine_is_refused(tmp_path):
    async with coordinating(tmp_path) as coordinator:
        await coordinator.address()
        with pytest.raises(UserError, match="runs already"):
            await serve(CoordinatorConfig(run_id=RUN, host_maddrs=LOOPBACK, state_dir=tmp_path), print)
