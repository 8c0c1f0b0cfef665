"""Two peers that cannot reach each other, and a third that both can."""

from __future__ import annotations

import pytest

from tests.support.namespaces import hub, why_not
from tests.support.swarm import LightPeer, wait_until


def test_peers_with_no_path_between_them_train_through_a_third(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05, numel=300_000)
    light.no_path = {frozenset({1, 2})}
    # Only libp2p is blocked between the two, so they must not use TCP.
    light.extra["transport"] = "libp2p"
    light.start_all(3)
    wait_until(lambda: all(num_of_all_three(peer) >= 3 for peer in light.peers.values()), "three epochs")
    light.check_digests()
    for rank, other in ((1, 2), (2, 1)):
        peer = light.peers[rank]
        assert f"data for {light.peer_id(other)} goes by relay" in peer.log
        assert f"data for {light.peer_id(0)} goes by libp2p" in peer.log


def num_of_all_three(peer: LightPeer) -> int:
    return sum(record["contributors"] == [0, 1, 2] for record in peer.epochs)


@pytest.mark.exhaustive
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_two_peers_behind_walls_train_through_a_public_one_and_outlive_its_death(swarm):
    with hub(2) as lan:
        light = swarm(local_steps=4, max_steps=100000, step_s=0.1, numel=300_000)
        light.galaxy_size = 3
        light.namespaces = {0: lan.middle, 1: lan.spokes[0], 2: lan.spokes[1]}
        light.extra = {"host_maddrs": ["/ip4/0.0.0.0/tcp/4001"], "initial_peers": []}
        public = light.start(0)
        wait_until(lambda: public.address, "the public peer's address")
        for rank, spoke in enumerate(lan.spokes, start=1):
            maddr = f"/ip4/{lan.addresses[spoke]}/tcp/4001/p2p/{light.peer_id(0)}"
            light.extra["initial_peers"] = [maddr]
            light.start(rank)
        wait_until(
            lambda: all(num_of_all_three(peer) >= 3 for peer in light.peers.values()), "three epochs", 90
        )
        light.check_digests()

        def data_goes(rank: int, other: int, path: str) -> bool:
            return f"data for {light.peer_id(other)} goes by {path}" in light.peers[rank].log

        wait_until(lambda: data_goes(1, 0, "direct") and data_goes(2, 0, "direct"), "direct streams")
        assert data_goes(1, 2, "relay") and data_goes(2, 1, "relay")
        public.kill()
        left = [light.peers[1], light.peers[2]]
        before = [peer.epoch for peer in left]
        wait_until(
            lambda: all(peer.epoch > epoch + 1 for peer, epoch in zip(left, before, strict=True)),
            "epochs without the public peer",
        )
        light.extra["initial_peers"] = []
        light.start(0)
        wait_until(
            lambda: all(peer.epochs[-1]["contributors"] == [0, 1, 2] for peer in light.peers.values()),
            "an epoch of all three again",
        )
        light.close()
