"""What is read of a log to which several runs have appended."""

from __future__ import annotations

import asyncio

from diloco.launch import local_swarm
from diloco.launch.local_swarm import LocalPeer, LocalSwarm, coordinator_address
from diloco.launch.log_tail import LogTail
from diloco.options.trainer import TrainConfig
from peers.daemon.restarts import WorkerEnd
from peers.daemon.supervisor import Supervisor, WorkerCommand


def test_a_tail_yields_complete_lines_without_those_of_an_earlier_run(tmp_path):
    path = tmp_path / "peer.log"
    path.write_text("of an earlier run\n")
    tail = LogTail(path)
    assert tail.read_lines() == []
    with path.open("a") as log:
        log.write("first\nsecond, in ")
        log.flush()
        assert tail.read_lines() == ["first"]
        log.write("two parts\n")
    assert tail.read_lines() == ["second, in two parts"]
    assert LogTail(tmp_path / "missing.log").read_lines() == []


def test_the_last_words_are_not_those_of_an_earlier_run(tmp_path):
    path = tmp_path / "peer.log"
    path.write_text("╭─ diloco failed ─╮\n│ an old message  │\n╰─────────────────╯\n")
    tail = LogTail(path)
    assert tail.last_words() == ""
    with path.open("a") as log:
        log.write("Killed\n")
    assert tail.last_words() == "Killed"


async def test_the_address_is_that_of_the_coordinator_that_runs_now(tmp_path):
    """The logs of a sweep are in a fixed directory, where an earlier sweep has left its coordinator's address."""
    path = tmp_path / "coordinator.log"
    path.write_text("--initial-peers /ip4/127.0.0.1/tcp/1/p2p/old\n")

    tail = LogTail(path)
    end: asyncio.Future[WorkerEnd] = asyncio.get_running_loop().create_future()
    with path.open("a") as log:
        log.write("--initial-peers /ip4/127.0.0.1/tcp/2/p2p/new\n")
    assert await coordinator_address(end, tail) == "/ip4/127.0.0.1/tcp/2/p2p/new"


async def test_failures_of_an_earlier_run_are_not_reported_again(tmp_path, monkeypatch):
    monkeypatch.setattr(local_swarm, "_LOG_INTERVAL_S", 0.01)
    messages: list[str] = []
    swarm = LocalSwarm(TrainConfig(), frozenset(), tmp_path, 1, messages.append)
    command = WorkerCommand(argv=("true",), env={}, cwd=tmp_path, log_path=tmp_path / "peer.log")
    command.log_path.write_text("the worker ended with 1: of an earlier run\n")
    peer = LocalPeer(0, Supervisor(command), swarm.rows[0], LogTail(command.log_path))
    task = asyncio.create_task(swarm._relay_failures(peer))
    with command.log_path.open("a") as log:
        log.write("step 3\nthe worker ended with 1: no space left\n")
    async with asyncio.timeout(10):
        while not messages:
            await asyncio.sleep(0.01)
    task.cancel()
    assert messages == ["peer 0: the worker ended with 1: no space left"]
