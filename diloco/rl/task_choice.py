"""Which task: `--dataset`."""

from __future__ import annotations

from diloco.errors import UserError
from diloco.rl.hub_tasks import HUB_TASKS, open_hub_task
from diloco.rl.reasoning import PREFIX, open_generator
from diloco.rl.tasks import Task


def open_task(name: str, *, seed: int) -> Task:
    """The task that `--dataset` names. Raises UserError for an unknown one, or one that cannot be had."""
    kind, _, place = name.partition("=")
    if kind in HUB_TASKS:
        return open_hub_task(kind, place or None)
    if name == PREFIX or name.startswith(f"{PREFIX}:"):
        return open_generator(name, seed=seed)
    raise UserError(
        f"--dataset {name} is no task; name {PREFIX}:<generator> (chain_sum, countdown, ...), "
        f"{', '.join(HUB_TASKS)}, or one of those from a directory, as in gsm8k=path/to/it"
    )
