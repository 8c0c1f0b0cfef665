"""One member of a group of five pushes its weights by +100 in every value at every local step.

Under each rule the honest members go on, agree on every bit, and stay within the rule's bound; `mean` has no bound.
The outer step is plain here (learning rate 1, no momentum): each anchor is the one before minus the average.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from benchmarks.light_worker import initial_weights
from peers.reduce.robust_sums import CLIP_ITERATIONS
from tests.support.swarm import LightSwarm, check_well, wait_until

PUSHER, NEWCOMER, NUM_FOUNDERS = 1, 5, 5
PUSH, NUMEL, LOCAL_STEPS = 100.0, 64, 4
EPOCHS = 4
CLIP_FACTOR = 4.0
"""The documented limit: a step longer than this multiple of the median is scaled down to it."""
MAX_WEIGHT = 2.0
"""The documented limit: no member counts for more than this multiple of the median of the tokens."""
ROUNDING = 1e-4


@dataclass(frozen=True)
class Step:
    """A commit, seen from outside. Its members are the honest ones and the pusher."""

    before: np.ndarray
    """The anchor from which all members trained [numel]."""
    honest: np.ndarray
    """The weights that the honest members handed over [honest, numel]."""
    tokens: np.ndarray
    """The tokens of their work, and last those of the pusher's [honest + 1]."""
    after: np.ndarray
    """The anchor after the commit [numel]."""


Bound = Callable[[Step], bool]


def clip_holds(step: Step) -> bool:
    """The pusher's step is scaled down to 4 times the median, so it moves the average by at most its share of that;
    its share is also missing from the honest members' mean step."""
    shares = np.minimum(step.tokens, MAX_WEIGHT * statistics.median_low(step.tokens.tolist()))
    longest = max(np.linalg.norm(weights - step.before) for weights in step.honest)
    most = (CLIP_FACTOR + 1) * longest * shares[-1] / shares.sum()
    honest_mean = np.average(step.honest, axis=0, weights=shares[:-1])
    return bool(np.linalg.norm(step.after - honest_mean) <= most + ROUNDING)


def trimmed_mean_holds(step: Step) -> bool:
    """Of up to nine members, one is left out on either side, so every value lies between those of honest members."""
    lowest, highest = step.honest.min(axis=0), step.honest.max(axis=0)
    return bool(((lowest - ROUNDING <= step.after) & (step.after <= highest + ROUNDING)).all())


def centered_clip_holds(step: Step) -> bool:
    """The centre begins at the median of each value, so it is no farther from any honest member than their spread.
    In each iteration one of n members pulls it by at most 1/n of the median distance, which is no longer than the
    distance of some honest member."""
    spread = np.linalg.norm(step.honest.max(axis=0) - step.honest.min(axis=0))
    most = (1 + 1 / len(step.tokens)) ** CLIP_ITERATIONS * spread
    return all(np.linalg.norm(step.after - weights) <= most + ROUNDING for weights in step.honest)


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
        assert BOUNDS[rule](step), f"epoch {epoch}"


@pytest.mark.exhaustive
def test_under_mean_the_anchor_is_carried_away(swarm):
    steps = train_beside_the_pusher(swarm, "mean")
    assert not any(holds(steps[min(steps)]) for holds in BOUNDS.values())
    assert steps[max(steps)].after.min() > PUSH


def train_beside_the_pusher(swarm: Callable[..., LightSwarm], rule: str) -> dict[int, Step]:
    """By epoch, the commits with the pusher whose members were all in the commit before."""
    light = swarm(numel=NUMEL, local_steps=LOCAL_STEPS, max_steps=10**9, step_s=0.02, tells_weights=True)
    light.manifest = {"hv.aggregation": rule, "hv.outer_lr": 1.0, "hv.outer_momentum": 0.0}
    light.galaxy_size = NUM_FOUNDERS
    for rank in range(NUM_FOUNDERS):
        light.start(rank, **({"push": PUSH} if rank == PUSHER else {}))
    wait_until(lambda: light.least_epoch() >= EPOCHS, f"{EPOCHS} epochs")
    newcomer = light.start(NEWCOMER)
    wait_until(lambda: newcomer.epochs, "an epoch of the newcomer")
    joined = newcomer.epoch
    wait_until(lambda: light.least_epoch() >= joined + EPOCHS, f"{EPOCHS} more epochs")
    light.check_digests()
    check_well(light.peers.values())
    steps = steps_of(light)
    assert min(steps) <= EPOCHS and max(steps) > joined
    return steps


def steps_of(light: LightSwarm) -> dict[int, Step]:
    # A peer that was not in a commit has late work on top of the anchor.
    commits = {
        record["epoch"]: record
        for peer in light.peers.values()
        for record in peer.epochs
        if peer.rank in record["contributors"]
    }
    works = {
        (record["epoch"], peer.rank): record
        for peer in light.peers.values()
        for record in peer.records("ready")
    }
    anchors = {epoch: np.array(commit["anchor"], np.float32) for epoch, commit in commits.items()}
    members = {epoch: set(commit["contributors"]) for epoch, commit in commits.items()}
    anchors[0], members[0] = initial_weights(NUMEL), set(range(NUM_FOUNDERS))
    steps = {}
    for epoch in sorted(commits):
        if members[epoch] <= members.get(epoch - 1, set()) and PUSHER in members[epoch]:
            # The tokens come from the workers' own records, as one that went ahead or skipped steps has trained fewer.
            brought = [works[epoch - 1, rank] for rank in (*sorted(members[epoch] - {PUSHER}), PUSHER)]
            honest = np.array([work["weights"] for work in brought[:-1]], np.float32)
            tokens = np.array([work["tokens"] for work in brought])
            steps[epoch] = Step(anchors[epoch - 1], honest, tokens, anchors[epoch])
    return steps
