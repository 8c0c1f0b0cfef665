"""The interface of tasks: prompts, correct answers, and rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.rl.answers import Completion, parsed

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


class Task(Protocol):
    """Examples by number, the same on every machine. Training and held-out examples are numbered separately."""

    name: str
    rewards: tuple[Reward, ...]

    @property
    def num_examples(self) -> int:
        """The size of a finite data set; for a generator, the number of examples per pass."""
        ...

    def example(self, index: int) -> Example: ...

    def held_out(self, index: int) -> Example:
        """A held-out example, for an index below `num_held_out`."""
        ...

    @property
    def num_held_out(self) -> int: ...

    def is_solved(self, completion: Completion, example: Example) -> bool: ...


def weighted(task: Task, scores: Sequence[float]) -> float:
    """The reward of a completion by its scores."""
    return sum(reward.weight * value for reward, value in zip(task.rewards, scores, strict=True))


def scores(task: Task, text: str, example: Example) -> list[float]:
    """The score of a completion in each of the task's components; all 0 if it is empty."""
    if not text.strip():
        return [0.0] * len(task.rewards)
    completion = parsed(text)
    return [reward.score(completion, example) for reward in task.rewards]


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
