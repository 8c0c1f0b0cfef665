"""`--grpo.reward`: the user's reward function, from a file or module, in place of the task's rewards."""

from __future__ import annotations

import math

from diloco.errors import UserError
from diloco.rl.answers import Completion
from diloco.rl.own_code import loaded
from diloco.rl.tasks import Component, Example, Reward, Task

FLAG = "--grpo.reward"


def use_reward(task: Task, name: str) -> None:
    """Make the user's function the task's only reward. Raises UserError if it is missing or cannot be loaded."""
    found = loaded(FLAG, name)
    task.rewards = (Reward(name.rpartition(":")[2], 1.0, _checked(found, name)),)


def _checked(function: Component, name: str) -> Component:
    def score(completion: Completion, example: Example) -> float:
        try:
            value = function(completion, example)
        except Exception as error:
            raise UserError(
                f"{FLAG} {name} failed with {type(error).__name__}: {error}, for the completion "
                f"{completion.text[:200]!r}"
            ) from error
        return finite(value, f"{FLAG} {name}")

    return score


def finite(value: object, what: str) -> float:
    """A reward that the user's code has returned. Raises UserError unless it is a finite number."""
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise UserError(f"{what} returned {value!r}; it must return a finite number")
    return float(value)
