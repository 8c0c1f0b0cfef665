"""Real daemons on loopback over every transport: the same bits, and the right path in the status."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from pathlib import Path

import pytest

from benchmarks.chaos.links import free_port
from peers.net.paths.forwarding import Forwarder
from tests.support.exhaustive import exhaustive_but
from tests.support.observing import read_swarm
from tests.support.swarm import LightPeer, wait_until

PATHS = {"auto": "direct", "tcp": "plain", "libp2p": "libp2p"}
"""The path between two peers on one machine for each value of `--hv.transport`."""


def paths_of(light) -> dict[str, dict[str, str]]:
    """By world rank, each peer's path to every other peer, as in `diloco status --json`."""
    swarm = asyncio.run(read_swarm(light.run_id, light.initial_peers, timeout_s=20.0))
    return {str(peer["world_rank"]): peer["paths"] for peer in swarm["peers"]}


def data_paths(peer: LightPeer) -> list[str]:
    """The paths of the streams of this peer's rounds, one after the other."""
    return re.findall(r"data for \S+ goes by (\w+)", peer.log)


def runs_smoothly(peer: LightPeer, *, after: int = 0) -> bool:
    """Whether three epochs in a row had no failure. On a path that does not work, every round fails."""
    failures = [record["num_failures"] for record in peer.epochs if record["epoch"] > after]
    return any(failures[at : at + 3] == [0, 0, 0] for at in range(len(failures)))


@pytest.mark.parametrize("mode", exhaustive_but(("auto",), PATHS))
def test_every_transport_gives_the_same_bits_and_is_shown_in_the_status(swarm, mode):
    path = PATHS[mode]
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05, numel=300_000)
    light.extra["transport"] = mode
    peers = light.start_all(2)
    expected = {"0": {"1": path}, "1": {"0": path}}
    wait_until(lambda: paths_of(light) == expected, f"{mode} streams")
    before = max(peer.epoch for peer in peers)
    wait_until(lambda: all(runs_smoothly(peer, after=before) for peer in peers), "epochs without a failure")
    wait_until(lambda: all(data_paths(peer)[-1:] == [path] for peer in peers), f"data by {path}")
    light.check_digests()
    # If a direct stream takes long, libp2p is used first.
    assert all(set(data_paths(peer)) <= {path, "libp2p"} for peer in peers)


def test_peers_that_differ_about_tls_use_it(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05)
    light.galaxy_size = 2
    light.extra["transport"] = "tcp"
    light.start(0)
    light.extra["transport"] = "auto"
    light.start(1)
    peers = list(light.peers.values())
    wait_until(lambda: all(data_paths(peer)[-1:] == ["direct"] for peer in peers), "direct streams")
    wait_until(lambda: all(map(runs_smoothly, peers)), "epochs without a failure")
    light.check_digests()
    assert not any("plain" in data_paths(peer) for peer in peers)


def test_an_endpoint_that_leads_nowhere_costs_no_round(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.02)
    # Nobody listens on this port.
    light.extra["announce_data_maddrs"] = ["/ip4/127.0.0.1/tcp/1"]
    peers = light.start_all(2)
    wait_until(lambda: all(peer.epoch >= 8 and runs_smoothly(peer) for peer in peers), "8 epochs")
    light.check_digests()
    for peer in peers:
        # After a failure the endpoint is not tried again for half a minute, then for a minute.
        assert 1 <= peer.log.count("no direct stream to") <= 3
        assert data_paths(peer) == ["libp2p"]


def half_closed(pid: int) -> int:
    """The number of TCP sockets that this process keeps open though the other end is closed."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", str(descriptor.readlink())))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "08" and row[9] in inodes for row in rows)


def test_a_peer_that_is_lost_leaves_no_stream_behind(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05)
    light.start_all(3)
    wait_until(lambda: all(peer.epoch >= 2 for peer in light.peers.values()), "epoch 2")
    light.peers.pop(2).kill()
    left = list(light.peers.values())
    wait_until(lambda: all(peer.epochs[-1]["contributors"] == [0, 1] for peer in left), "an epoch without it")
    wait_until(lambda: not any(half_closed(peer.process.pid) for peer in left), "no stream of it")


class Cable:
    """A TCP port that forwards to another one until it is cut."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.maddr = f"/ip4/127.0.0.1/tcp/{self._listener.getsockname()[1]}"
        self.leads_to = 0
        self._forwarder = Forwarder()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.leads_to))
                except OSError:
                    # Nobody listens yet. It may be a stranger that calls: another test has had this port before.
                    near.close()
                    continue
                self._forwarder.forward(near, far, lambda: None)

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self._forwarder.close()


def test_when_a_direct_path_breaks_in_mid_round_libp2p_takes_over(swarm):
    light = swarm(numel=6_000_000, local_steps=2, max_steps=100000, step_s=0.2)
    light.galaxy_size = 2
    cables = [Cable(), Cable()]
    try:
        for rank, cable in enumerate(cables):
            cable.leads_to = free_port()
            light.extra = {"data_port": cable.leads_to, "announce_data_maddrs": [cable.maddr]}
            light.start(rank)
        peers = list(light.peers.values())
        wait_until(lambda: all(peer.epoch >= 1 for peer in peers), "epoch 1")
        wait_until(lambda: all("goes by direct" in peer.log for peer in peers), "direct streams")
        attempts = peers[0].log.count("reducing with")
        wait_until(lambda: peers[0].log.count("reducing with") > attempts, "the next reduction")
    finally:
        for cable in cables:
            cable.cut()
    before = max(peer.epoch for peer in peers)
    wait_until(
        lambda: all(
            any(r["epoch"] > before and not r["num_failures"] for r in peer.epochs) for peer in peers
        ),
        "an epoch without the cables and without a failure",
    )
    light.check_none_is_missed()
    for peer in peers:
        # Compare only the last two: on a very busy machine another path may have been ready first.
        assert data_paths(peer)[-2:] == ["direct", "libp2p"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize(
    "hosts", exhaustive_but((["/ip6/::1"],), [["/ip6/::1"], ["/ip4/127.0.0.1", "/ip6/::1"]])
)
def test_peers_that_listen_on_ipv6_train_over_direct_streams(swarm, hosts):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05)
    light.extra["host_maddrs"] = [f"{host}/tcp/0" for host in hosts]
    peers = light.start_all(2)
    wait_until(lambda: all(data_paths(peer)[-1:] == ["direct"] for peer in peers), "direct streams")
    wait_until(lambda: all(map(runs_smoothly, peers)), "epochs without a failure")
    light.check_digests()
