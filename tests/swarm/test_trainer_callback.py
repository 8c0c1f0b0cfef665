"""Real daemons, and workers that are a transformers Trainer with DilocoCallback."""

from __future__ import annotations

import pytest

from tests.support.swarm import wait_until


@pytest.mark.exhaustive
def test_trainers_that_begin_with_unlike_weights_hold_the_same_bits_after_a_kill_too(swarm):
    light = swarm(local_steps=40, max_steps=100_000)
    light.worker_module = "tests.support.trainer_worker"
    light.start_all(2)

    def weights_after_common_epochs() -> list[dict[int, str]]:
        # Whoever comes too late for an epoch, as the killed one may, goes on with work of its own on top.
        return [
            {r["epoch"]: r["weights"] for r in peer.epochs if r["contributors"] == [0, 1]}
            for peer in light.peers.values()
        ]

    wait_until(lambda: all(weights_after_common_epochs()), "the first epoch")
    light.peers[1].kill_worker()
    killed_in = light.peers[0].epoch
    wait_until(
        lambda: all(max(found) > killed_in + 1 for found in weights_after_common_epochs()),
        "an epoch with the killed trainer",
    )
    light.check_digests()
    first, second = weights_after_common_epochs()
    both = first.keys() & second.keys()
    assert len(both) >= 2 and len({first[epoch] for epoch in both}) == len(both)
    assert all(first[epoch] == second[epoch] for epoch in both)
