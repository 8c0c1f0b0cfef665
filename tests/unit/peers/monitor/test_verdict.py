"""The verdict on a run names each thing that can go wrong, and only what has gone wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest

from peers.monitor.verdict import PeerFacts, SwarmFacts, judged_losses, judged_rewards, verdict_of


def swarm(*changes: dict[str, Any], **of_swarm: Any) -> SwarmFacts:
    """Three healthy peers, the first of which have these changes."""
    usual: dict[str, Any] = {"step": 500, "step_s": 1.0, "round_share": 0.02, "bytes_per_s": 1e8}
    peers = [
        PeerFacts(**{**usual, "world_rank": rank, **(changes[rank] if rank < len(changes) else {})})
        for rank in range(3)
    ]
    return SwarmFacts(peers=peers, **of_swarm)


def falling(until: int, *, then: float = 0.0, last: int = 500) -> list[tuple[int, float]]:
    """A loss that falls from 6 to 3 at step `until`, and then grows by `then` at each step."""
    return [(s, 6 - 3 * min(s, until) / until + then * max(0, s - until)) for s in range(0, last, 5)]


SLOW_LINK = {"round_share": 0.31, "bytes_per_s": 2.5e6, "round_bytes": 1e7, "compression": "fp32"}
WELL = "healthy: 3 peers, averaging takes 2.0% of the time"
TABLE = {
    "all is well": (swarm(), "good", WELL),
    "the loss falls": (swarm({"losses": falling(500)}), "good", WELL),
    "a loss that goes up and down with the averagings": (
        swarm({"losses": [(s, 4 + (s // 40 % 2) - s / 500) for s in range(0, 500, 5)]}),
        "good",
        WELL,
    ),
    "a loss that lies around zero is none that has to fall": (
        swarm({"losses": [(s, 0.01 * (s % 3 - 1) + s / 1e4 - 0.02) for s in range(0, 500, 5)]}),
        "good",
        WELL,
    ),
    "the reward rises": (swarm({"rewards": [(s, s / 500) for s in range(500)]}), "good", WELL),
    "the reward falls": (
        swarm({"rewards": [(s, min(s, 500 - s) / 250) for s in range(500)]}),
        "warning",
        "the reward falls: 0.102, from 0.95 at step 274; a lower --lr may help",
    ),
    "the reward stays": (
        swarm({"rewards": [(s, 0.25) for s in range(500)]}),
        "warning",
        "the reward has not risen: 0.25, and 0.25 at the beginning; more steps, a higher --lr or an easier --dataset",
    ),
    "nothing is learned": (
        swarm({"not_learning": ["all rewards are zero"]}, {"not_learning": ["all rewards are zero"]}),
        "warning",
        "all rewards are zero",
    ),
    "a slow step is no stall": (swarm({"step_s": 9.0, "idle_s": 20.0}), "good", WELL),
    "a first step may take minutes": (
        swarm({"step": 0, "step_s": 0.0, "for_s": 68.0, "idle_s": 68.0}),
        "good",
        "healthy: 3 peers, step 1 of peer 0 has taken 68 s so far",
    ),
    "a first step without a micro-batch for long": (
        swarm({"step": 0, "step_s": 0.0, "for_s": 300.0, "idle_s": 130.0}),
        "fault",
        "peer 0 has stood still for 2 min at step 0: see its worker",
    ),
    "an evaluation may last": (swarm({"doing": "evaluating", "idle_s": 60.0}), "good", WELL),
    "nobody reports": (
        swarm(withheld="this swarm is closed"),
        "warning",
        "this swarm is closed",
    ),
    "nobody": (SwarmFacts(), "busy", "nobody is there: start a peer, or check the name of the run"),
    "starting": (
        swarm({"doing": "waiting for peers", "in_words": "waiting for peers, 1 of 3 are here"}),
        "busy",
        "getting ready: peer 0 is waiting for peers, 1 of 3 are here",
    ),
    "a learner may wait for rollouts for long": (
        swarm({"doing": "waiting", "in_words": "waiting: for rollouts", "idle_s": 600.0}),
        "busy",
        "getting ready: peer 0 is waiting: for rollouts",
    ),
    "lost": (
        swarm({}, {"state": "lost", "gone_s": 12.0}),
        "fault",
        "peer 1 was lost 12 s ago, the others continue without it; start it again with the same command",
    ),
    "silent": (swarm({"state": "silent"}), "fault", "peer 0 does not answer, the others continue without it"),
    "stalled": (
        swarm({"idle_s": 9.0}),
        "fault",
        "peer 0 has stood still for 9 s at step 500: see its worker",
    ),
    "an evaluation that hangs": (
        swarm({"doing": "evaluating", "idle_s": 300.0}),
        "fault",
        "peer 0 has stood still for 5 min (evaluating)",
    ),
    "diverged": (
        swarm({}, {"troubles": ("its loss is not a number any more",)}),
        "fault",
        "peer 1: its loss is not a number any more",
    ),
    "the clock is behind": (
        swarm({"clock_ahead_s": -42.0}),
        "fault",
        "peer 0's clock is 42 s behind: set it right",
    ),
    "the clock is ahead": (swarm({"clock_ahead_s": 7.0}), "fault", "peer 0's clock is 7 s ahead"),
    "it is the observer's clock": (swarm(*[{"clock_ahead_s": 50.0}] * 3), "good", WELL),
    "other weights": (swarm(differs_at=7), "fault", "peers hold different weights since epoch 7: restart"),
    "a slow peer": (
        swarm({"wait_share": 0.6}, {"wait_share": 0.6}, {"step_s": 3.0}),
        "warning",
        "peer 2 trains at a third of the others' speed, so they wait for it 60% of the time: begin the run "
        "with --hv.local-time auto, or leave this peer out",
    ),
    "a peer that has just come": (
        swarm({"wait_share": 0.6}, {"wait_share": 0.6}, {"step_s": 3.0, "num_rounds": 2}),
        "good",
        WELL,
    ),
    "a slow peer nobody waits for": (swarm({}, {}, {"step_s": 3.0}), "good", WELL),
    "slow links": (
        swarm(SLOW_LINK, SLOW_LINK, SLOW_LINK),
        "warning",
        "links carry 20Mbit/s, averaging takes 31% of the time: try --hv.compression int4",
    ),
    "slow links, with the lightest codec": (
        swarm(*[{**SLOW_LINK, "compression": "topk"}] * 3),
        "warning",
        "links carry 20Mbit/s, averaging takes 31% of the time: try more --hv.local-steps",
    ),
    "rounds of next to nothing": (
        swarm(*[{**SLOW_LINK, "round_bytes": 1e3}] * 3),
        "warning",
        "averaging takes 31% of the time: try more --hv.local-steps",
    ),
    "a loss that stands": (
        swarm({"losses": falling(200, then=0.0002)}),
        "warning",
        "the loss has not fallen since step",
    ),
    "a loss that rises": (swarm({"losses": falling(200, then=0.01)}), "warning", "the loss rises: "),
    "rounds that fail": (
        swarm({"num_failures": 4, "failure": "lost peer 2"}),
        "warning",
        "4 attempts at the last rounds failed, the last one: lost peer 2",
    ),
}


@pytest.mark.parametrize(("facts", "level", "text"), TABLE.values(), ids=TABLE.keys())
def test_each_fault_is_named_and_nothing_else(facts: SwarmFacts, level: str, text: str):
    verdict = verdict_of(facts)
    assert (verdict.level, verdict.text[: len(text)]) == (level, text)
    assert verdict.more == ()


def test_the_worst_comes_first_and_the_rest_is_not_lost():
    verdict = verdict_of(swarm({"troubles": ("its disk is full",)}, {"state": "lost"}))
    assert verdict.text == "peer 0: its disk is full"
    assert [text[:22] for text in verdict.more] == ["peer 1 was lost, the o"]


def test_that_nobody_reports_comes_before_what_an_observer_makes_of_the_rest():
    verdict = verdict_of(swarm({"state": "silent"}, withheld="this swarm is closed"))
    assert (verdict.level, verdict.text) == ("fault", "this swarm is closed")
    assert [text[:22] for text in verdict.more] == ["peer 0 does not answer"]


def test_when_everybody_is_lost_nobody_goes_on():
    verdict = verdict_of(SwarmFacts(peers=[PeerFacts(world_rank=0, state="lost")]))
    assert verdict.text == "peer 0 was lost, nobody is left; start it again with the same command"


def test_an_observer_that_has_just_come_does_not_say_since_when_a_peer_is_lost():
    verdict = verdict_of(swarm({}, {"state": "lost", "gone_s": 0.3}))
    assert verdict.text.startswith("peer 1 was lost, the others continue without it")


def test_a_loss_of_few_points_that_stands_says_little():
    assert verdict_of(swarm({"losses": falling(100, then=0.0002, last=300)})).level == "good"


def test_a_curve_of_two_hundred_thousand_points_is_judged_at_once():
    began_s = time.thread_time()
    assert len(list(judged_losses(falling(100_000, then=1e-4, last=1_000_000)))) == 1
    # It would take a minute if each window were summed anew.
    assert time.thread_time() - began_s < 10


def test_a_reward_that_stays_has_not_risen_by_a_rounding_error():
    assert [text[:24] for text in judged_rewards([(s, 0.1) for s in range(500)])] == [
        "the reward has not risen"
    ]
