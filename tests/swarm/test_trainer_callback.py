"""Real daemons, and workers that are a transformers Trainer with DilocoCallback."""

from __future__ import annotations

import pytest

from tests.support.swarm import DEADLINE_S, wait_until


@pytest.mark.exhaustive
def test_trainers_that_begin_with_unlike_weights_hold_the_same_bits_after_a_kill_too(swarm):
    light = swarm(local_steps=40, max_steps=100_000)
    light.worker_module = "tests.support.trainer_worker"
    light.start_all(2)

    def weights_of_common_epochs() -> dict[int, list[str]]:
        # A peer that was too late for an epoch, or trained on while it awaited the commit, has own work on top.
        of_peers = [
            {
                r["epoch"]: r["weights"]
                for r in peer.epochs
                if r["contributors"] == [0, 1] and not r["own_steps"]
            }
            for peer in light.peers.values()
        ]
        both = of_peers[0].keys() & of_peers[1].keys()
        return {epoch: [weights[epoch] for weights in of_peers] for epoch in sorted(both)}

    wait_until(weights_of_common_epochs, "the first epoch")
    light.peers[1].kill_worker()
    killed_in = light.peers[0].epoch
    # After a fault no trainer waits for a commit until RECENT_COMMITS commits have had no fault.
    wait_until(
        lambda: max(weights_of_common_epochs()) > killed_in + 1,
        "an epoch with the killed trainer and without own steps on top",
        4 * DEADLINE_S,
    )
    light.check_digests()
    weights = weights_of_common_epochs()
    assert all(first == second for first, second in weights.values())
    assert len(weights) >= 2 and len({first for first, _ in weights.values()}) == len(weights)
