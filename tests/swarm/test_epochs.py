"""Epochs without faults: all peers hold the same weights afterwards."""

from __future__ import annotations

import numpy as np
import pytest


def test_two_peers_end_every_epoch_on_equal_bits(swarm):
    light = swarm(local_steps=4, max_steps=20)
    light.start_all(2)
    light.wait_finished()
    assert sorted(light.check_digests()) == [1, 2, 3, 4, 5]
    for peer in light.peers.values():
        assert [record["contributors"] for record in peer.epochs] == [[0, 1]] * 5
    final = [np.load(light.directory / f"peer{rank}" / "history.jsonl.npy") for rank in range(2)]
    assert np.array_equal(final[0].view(np.uint32), final[1].view(np.uint32))


@pytest.mark.exhaustive
def test_epochs_shorter_than_the_news_of_them_fork_nobody(swarm):
    # Epochs are so short that a peer is ready again before the others have heard of its commit.
    light = swarm(local_steps=1, max_steps=150, numel=64, step_s=0.0)
    light.start_all(3)
    light.wait_finished()
    assert sorted(light.check_digests()) == list(range(1, 151))
    for peer in light.peers.values():
        # A commit leaves out a peer that had to wait for a processor.
        assert sum(record["contributors"] == [0, 1, 2] for record in peer.epochs) > 100
