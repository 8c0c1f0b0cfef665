"""Epochs without faults: what every peer holds afterwards."""

from __future__ import annotations

import numpy as np

from benchmarks.light_worker import initial_weights, target_of, train_step

NUMEL = 1000


def test_two_peers_end_every_epoch_on_equal_bits(swarm):
    light = swarm(local_steps=4, max_steps=20)
    light.start_all(2)
    light.wait_finished()
    assert sorted(light.check_digests()) == [1, 2, 3, 4, 5]
    for peer in light.peers.values():
        assert [record["contributors"] for record in peer.epochs] == [[0, 1]] * 5
    final = [np.load(light.directory / f"peer{rank}" / "history.jsonl.npy") for rank in range(2)]
    assert np.array_equal(final[0].view(np.uint32), final[1].view(np.uint32))


def test_three_peers_compute_plain_diloco(swarm):
    light = swarm(local_steps=3, max_steps=12, numel=NUMEL)
    light.start_all(3)
    light.wait_finished()
    expected = plain_diloco(num_peers=3, local_steps=3, epochs=4)
    actual = np.load(light.directory / "peer1" / "history.jsonl.npy")
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def plain_diloco(
    *, num_peers: int, local_steps: int, epochs: int, lr: float = 0.7, momentum: float = 0.9
) -> np.ndarray:
    """DiLoCo in one process, in float64 (arXiv 2311.08105, algorithm 1, Nesterov outside)."""
    anchor = initial_weights(NUMEL).astype(np.float64)
    velocity = np.zeros_like(anchor)
    for _ in range(epochs):
        gradients = []
        for rank in range(num_peers):
            weights = anchor.copy()
            for _ in range(local_steps):
                weights = train_step(weights, target_of(rank, NUMEL).astype(np.float64))
            gradients.append(anchor - weights)
        gradient = np.mean(gradients, axis=0)
        velocity = momentum * velocity + gradient
        anchor = anchor - lr * (gradient + momentum * velocity)
    return anchor


def test_epochs_shorter_than_the_news_of_them_fork_nobody(swarm):
    # Every peer is ready again before the others have heard that it has committed.
    light = swarm(local_steps=1, max_steps=150, numel=64, step_s=0.0)
    light.start_all(3)
    light.wait_finished()
    assert sorted(light.check_digests()) == list(range(1, 151))
    for peer in light.peers.values():
        assert [record["contributors"] for record in peer.epochs] == [[0, 1, 2]] * 150
