"""Which GPUs the peers of `diloco run` get, and what is read of their logs."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from diloco.launch import local_swarm
from diloco.launch.local_swarm import LocalPeer, LocalSwarm, coordinator_address
from diloco.options.flags import GrpoConfig, TrainConfig
from diloco.train.file_tail import FileTail
from peers.daemon.restarts import WorkerEnd
from peers.daemon.supervisor import Supervisor, WorkerCommand
from peers.net.identity import check_run_id

GPUS = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("config", "gpus", "expected"),
    [
        (TrainConfig(), GPUS, ["0", "1"]),
        (TrainConfig(mode="grpo"), GPUS, ["1,0", "3,2"]),
        (TrainConfig(mode="grpo"), [], [None, None]),
        (TrainConfig(mode="grpo", device="cpu"), ["0"], ["0", "0"]),
        (TrainConfig(mode="grpo", grpo=GrpoConfig(vllm_gpu="3")), GPUS, ["0", "1"]),
        (TrainConfig(mode="grpo", grpo=GrpoConfig(rollout="hf")), GPUS, ["0", "1"]),
    ],
)
def test_a_peer_that_starts_a_server_has_a_gpu_for_it(tmp_path, config, gpus, expected):
    swarm = LocalSwarm(config, frozenset(), tmp_path, 2, print, gpus)
    peers = [swarm._peer(rank, "/ip4/127.0.0.1/tcp/1/p2p/x") for rank in range(2)]
    assert [peer.supervisor.command.env.get("CUDA_VISIBLE_DEVICES") for peer in peers] == expected


@pytest.mark.parametrize(
    ("directory", "named", "expected"),
    [
        ("20260101-120000-diloco", frozenset(), "20260101-120000-diloco"),
        ("_lr 1e-3, H=50", frozenset(), "lr-1e-3-H-50"),
        ("é", frozenset(), "run"),
        ("x" * 100, frozenset(), "x" * 64),
        ("mine", frozenset({"hv.run_id"}), "diloco"),
    ],
)
def test_swarms_whose_user_names_none_have_the_names_of_their_directories(
    tmp_path, directory, named, expected
):
    run_dir = tmp_path / directory
    run_dir.mkdir()
    swarm = LocalSwarm(TrainConfig(), named, run_dir, 2, print)
    peer = swarm._peer(1, "/ip4/127.0.0.1/tcp/1/p2p/x").supervisor.command
    for command in (swarm._coordinator.command, peer):
        assert command.argv[command.argv.index("--run-id") + 1] == check_run_id(expected)
    # A later run with this file as its --config has a name of its own.
    assert ("run_id" in (run_dir / "config.toml").read_text()) == bool(named)


@pytest.mark.parametrize(("named", "expected"), [((), ["tcp"]), (("hv.transport",), [])])
def test_peers_on_loopback_do_not_encrypt_unless_the_user_names_a_transport(tmp_path, named, expected):
    swarm = LocalSwarm(TrainConfig(), frozenset(named), tmp_path, 2, print)
    argv = swarm._peer(0, "/ip4/127.0.0.1/tcp/1/p2p/x").supervisor.command.argv
    assert [value for flag, value in pairwise(argv) if flag == "--hv.transport"] == expected
    assert argv[argv.index("--host-maddrs") + 1] == "/ip4/127.0.0.1/tcp/0"
    # Where this file is used as --config, peers may be on other machines.
    assert "tcp" not in swarm._config_path.read_text()


async def test_the_address_is_that_of_the_coordinator_that_runs_now(tmp_path):
    """A resumed run has the directory of an earlier one, whose coordinator has left its address in the log."""
    path = tmp_path / "dht.log"
    path.write_text("--initial-peers /ip4/127.0.0.1/tcp/1/p2p/old\n")

    tail = FileTail(path)
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
    peer = LocalPeer(0, Supervisor(command), swarm.rows[0], FileTail(command.log_path))
    task = asyncio.create_task(swarm._relay_failures(peer))
    with command.log_path.open("a") as log:
        log.write("step 3\nthe worker ended with 1: no space left\n")
    async with asyncio.timeout(10):
        while not messages:
            await asyncio.sleep(0.01)
    task.cancel()
    assert messages == ["peer 0: the worker ended with 1: no space left"]
