"""Opens the task that `--dataset` names."""

from __future__ import annotations

from diloco.errors import UserError
from diloco.options.flags import GrpoConfig
from diloco.rl.hub_tasks import HUB_TASKS, open_hub_task
from diloco.rl.own_reward import check_reward, use_reward
from diloco.rl.reasoning import PREFIX, open_generator
from diloco.rl.sandbox.run import check_sandbox
from diloco.rl.tasks import Task


def check_task(grpo: GrpoConfig) -> None:
    """Check, before anything is started, that the task exists and can be judged here. Raises UserError."""
    name = grpo.dataset
    if grpo.reward:
        check_reward(grpo.reward)
    kind = name.partition("=")[0]
    if kind == "mbpp":
        check_sandbox()
    if kind not in HUB_TASKS and name != PREFIX and not name.startswith(f"{PREFIX}:"):
        raise UserError(
            f"--dataset {name} is no task; name {PREFIX}:<generator> (chain_sum, countdown, ...), "
            f"{', '.join(HUB_TASKS)}, or one of those from a directory, as in gsm8k=path/to/it"
        )


def open_task(grpo: GrpoConfig, *, seed: int) -> Task:
    """The task that `--dataset` names. Raises UserError if it is unknown or cannot be loaded."""
    check_task(grpo)
    name = grpo.dataset
    kind, _, place = name.partition("=")
    task: Task = open_hub_task(kind, place or None) if kind in HUB_TASKS else open_generator(name, seed=seed)
    if grpo.reward:
        use_reward(task, grpo.reward)
    return task
