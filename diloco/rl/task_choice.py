"""Opens the task that `--dataset` names."""

from __future__ import annotations

from functools import partial

from diloco.errors import UserError
from diloco.options.flags import GrpoConfig
from diloco.rl.answers import Completion
from diloco.rl.environments import named_of, open_environment
from diloco.rl.hub_tasks import HUB_TASKS, PREFIX, open_generator, open_hub_task
from diloco.rl.own_code import check_named, finite, loaded
from diloco.rl.reward_pool import RewardPool
from diloco.rl.sandbox.run import check_sandbox
from diloco.rl.tasks import Component, Example, Reward, Task

FLAG = "--grpo.reward"


def check_task(grpo: GrpoConfig) -> None:
    """Check, before anything is started, that the task exists and can be judged here. Raises UserError."""
    name = grpo.dataset
    check_task_name(name)
    if grpo.reward:
        check_named(FLAG, grpo.reward)
    if name.partition("=")[0] == "mbpp":
        check_sandbox()
    if is_own_code(name):
        check_named("--dataset", named_of(name))
        if grpo.reward:
            raise UserError(f"--dataset {name} has a reward of its own; leave out {FLAG}")


def check_task_name(name: str) -> None:
    """Raise UserError for a name that no task can have. Looks at no files."""
    if is_own_code(name) and ":" not in named_of(name):
        raise UserError(
            f"--dataset {name} is no task; name {PREFIX}:<generator> (chain_sum, countdown, ...), "
            f"{', '.join(HUB_TASKS)}, one of these read from a directory (gsm8k=path/to/it), or your own "
            "environment (file.py:Class)"
        )


def open_task(grpo: GrpoConfig, *, seed: int) -> Task:
    """The task that `--dataset` names. Raises UserError if it is unknown or cannot be loaded."""
    check_task(grpo)
    task = _opened(grpo, seed)
    task.pool = RewardPool(partial(_opened, grpo, seed))
    return task


def _opened(grpo: GrpoConfig, seed: int) -> Task:
    name = grpo.dataset
    kind, _, place = name.partition("=")
    if kind in HUB_TASKS:
        task = open_hub_task(kind, place or None)
    elif name.partition(":")[0] == PREFIX:
        task = open_generator(name, seed=seed)
    else:
        return open_environment(name)
    if grpo.reward:
        score = _checked(loaded(FLAG, grpo.reward), grpo.reward)
        task.rewards = (Reward(grpo.reward.rpartition(":")[2], 1.0, score),)
    return task


def _checked(function: Component, name: str) -> Component:
    """The user's function, with its exceptions converted to UserError."""

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


def is_own_code(name: str) -> bool:
    """Whether `--dataset name` would run code of the user's, and not a task that comes with diloco."""
    return name.partition("=")[0] not in HUB_TASKS and name.partition(":")[0] != PREFIX
