"""Defines a task: numbered examples, and how a model's completions of them are judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.rl.answers import Completion, parsed
from diloco.rl.reward_pool import RewardPool

SYSTEM = (
    "Reason between <start_working_out> and <end_working_out>. "
    "Then give your answer between <SOLUTION> and </SOLUTION>."
)
SHORT_SYSTEM = "Give your answer between <SOLUTION> and </SOLUTION>."

Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """A prompt as chat messages, and the correct answer. `data` holds what else the task needs for judging."""

    prompt: list[Message]
    gold: str
    data: Mapping[str, Any] = field(default_factory=dict)


Component = Callable[[Completion, Example], float]
"""Computes a component of the reward, from 0 to 1. Not called for an empty completion."""


@dataclass(frozen=True)
class Reward:
    """A named component and its weight in the reward."""

    name: str
    weight: float
    score: Component


@dataclass
class Task:
    """The examples are the same on every machine. Training and held-out examples are numbered separately.

    `said` has the texts of the model's turns: one, or several if `reply` continues the dialogue (rl/environments.py).
    """

    name: str
    num_examples: int
    """The size of a finite data set; for a generator, the number of examples per pass."""
    num_held_out: int
    example: Callable[[int], Example]
    held_out: Callable[[int], Example]
    """A held-out example, for an index below `num_held_out`."""
    rewards: tuple[Reward, ...]
    solved: Component
    """1 for a completion that solves the example, less for others."""
    max_turns: int = 1
    pool: RewardPool = field(default_factory=RewardPool)
    """Judges many completions."""

    def reply(self, example: Example, said: Sequence[str]) -> str | None:
        """The environment's reply to the model's last turn; None if the dialogue is over."""
        return None

    def scores(self, example: Example, said: Sequence[str]) -> list[float]:
        """The score in each component of the reward; all 0 if the text is empty."""
        if not said[-1].strip():
            return [0.0] * len(self.rewards)
        completion = parsed(said[-1])
        return [reward.score(completion, example) for reward in self.rewards]

    def is_solved(self, example: Example, said: Sequence[str]) -> bool:
        return bool(said[-1].strip()) and self.solved(parsed(said[-1]), example) >= 1.0


def weighted(task: Task, scores: Sequence[float]) -> float:
    """The reward of a completion with these scores."""
    return sum(reward.weight * value for reward, value in zip(task.rewards, scores, strict=True))


def conversation(system: str, question: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def answered(completion: Completion, _example: Example) -> float:
    """1 if there is exactly one answer between the tags."""
    return float(completion.has_answer)


def strict(completion: Completion, _example: Example) -> float:
    """1 if the completion is reasoning and answer, and nothing else."""
    return float(completion.is_strict)


def reasoned(completion: Completion, _example: Example) -> float:
    return float(bool(completion.reasoning))


def nothing_after(completion: Completion, _example: Example) -> float:
    """1 if the text ends with an answer."""
    return float(completion.has_answer and not completion.trailing)
