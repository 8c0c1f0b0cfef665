"""Sets of experiments: what is trained, with which values, on which pods. Five are built in; files define others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from provisioning.errors import UserError
from provisioning.pods.pod import PodSpec, specs_of
from provisioning.pods.tables import read_toml, tables_in, typed

QWEN = "Qwen/Qwen2.5-1.5B-Instruct"


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """The values of one training."""

    name: str
    dataset: str = "gsm8k"
    """gsm8k, math or mbpp; for pretraining, any value of `--dataset-name-or-path`."""
    model_id: str = QWEN
    learning_rate: float = 3e-6
    batch_size: int = 4
    """Samples per device and forward pass."""
    grad_accum_steps: int = 128
    total_steps: int = 100
    eval_every: int = 40
    gpu_devices: str = "1,2,3,4"
    """GPUs of the vLLM server."""
    train_gpu_device: str = "0"
    vllm_tensor_parallel: int = 4
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPUs' memory that the vLLM server uses."""
    custom_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the trainer."""
    custom_args: Sequence[str] = ()
    """Further arguments of the trainer. They follow all other flags, except those that take a list."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An experiment and the name of the pod that it runs on."""

    pod: str
    config: ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class ExperimentSet:
    """Pods and their experiments: each pod runs its own one after the other, all pods in parallel."""

    name: str
    pods: Sequence[PodSpec]
    experiments: Sequence[Placed]

    def with_changes(
        self, pod_changes: Mapping[str, Any], changes: Mapping[str, Any], more_args: Sequence[str] = ()
    ) -> ExperimentSet:
        """A copy with these fields replaced in all pods and experiments. A value of None changes nothing."""
        pods = {name: value for name, value in pod_changes.items() if value is not None}
        values = {name: value for name, value in changes.items() if value is not None}
        return replace(
            self,
            pods=[replace(spec, **pods) for spec in self.pods],
            experiments=[
                replace(
                    placed,
                    config=replace(
                        placed.config, **values, custom_args=(*placed.config.custom_args, *more_args)
                    ),
                )
                for placed in self.experiments
            ],
        )


def spread(name: str, specs: Sequence[PodSpec], configs: Sequence[ExperimentConfig]) -> ExperimentSet:
    """Assign the experiments to the pods round-robin."""
    placed = [
        Placed(pod=specs[index % len(specs)].name, config=config)
        for index, config in enumerate(configs if specs else ())
    ]
    return ExperimentSet(name=name, pods=specs, experiments=placed)


def _validated(found: ExperimentSet, origin: str) -> ExperimentSet:
    """Returns `found`. Raises UserError if a name is invalid or used twice, or an experiment names an unknown pod."""
    if not found.pods or not found.experiments:
        raise UserError(f"{origin} needs at least one pod and one experiment.")
    pods, seen = {spec.name for spec in found.pods}, set[str]()
    for placed in found.experiments:
        name = placed.config.name
        if name in seen:
            raise UserError(f"{origin} has two experiments named {name}.")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", name):
            raise UserError(
                f'"{name}" is not a valid name for an experiment: use letters, digits, dots and dashes.'
            )
        if placed.pod not in pods:
            raise UserError(f"{origin}: {name} is assigned to {placed.pod}, which is not one of its pods.")
        seen.add(name)
    return found


_TRAININGS: Mapping[str, tuple[int, float, Mapping[str, Mapping[str, Any]]]] = {
    "lr_sweep": (2, 6, {f"lr-{rate:.0e}": {"learning_rate": rate} for rate in (1e-6, 3e-6, 5e-6, 1e-5)}),
    "multi_dataset": (3, 8, {name: {"dataset": name} for name in ("gsm8k", "math", "mbpp")}),
    "model_size": (
        *(3, 12),
        {f"qwen-{size}": {"model_id": f"Qwen/Qwen2.5-{size}-Instruct"} for size in ("1.5B", "3B", "7B")},
    ),
    "batch_grid": (
        *(4, 8),
        {
            f"batch-{size}x{steps}": {"batch_size": size, "grad_accum_steps": steps}
            for size, steps in ((2, 256), (4, 128), (8, 64), (16, 32))
        },
    ),
    "custom_advanced": (1, 10, {"advanced": {"custom_env": {"GRAIL_TRAINER_WARMUP_STEPS": "50"}}}),
}
"""By set: number of pods, their hours, and for each training the values that differ from the defaults."""
BUILT_IN = tuple(_TRAININGS)


def built_in(name: str) -> ExperimentSet:
    num_pods, ttl_hours, trainings = _TRAININGS[name]
    specs = [
        PodSpec(
            name=f"{name.replace('_', '-')}-{index}",
            provider="lium",
            ttl_hours=ttl_hours,
            min_upload_mbps=500,
            min_download_mbps=500,
        )
        for index in range(num_pods)
    ]
    configs = [ExperimentConfig(name=one, eval_every=20, **values) for one, values in trainings.items()]
    return spread(name, specs, configs)


def load(name: str, provider: str | None = None) -> ExperimentSet:
    """The built-in set of this name, or the set of a TOML file. Raises UserError if it is invalid.

    A TOML file has [[pods]] and [[experiments]]; experiments without `pod` are assigned round-robin.
    `provider`: the provider of its pods that name none.
    """
    if name in BUILT_IN:
        return built_in(name)
    path = Path(name)
    if path.suffix == ".toml":
        return _of_toml(path, provider)
    raise UserError(f'"{name}" is not one of {", ".join(BUILT_IN)}, and not a .toml file.')


def _of_toml(path: Path, provider: str | None) -> ExperimentSet:
    values, origin = read_toml(path), str(path)
    specs = specs_of(tables_in(values, "pods", origin), origin, provider=provider)
    entries = tables_in(values, "experiments", origin)
    pods = [entry.pop("pod", None) for entry in entries]
    configs = [
        typed(ExperimentConfig, {"name": f"experiment-{index}", **entry}, f"{path}, experiment {index}")
        for index, entry in enumerate(entries)
    ]
    found = spread(path.stem, specs, configs)
    placed = [
        one if pod is None else replace(one, pod=str(pod))
        for pod, one in zip(pods, found.experiments, strict=True)
    ]
    return _validated(replace(found, experiments=placed), origin)
