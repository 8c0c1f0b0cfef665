"""Tasks: prompts, what their answers are held against, and the rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """A prompt as chat messages, and the right answer. `data` is whatever else its task judges by."""

    prompt: list[Message]
    gold: str
    data: Mapping[str, Any] = field(default_factory=dict)


Component = Callable[[Completion, Example], float]
"""A part of the reward, from 0 to 1; never called for a completion without text."""


@dataclass(frozen=True)
class Reward:
    """A named component and what it counts for."""

    name: str
    weight: float
    score: Component


class Task(Protocol):
    """Examples by number, the same on every machine. Numbers from 0 on are trained, held-out ones are apart."""

    @property
    def name(self) -> str: ...

    @property
    def rewards(self) -> tuple[Reward, ...]: ...

    @property
    def num_examples(self) -> int:
        """Of a finite data set; for a generator, how many it is taken to have."""
        ...

    def example(self, index: int) -> Example: ...

    def held_out(self, index: int) -> Example:
        """For an index below num_held_out: never among those that are trained."""
        ...

    @property
    def num_held_out(self) -> int: ...

    def is_solved(self, completion: Completion, example: Example) -> bool: ...


def reward_of(task: Task, text: str, example: Example) -> float:
    """The whole reward of a completion. An empty one earns nothing."""
    return sum(
        reward.weight * value for reward, value in zip(task.rewards, scores(task, text, example), strict=True)
    )


def scores(task: Task, text: str, example: Example) -> list[float]:
    """Of each of the task's components, the score of a completion's text; all 0 where there is no text."""
    if not text.strip():
        return [0.0] * len(task.rewards)
    completion = parsed(text)
    return [reward.score(completion, example) for reward in task.rewards]


def conversation(system: str, question: str) -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def answered(completion: Completion, _example: Example) -> float:
    """One answer between the tags."""
    return float(completion.has_answer)


def strict(completion: Completion, _example: Example) -> float:
    """Reasoning and answer, and nothing besides."""
    return float(completion.is_strict)


def reasoned(completion: Completion, _example: Example) -> float:
    return float(bool(completion.reasoning))


def nothing_after(completion: Completion, _example: Example) -> float:
    """An answer, and the text ends with it."""
    return float(completion.has_answer and not completion.trailing)
