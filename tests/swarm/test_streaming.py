"""Real daemons and `Diloco(model)` with fragments, overlap and lossy codecs, one named fault each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from peers.core.schedule import AS_LONG_AS_THE_ROUND
from tests.support.exhaustive import exhaustive_but
from tests.support.swarm import LightPeer, LightSwarm, wait_until

STREAMING = {"hv.num_fragments": 2, "hv.overlap_steps": 3, "hv.compression": "int4"}


@pytest.fixture
def streaming(swarm: Callable[..., LightSwarm]) -> Callable[..., LightSwarm]:
    def make(**worker: object) -> LightSwarm:
        light = swarm(local_steps=20, optimizer="adamw", saves=False, **worker)
        light.worker_module, light.manifest = "tests.support.torch_worker", STREAMING
        return light

    return make


@pytest.mark.exhaustive
def test_a_peer_killed_while_fragments_are_under_way_costs_the_others_no_epoch_and_comes_back(streaming):
    light = streaming(max_steps=100_000, step_s=0.03)
    light.start_all(3)
    wait_until(lambda: light.peers[2].epoch >= 3, "epoch 3")
    light.peers[2].kill()
    before = light.peers[0].epoch
    wait_until(lambda: min(p.epoch for p in (light.peers[0], light.peers[1])) > before, "the next epoch")

    back = light.start(2)
    started = wait_until(lambda: back.records("start")[1:], "the killed peer's second start")[-1]
    wait_until(lambda: back.epoch >= started["epoch"] + 3, "both fragments of the peer that came back")
    wait_until(
        lambda: any(2 in r["contributors"] for r in light.peers[0].epochs if r["epoch"] > started["epoch"]),
        "an epoch with its work",
    )
    light.check_none_is_missed()
    # Skip epochs that it only caught up with, as those are recorded with the fragment that it had handed over.
    averaged = [r for r in light.peers[0].epochs if len(r["contributors"]) > 1]
    assert all(r["fragment"] == (r["epoch"] - 1) % 2 for r in averaged)


@pytest.mark.parametrize("overlap", exhaustive_but((AS_LONG_AS_THE_ROUND,), [2, AS_LONG_AS_THE_ROUND]))
def test_in_the_end_all_peers_hold_one_model_though_fragments_went_one_by_one(swarm, overlap):
    light = swarm(local_steps=6, max_steps=24, optimizer="adamw")
    light.worker_module, light.manifest = (
        "tests.support.torch_worker",
        {**STREAMING, "hv.overlap_steps": overlap},
    )
    # Only two: with three, a commit may leave one out, which then keeps its own work until the next.
    light.start_all(2)
    light.wait_finished()
    digests = light.check_digests()
    models = [
        np.load(light.directory / f"peer{rank}" / f"history.jsonl.epoch{max(digests)}.npy")
        for rank in range(2)
    ]
    assert np.array_equal(models[0], models[1])


def recorded_by_both(one: LightPeer, other: LightPeer, contributors: list[int]) -> list[tuple[Any, Any]]:
    """Both peers' records of each epoch that, by both records, exactly these contributors averaged."""
    ours, theirs = [
        {record["epoch"]: record for record in peer.epochs if record["contributors"] == contributors}
        for peer in (one, other)
    ]
    return [(record, theirs[epoch]) for epoch, record in ours.items() if epoch in theirs]


@pytest.mark.exhaustive
def test_peers_of_unlike_speed_find_out_how_long_an_epoch_should_take(streaming):
    light = streaming(max_steps=100_000, step_s=0.04)
    light.manifest = {"hv.local_time": 0, "hv.local_steps": 20}
    light.galaxy_size = 3
    fast, _, slow = light.start(0), light.start(1), light.start(2, step_s=0.2)

    def timed() -> list[tuple[Any, Any]]:
        """The epochs of all three, from the first one whose length the swarm has worked out."""
        return [pair for pair in recorded_by_both(fast, slow, [0, 1, 2]) if pair[0]["epoch"] >= 3]

    wait_until(lambda: len(timed()) >= 4, "four epochs of all three")
    light.check_digests()
    known = timed()
    lengths = [b["time"] - a["time"] for (a, _), (b, _) in itertools.pairwise(known)]
    # The slow peer would need 4 s for 20 steps; the fast ones need 0.8 s.
    assert min(lengths) < 4
    check_steps(known, fewer_than=20)


def check_steps(known: list[tuple[Any, Any]], *, fewer_than: int) -> None:
    """The slow peer trains fewer steps than all of an epoch, but some; the fast one trains more."""
    fast, slow = [[record["num_steps"] for record in records] for records in zip(*known, strict=True)]
    assert all(1 <= num_steps < fewer_than for num_steps in slow)
    # An epoch ends by the clock, so how many steps it holds depends on how busy the machine is.
    assert sum(fast) > sum(slow)
