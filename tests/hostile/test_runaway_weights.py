"""One member of a group of five pushes its weights by +100 in every value at every local step.

Under each rule the honest members go on, agree on every bit, and stay within what the rule promises; `mean` promises
nothing. The outer step is plain here (learning rate 1, no momentum): an epoch's anchor is where the average leads.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.light_worker import initial_weights, target_of, train_step
from peers.reduce.robust_sums import CLIP_ITERATIONS
from tests.support.swarm import LightSwarm, check_well, wait_until

PUSHER, NEWCOMER, NUM_FOUNDERS = 1, 5, 5
PUSH, NUMEL, LOCAL_STEPS = 100.0, 64, 4
EPOCHS = 4
CLIP_FACTOR = 4.0
"""What the documents promise: a longer step than so many times the median is scaled down to it."""
ROUNDING = 1e-4

Bound = Callable[[np.ndarray, np.ndarray, np.ndarray], bool]
"""(anchor before, weights of the honest members [members, numel], anchor after) -> whether it is where it may be. The
pusher is one more member."""


def clip_holds(before: np.ndarray, honest: np.ndarray, after: np.ndarray) -> bool:
    """One of n members, scaled down to 4 times the median step, and weighed as all others are: it moves the average by
    4/n of an honest step at most, and the honest, who are all but one, lack 1/n of their way."""
    longest = max(np.linalg.norm(weights - before) for weights in honest)
    most = (CLIP_FACTOR + 1) / (len(honest) + 1) * longest
    return bool(np.linalg.norm(after - honest.mean(axis=0)) <= most + ROUNDING)


def trimmed_mean_holds(before: np.ndarray, honest: np.ndarray, after: np.ndarray) -> bool:
    """Of up to nine members one is left out on either side: every value lies between those of the honest."""
    return bool(
        (honest.min(axis=0) - ROUNDING <= after).all() and (after <= honest.max(axis=0) + ROUNDING).all()
    )


def centered_clip_holds(before: np.ndarray, honest: np.ndarray, after: np.ndarray) -> bool:
    """The centre begins at the median of each value, so no farther from any honest member than the spread of all.
    From there one of n members pulls it by 1/n of the median distance at most in each iteration, and that distance is
    some honest member's."""
    spread = np.linalg.norm(honest.max(axis=0) - honest.min(axis=0))
    most = (1 + 1 / (len(honest) + 1)) ** CLIP_ITERATIONS * spread
    return all(np.linalg.norm(after - weights) <= most + ROUNDING for weights in honest)


BOUNDS: dict[str, Bound] = {
    "clip": clip_holds,
    "trimmed-mean": trimmed_mean_holds,
    "centered-clip": centered_clip_holds,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", BOUNDS)
def test_the_anchor_stays_where_the_rule_keeps_it(rule, swarm):
    steps = train_beside_the_pusher(swarm, rule)
    for epoch, step in steps.items():
        assert BOUNDS[rule](*step), f"epoch {epoch}"


@pytest.mark.exhaustive
def test_under_mean_the_anchor_is_carried_away(swarm):
    steps = train_beside_the_pusher(swarm, "mean")
    assert not any(holds(*steps[min(steps)]) for holds in BOUNDS.values())
    *_, anchor = steps[max(steps)]
    assert anchor.min() > PUSH


def train_beside_the_pusher(swarm: Callable[..., LightSwarm], rule: str) -> dict[int, tuple[np.ndarray, ...]]:
    """What a Bound is asked, of every epoch whose members were all in the one before: each has brought one epoch's
    work."""
    light = swarm(numel=NUMEL, local_steps=LOCAL_STEPS, max_steps=10**9, step_s=0.02, tells_anchor=True)
    light.manifest = {"hv.aggregation": rule, "hv.outer_lr": 1.0, "hv.outer_momentum": 0.0}
    light.galaxy_size = NUM_FOUNDERS
    for rank in range(NUM_FOUNDERS):
        light.start(rank, **({"push": PUSH} if rank == PUSHER else {}))
    wait_until(lambda: least_epoch(light) >= EPOCHS, f"{EPOCHS} epochs")
    newcomer = light.start(NEWCOMER)
    wait_until(lambda: newcomer.epochs, "an epoch of the newcomer")
    joined = newcomer.epoch
    wait_until(lambda: least_epoch(light) >= joined + EPOCHS, f"{EPOCHS} more epochs")
    light.check_digests()
    check_well(light.peers.values())
    steps = steps_of(light)
    assert min(steps) <= EPOCHS and max(steps) > joined
    return steps


def least_epoch(light: LightSwarm) -> int:
    return min(peer.epoch for peer in light.peers.values())


def steps_of(light: LightSwarm) -> dict[int, tuple[np.ndarray, ...]]:
    # Whoever was not in a commit has late work on top of the anchor.
    commits = {
        record["epoch"]: record
        for peer in light.peers.values()
        for record in peer.epochs
        if peer.rank in record["contributors"]
    }
    anchors = {epoch: np.array(commit["anchor"], np.float32) for epoch, commit in commits.items()}
    members = {epoch: set(commit["contributors"]) for epoch, commit in commits.items()}
    anchors[0], members[0] = initial_weights(NUMEL), set(range(NUM_FOUNDERS))
    steps = {}
    for epoch in sorted(commits):
        if members[epoch] <= members.get(epoch - 1, set()) and PUSHER in members[epoch]:
            before = anchors[epoch - 1]
            honest = np.stack([trained(before, rank) for rank in sorted(members[epoch] - {PUSHER})])
            steps[epoch] = before, honest, anchors[epoch]
    return steps


def trained(anchor: np.ndarray, rank: int) -> np.ndarray:
    """An honest worker's weights after an epoch."""
    weights = anchor
    for _ in range(LOCAL_STEPS):
        weights = train_step(weights, target_of(rank, NUMEL))
    return weights
