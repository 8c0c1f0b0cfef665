"""`--grpo.reward`: the user's reward function, from a file or module, in place of the task's rewards."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

from diloco.errors import UserError
from diloco.rl.answers import Completion
from diloco.rl.tasks import Component, Example, Reward, Task

_FORM = "name a function as in rewards.py:short or package.module:short"


def check_reward(name: str) -> None:
    """Check, before anything is started, that the file or module exists, without running it. Raises UserError."""
    place, _, function = name.rpartition(":")
    if not place or not function.isidentifier():
        raise UserError(f"--grpo.reward {name} names no function; {_FORM}")
    if place.endswith(".py"):
        if not Path(place).expanduser().is_file():
            raise UserError(f"--grpo.reward {name}: there is no file {place}")
    elif _spec_of(place) is None:
        raise UserError(f"--grpo.reward {name}: there is no module {place} here; {_FORM}")


def use_reward(task: Task, name: str) -> None:
    """Make the user's function the task's only reward. Raises UserError if it is missing or cannot be loaded."""
    check_reward(name)
    place, _, function = name.rpartition(":")
    try:
        module = (
            _from_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
        )
    except Exception as error:
        raise UserError(
            f"--grpo.reward {name}: {place} fails with {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"--grpo.reward {name}: {place} has no function {function}")
    task.rewards = (Reward(function, 1.0, _checked(found, name)),)


def _checked(function: Component, name: str) -> Component:
    def score(completion: Completion, example: Example) -> float:
        try:
            value = function(completion, example)
        except Exception as error:
            raise UserError(
                f"--grpo.reward {name} failed with {type(error).__name__}: {error}, for the completion "
                f"{completion.text[:200]!r}"
            ) from error
        if not isinstance(value, bool | int | float) or not math.isfinite(value):
            raise UserError(f"--grpo.reward {name} returned {value!r}; it must return a finite number")
        return float(value)

    return score


def _spec_of(module: str) -> object:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        # A console script has its own directory in sys.path instead of the current one.
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
