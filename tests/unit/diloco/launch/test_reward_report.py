"""The figures at the end of a run of GRPO."""

from __future__ import annotations

from typing import Any

from diloco.launch.report import report_of
from diloco.options.flags import TrainConfig

CONFIG = TrainConfig(mode="grpo", total_batch_size=8)


def records(rewards: list[float], **figures: Any) -> list[dict[str, Any]]:
    """Records of one peer, which takes one step per second."""
    return [
        {
            "kind": "step",
            "step": n,
            "time": 10.0 + n,
            "loss": 0.01 * (-1) ** n,
            "step_s": 1.0,
            "reward": reward,
        }
        | figures
        for n, reward in enumerate(rewards)
    ]


def first_line(*of_peers: list[dict[str, Any]]) -> str:
    named = {f"peer {rank}": one for rank, one in enumerate(of_peers)}
    return report_of(CONFIG, named)[0].splitlines()[0]


def test_the_report_begins_with_a_verdict_on_rewards_not_on_losses():
    rising = records([n / 60 for n in range(60)])
    assert first_line(rising, rising) == "verdict                 healthy: 2 peers"
    falling = records([1 - n / 60 for n in range(60)])
    assert first_line(falling).startswith("verdict                 the reward falls: 0.0583, from 0.958")


def test_the_report_says_once_that_nothing_is_learned_and_why():
    nothing = records([0.0] * 60, same_reward=1.0)
    text = first_line(nothing, nothing)
    assert text.startswith(
        "verdict                 all rewards are zero, so nothing is learned: take an easier"
    )
    passing = [*nothing[:58], *records([0.5, 0.5], same_reward=0.0)]
    assert "all rewards" not in first_line(passing)


def test_a_peer_of_rewards_that_was_lost_is_named():
    finished = {"kind": "event", "event": "finished", "time": 90.0}
    rising = records([n / 60 for n in range(60)])
    text, _ = report_of(CONFIG, {"peer 0": [*rising, finished], "peer 1": rising[:20]})
    assert text.startswith("verdict                 peer 1 was lost, ")
    assert "\nlost                    peer 1, 19 s into training, and not back\n" in text
