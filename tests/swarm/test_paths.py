"""Real daemons on loopback over every transport: the same bits, and the status tells the path."""

from __future__ import annotations

import asyncio
import re

import pytest

from peers.observer import read_swarm
from tests.support.swarm import wait_until


def paths_of(light) -> dict[str, dict[str, str]]:
    """As `diloco status --json` has it: by world rank, this peer's path to every other."""
    swarm = asyncio.run(read_swarm(light.run_id, light.initial_peers, timeout_s=20.0))
    return {str(peer["world_rank"]): peer["paths"] for peer in swarm["peers"]}


@pytest.mark.parametrize(
    ("mode", "path"), [("auto", "direct"), ("tls", "direct"), ("tcp", "plain"), ("libp2p", "libp2p")]
)
def test_every_transport_gives_the_same_bits_and_is_shown_in_the_status(swarm, mode, path):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05, numel=300_000)
    light.extra["transport"] = mode
    light.start_all(2)
    expected = {"0": {"1": path}, "1": {"0": path}}
    wait_until(lambda: paths_of(light) == expected, f"{mode} streams")
    before = max(peer.epoch for peer in light.peers.values())
    wait_until(lambda: all(peer.epoch >= before + 2 for peer in light.peers.values()), "two more epochs")
    light.check_digests()
    for peer in light.peers.values():
        assert not any(record["num_failures"] for record in peer.epochs)
        told = re.findall(r"data for \S+ goes by (\w+)", peer.log)
        assert told == (["libp2p", "direct"] if mode == "auto" else [path])


def test_peers_that_differ_about_tls_use_it(swarm):
    light = swarm(local_steps=4, max_steps=20)
    light.galaxy_size = 2
    light.extra["transport"] = "tcp"
    light.start(0)
    light.extra["transport"] = "tls"
    light.start(1)
    light.wait_finished()
    light.check_digests()
    for peer in light.peers.values():
        assert "goes by direct" in peer.log and "plain" not in peer.log


def test_an_endpoint_that_leads_nowhere_costs_no_round(swarm):
    light = swarm(local_steps=4, max_steps=20, step_s=0.02)
    # Nobody listens there.
    light.extra |= {"transport": "tls", "announce_data_maddrs": ["/ip4/127.0.0.1/tcp/1"]}
    light.start_all(2)
    light.wait_finished()
    assert sorted(light.check_digests()) == [1, 2, 3, 4, 5]
    for peer in light.peers.values():
        assert [record["num_failures"] for record in peer.epochs] == [0] * 5
        # Once, and then it is left alone.
        assert peer.log.count("no direct stream to") == 1
        assert re.findall(r"data for \S+ goes by (\w+)", peer.log) == ["libp2p"]
