"""Makes a trainer's command line from an experiment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from provisioning.errors import UserError
from provisioning.experiments.sets import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """One of diloco's trainers, and the flags that its experiments set."""

    name: str
    module: str
    flags: Mapping[str, Callable[[ExperimentConfig], Any]]
    """For each field of the resolved configuration, its value. The flag has the name of the field."""
    result: str
    """Name of the main metric."""
    extras: tuple[str, ...] = ()
    """Extras of pyproject.toml that it needs."""
    gpu_flags: Mapping[str, Callable[[ExperimentConfig], Any]] = field(default_factory=dict)
    """Additional flags on pods with GPUs."""
    gpus: Callable[[ExperimentConfig], str] = lambda config: config.train_gpu_device
    """The value of CUDA_VISIBLE_DEVICES on pods with GPUs."""


_FLAGS: Mapping[str, Callable[[ExperimentConfig], Any]] = {
    "path_model": lambda config: config.model_id,
    "lr": lambda config: config.learning_rate,
    "per_device_train_batch_size": lambda config: config.batch_size,
    "total_batch_size": lambda config: config.batch_size * config.grad_accum_steps,
    "total_steps": lambda config: config.total_steps,
    "eval_interval": lambda config: config.eval_every,
}

PRETRAIN = Trainer(
    name="pretrain",
    module="diloco.train_fsdp",
    flags={**_FLAGS, "dataset_name_or_path": lambda config: config.dataset},
    result="loss",
)
GRPO = Trainer(
    name="grpo",
    module="diloco.train_grpo",
    flags={**_FLAGS, "grpo.dataset": lambda config: config.dataset},
    gpu_flags={
        "grpo.vllm_gpu": lambda config: config.gpu_devices,
        "grpo.vllm_args": lambda config: [
            *("--tensor-parallel-size", str(config.vllm_tensor_parallel)),
            *("--gpu-memory-utilization", repr(config.gpu_memory_utilization)),
        ],
    },
    # The trainer's GPU comes first, since the trainer uses the first visible GPU.
    gpus=lambda config: f"{config.train_gpu_device},{config.gpu_devices}",
    extras=("grpo", "vllm"),
    result="reward",
)
TRAINERS = {trainer.name: trainer for trainer in (GRPO, PRETRAIN)}


def trainer_named(name: str) -> Trainer:
    """Raises UserError if there is no such trainer."""
    if name not in TRAINERS:
        raise UserError(f'--trainer "{name}" is not one of {", ".join(TRAINERS)}.')
    return TRAINERS[name]


def wanted_values(trainer: Trainer, config: ExperimentConfig, *, has_gpus: bool) -> dict[str, Any]:
    """The values that the trainer's resolved configuration gets, unless `custom_args` name others."""
    flags = {**trainer.flags, **(trainer.gpu_flags if has_gpus else {})}
    return {name: value(config) for name, value in flags.items()}


def argv(
    trainer: Trainer, config: ExperimentConfig, python: str, run_dir: str, *, has_gpus: bool
) -> list[str]:
    words = [python, "-m", trainer.module, "--run-dir", run_dir]
    lists: list[str] = []
    for name, value in wanted_values(trainer, config, has_gpus=has_gpus).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            lists += [flag, *value]
        else:
            words += [flag, repr(value) if isinstance(value, float) else str(value)]
    # A flag with a list consumes all words after it.
    return [*words, *config.custom_args, *lists]


def environment(trainer: Trainer, config: ExperimentConfig, *, has_gpus: bool) -> dict[str, str]:
    gpus = {"CUDA_VISIBLE_DEVICES": trainer.gpus(config)} if has_gpus else {}
    return {**gpus, **config.custom_env}


def job_name(trainer: Trainer, config: ExperimentConfig) -> str:
    """Contains a hash of the experiment's values, so that changed values make a new job."""
    text = repr((argv(trainer, config, "", "", has_gpus=True), sorted(config.custom_env.items())))
    return f"{config.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
