"""Real daemons, and workers that are a transformers Trainer with DilocoCallback."""

from __future__ import annotations

from tests.support.swarm import wait_until


def test_trainers_that_begin_with_unlike_weights_hold_the_same_bits_after_a_kill_too(swarm):
    light = swarm(local_steps=40, max_steps=100_000)
    light.worker_module = "tests.support.trainer_worker"
    light.start_all(2)
    wait_until(lambda: light.peers[1].epoch >= 1, "the first epoch")
    light.peers[1].kill_worker()
    killed_in = light.peers[0].epoch
    wait_until(lambda: light.peers[1].epoch > killed_in + 1, "the killed trainer's next epoch")
    light.check_digests()
    first, second = ({r["epoch"]: r["weights"] for r in light.peers[rank].epochs} for rank in (0, 1))
    both = first.keys() & second.keys()
    assert len(both) >= 2 and len({first[epoch] for epoch in both}) == len(both)
    assert all(first[epoch] == second[epoch] for epoch in both)
