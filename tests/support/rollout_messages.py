"""Rollouts as a rollout peer hands them over, for tests."""

from __future__ import annotations

from typing import Any

from peers.daemon.rollout_queue import Terms
from peers.protocol.rollouts import Completion, Rollout

RUN, ME = "run", "learner"
NUM_GENERATIONS = 2
FIRST = 100
"""Number of each rollout peer's first rollout."""


def terms(**changes: Any) -> Terms:
    usual = {
        "vocab_size": 50,
        "num_generations": NUM_GENERATIONS,
        "max_tokens": 4,
        "reward_weights": (0.9, 0.1),
        "num_examples": 1000,
        "max_staleness": 2,
        "num_kept": 4,
    }
    return Terms(**{**usual, **changes})


def completion(**changes: Any) -> Completion:
    return Completion(**{"tokens": (7, 8), "logprobs": (-0.5, -1.5), "scores": (1.0, 0.0), **changes})


def rollout(number: int = FIRST, policy: str = "a" * 64, **changes: Any) -> Rollout:
    usual = {
        "run_id": RUN,
        "learner": ME,
        "policy": policy,
        "number": number,
        "completions": (completion(), completion(scores=(0.0, 0.0))),
    }
    return Rollout(**{**usual, **changes})


def uniform(number: int = FIRST, **changes: Any) -> Rollout:
    """A rollout whose completions earn the same reward by different scores: 0.9 * 0.1 and 0.1 * 0.9."""
    even = (completion(scores=(0.1, 0.0)), completion(scores=(0.0, 0.9)))
    return rollout(number, **{"completions": even, **changes})
