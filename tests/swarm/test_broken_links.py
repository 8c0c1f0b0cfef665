"""The link between two live peers fails while all others still hear both: nobody's work is lost."""

from __future__ import annotations

import pytest

from benchmarks.chaos.links import Doors
from benchmarks.chaos.swarm import ChaosSwarm
from peers.timing import STREAMS_S
from tests.support.exhaustive import exhaustive_but
from tests.support.swarm import LightPeer, wait_until

NUM_PEERS = 4


@pytest.mark.parametrize("fail", exhaustive_but((Doors.cut,), [Doors.cut, Doors.silence]))
def test_a_link_that_fails_between_two_members_costs_neither_of_them_its_work(tmp_path, fail):
    pair = frozenset({2, 3})
    with ChaosSwarm(tmp_path, NUM_PEERS, numel=100_000, local_steps=4, max_steps=10**6, step_s=0.05) as swarm:
        for rank in range(NUM_PEERS):
            swarm.start(rank)
        peers = [swarm.peers[rank] for rank in range(NUM_PEERS)]
        wait_until(lambda: all(peer.epoch >= 3 for peer in peers), "epoch 3")
        fail(swarm.doors, [pair], True)
        # Wait for the lost channels, as a peer may be back by a relay before it counts as lost.
        channel = "lost the channel to peer"
        wait_until(lambda: f"{channel} 2" in peers[3].log and f"{channel} 3" in peers[2].log, "the loss")
        epoch = peers[0].epoch
        # Another peer relays their messages and their data.
        wait_until(
            lambda: any(
                record["epoch"] > epoch and record["contributors"] == [0, 1, 2, 3]
                for record in peers[0].epochs
            ),
            "an epoch of all of them",
        )
        for peer in peers[2:]:
            assert_all_work_is_counted(peer)
        swarm.check_digests()


@pytest.mark.exhaustive
def test_a_link_that_fell_silent_between_two_rounds_holds_no_round_up(tmp_path):
    pair = frozenset({2, 3})
    with ChaosSwarm(
        tmp_path, NUM_PEERS, numel=100_000, local_steps=80, max_steps=10**6, step_s=0.05
    ) as swarm:
        for rank in range(NUM_PEERS):
            swarm.start(rank)
        peers = [swarm.peers[rank] for rank in range(NUM_PEERS)]
        wait_until(lambda: all(peer.epoch >= 2 for peer in peers), "epoch 2")
        swarm.doors.silence([pair], True)
        epoch = peers[0].epoch
        wait_until(lambda: all(peer.epoch >= epoch + 3 for peer in peers), "three epochs more")
        after = [record for record in peers[0].epochs if record["epoch"] > epoch]
        wait_until(lambda: peers[0].epochs[-1]["contributors"] == [0, 1, 2, 3], "an epoch of all of them")
        assert "by relay" in peers[2].log and "by relay" in peers[3].log
        # A peer that tried the silent link first would wait for its stream until the timeout.
        assert all(record["round_s"] < STREAMS_S for record in after)
        for peer in peers[2:]:
            assert_all_work_is_counted(peer)
        swarm.check_digests()


def assert_all_work_is_counted(peer: LightPeer) -> None:
    """Tokens that a worker hands over are in that commit, or are handed over again with the next ones."""
    handed_over = [record["tokens"] for record in peer.records("ready")]
    for tokens, told, following in zip(handed_over, peer.epochs, handed_over[1:], strict=False):
        assert following > tokens or peer.rank in told["contributors"]
