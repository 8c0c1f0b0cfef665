"""The optional dependencies of the package, and which of them a configuration needs.

Packages are looked up without being imported, so that a command can report a missing one before it starts anything.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from diloco.errors import UserError

if TYPE_CHECKING:
    from diloco.options.flags import TrainConfig

MODULES = {
    "dashboard": ("starlette", "uvicorn"),
    "grpo": ("trl", "peft", "datasets", "httpx", "math_verify", "reasoning_gym"),
    "s3": ("s3fs",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Modules to look for, by extra. Readers of data sets and pod providers check for theirs themselves."""


def require(extra: str, what: str) -> None:
    """Raise UserError if a module of this extra is not installed; `what` is the flag or command that needs it."""
    missing = [name for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}: pip install 'diloco[{extra}]'")


def check_extras(config: TrainConfig) -> None:
    """Raise UserError for the first extra of `extras_of` that is not installed."""
    for extra, flag in extras_of(config).items():
        require(extra, flag)


def extras_of(config: TrainConfig) -> dict[str, str]:
    """The extras that this training needs, each with the flag that needs it."""
    needed = {name: f"--metric-logger-type {name}" for name in config.metric_loggers}
    if config.mode == "grpo":
        needed["grpo"] = "--mode grpo"
    if config.ckpt.path.startswith("s3://"):
        needed["s3"] = f"--ckpt.path {config.ckpt.path}"
    return needed
