"""Real daemons on loopback, one named fault each."""

from __future__ import annotations

import re
import signal
import time
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from peers.core.timing import Timing
from tests.support.exhaustive import exhaustive_but
from tests.support.preparations import poison
from tests.support.swarm import wait_until

GOES_ON_WITHIN_S = 30.0
LEAVES_WITHIN_S = 20.0


def test_a_peer_killed_while_training_costs_the_others_no_epoch_and_comes_back(swarm):
    light = swarm(local_steps=10, max_steps=100000, step_s=0.05)
    light.start_all(3)
    wait_until(lambda: light.peers[2].epoch >= 2, "epoch 2")
    light.peers[2].kill()
    before = light.peers[0].epoch
    wait_until(
        lambda: light.peers[0].epoch > before and light.peers[1].epoch > before, "the survivors' next epoch"
    )
    light.check_none_is_missed()

    back = light.start(2)
    wait_until(lambda: back.records("start")[1:], "the killed peer's second start")
    # Use another peer's record, as its own also lists the epochs that it only caught up with.
    wait_until(
        lambda: any(2 in r["contributors"] for r in light.peers[0].epochs if r["epoch"] > before + 1),
        "an epoch with its work",
    )
    light.check_none_is_missed()


def test_a_peer_that_is_told_to_end_leaves_and_is_not_waited_for(swarm):
    light = swarm(local_steps=10, max_steps=100000, step_s=0.05)
    one, other = light.start_all(2)
    wait_until(lambda: one.epoch >= 2 and other.epoch >= 2, "epoch 2")
    other.process.terminate()
    other.process.join(LEAVES_WITHIN_S)
    assert other.process.exitcode == 128 + signal.SIGTERM
    ended_at, before = time.time(), one.epoch
    alone = wait_until(lambda: [r for r in one.epochs if r["contributors"] == [0]], "an epoch without it")
    # A peer that has died is given time to come back first.
    assert alone[0]["time"] < ended_at + Timing(most_grace_s=60, most_attempt_s=60).regain_s / 2
    assert alone[0]["epoch"] <= before + 1


@pytest.mark.parametrize("victim", exhaustive_but((0,), [0, 2]))
def test_a_peer_killed_while_its_bytes_are_on_the_wire_costs_one_attempt(swarm, victim: int):
    # With 64 MB a peer, reductions last long enough to be hit.
    light = swarm(numel=16_000_000, local_steps=2, max_steps=100000, step_s=0.2)
    light.start_all(3)
    survivors = [peer for rank, peer in light.peers.items() if rank != victim]
    wait_until(lambda: survivors[0].epoch >= 1, "epoch 1")
    attempts = light.peers[victim].log.count("reducing with")
    wait_until(lambda: light.peers[victim].log.count("reducing with") > attempts, "the next reduction")
    light.peers[victim].kill()
    before = survivors[0].epoch
    wait_until(lambda: all(peer.epoch > before for peer in survivors), "the survivors' next epoch")
    light.check_none_is_missed()


def test_while_a_killed_worker_starts_again_the_others_go_on_and_it_begins_where_they_are(swarm):
    light = swarm(local_steps=10, max_steps=100000, step_s=0.05)
    one, other = light.start_all(2)
    wait_until(lambda: other.epoch >= 1, "epoch 1")
    other.kill_worker()
    killed_at, before = time.time(), one.epoch
    wait_until(lambda: one.epoch > before, "the next epoch")
    assert time.time() - killed_at < GOES_ON_WITHIN_S
    started = wait_until(lambda: other.records("start")[1:], "the worker's second start")[0]
    assert started["epoch"] >= before
    wait_until(lambda: one.epochs[-1]["contributors"] == [0, 1], "an epoch of both")
    light.check_none_is_missed()


@pytest.mark.exhaustive
def test_a_straggler_is_left_behind_and_its_work_counts_next_time(swarm):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05)
    light.extra = {"all_reduce_strategy": "NO_WAIT", "matchmaking_time": 0.3}
    light.galaxy_size = 3
    for rank in range(3):
        light.start(rank, step_s=0.4 if rank == 2 else 0.05)
    straggler = light.peers[2]

    def epochs(*, with_it: bool) -> list[dict[str, Any]]:
        return [record for record in straggler.epochs if (2 in record["contributors"]) == with_it]

    wait_until(lambda: len(epochs(with_it=False)) >= 2, "epochs missed by the straggler")
    wait_until(lambda: len(epochs(with_it=True)) >= 3, "epochs with its work")
    # None of its work is lost: its tokens are handed over again until they are in a commit.
    handed_over = [record["tokens"] for record in straggler.records("ready")]
    for tokens, record, following in zip(handed_over, straggler.epochs, handed_over[1:], strict=False):
        assert following >= tokens or 2 in record["contributors"]
    light.check_none_is_missed()


@pytest.mark.exhaustive
def test_who_is_slow_to_answer_a_newcomer_is_waited_for_and_no_second_run_begins(swarm):
    light = swarm(local_steps=5, max_steps=100000, step_s=0.05)
    first = light.start_all(1)[0]
    wait_until(lambda: first.epoch >= 1, "epoch 1")
    first.freeze()
    newcomer = light.start(1)
    wait_until(lambda: "cannot reach" in newcomer.log, "a call that was not answered")
    first.thaw()
    wait_until(
        lambda: newcomer.epochs and newcomer.epochs[-1]["contributors"] == [0, 1], "an epoch of both peers"
    )
    light.check_digests()


@pytest.mark.parametrize("lie", exhaustive_but(("not finite",), ["not finite", "longer than announced"]))
def test_a_peer_that_sends_what_it_must_not_is_named_and_out_within_ten_epochs(swarm, lie):
    light = swarm(local_steps=4, max_steps=100000, step_s=0.05)
    light.preparations[3] = partial(poison, lie)
    honest = light.start_all(4)[:3]

    def named() -> list[float]:
        """When the honest peers named it; one may be enough, as the first to notice ends the attempt for all."""
        left_out = r"^(\S+ \S+) .* peer 3 .* left out of the next \d+ epochs"
        said = [found[1] for peer in honest if (found := re.search(left_out, peer.log, re.MULTILINE))]
        return [datetime.fromisoformat(when).timestamp() for when in said]

    named_at = min(wait_until(named, "its name"))
    records = [record for peer in honest for record in peer.epochs]
    assert max((r["epoch"] for r in records if r["time"] <= named_at), default=0) <= 10
    before = max(peer.epoch for peer in honest)
    wait_until(lambda: min(peer.epoch for peer in honest) >= before + 3, "three more epochs")
    wait_until(
        lambda: any(r["contributors"] == [0, 1, 2] for r in honest[0].epochs), "an epoch of the honest"
    )
    light.check_digests()
    assert all(3 not in record["contributors"] for peer in honest for record in peer.epochs)
