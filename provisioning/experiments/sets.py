"""Experiments: what is trained, with which values, on which pods. Five sets are built in; yours come from a file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from provisioning.errors import UserError
from provisioning.pods.files import called, check_field_types, checked, specs_of
from provisioning.pods.pod import PodSpec

QWEN = "Qwen/Qwen2.5-1.5B-Instruct"


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """One training, with every value that it is to have."""

    name: str
    dataset: str = "gsm8k"
    """gsm8k, math or mbpp; a pretraining takes what `--dataset-name-or-path` takes."""
    model_id: str = QWEN
    learning_rate: float = 3e-6
    batch_size: int = 4
    """Samples per device and pass."""
    grad_accum_steps: int = 128
    total_steps: int = 100
    eval_every: int = 40
    gpu_devices: str = "1,2,3,4"
    """GPUs of the vLLM server."""
    train_gpu_device: str = "0"
    vllm_tensor_parallel: int = 4
    gpu_memory_utilization: float = 0.9
    """Of the vLLM server's GPUs."""
    custom_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the trainer."""
    custom_args: Sequence[str] = ()
    """More words for the trainer's command line; they come last."""


_CONFIG_FIELDS = {item.name for item in fields(ExperimentConfig)}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """An experiment and the pod that it runs on."""

    pod: str
    config: ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class ExperimentSet:
    """Pods, and what runs on them: on each pod one after the other, on all pods at once."""

    name: str
    pods: Sequence[PodSpec]
    experiments: Sequence[Placed]

    def with_changes(
        self, pod_changes: Mapping[str, Any], changes: Mapping[str, Any], more_args: Sequence[str] = ()
    ) -> ExperimentSet:
        """The same with these fields of all pods and experiments replaced; None leaves one as it is."""
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
    """The experiments over the pods in turn. Raises UserError as `_checked` does."""
    placed = [
        Placed(pod=specs[index % len(specs)].name, config=config)
        for index, config in enumerate(configs if specs else ())
    ]
    return _checked(ExperimentSet(name=name, pods=specs, experiments=placed), name)


def _checked(found: ExperimentSet, origin: str) -> ExperimentSet:
    """The same. Raises UserError for names that are none or are used twice, and for pods that are not there."""
    if not found.pods or not found.experiments:
        raise UserError(f"{origin} needs at least one pod and one experiment.")
    pods = {spec.name for spec in checked(found.pods, origin)}
    seen: set[str] = set()
    for placed in found.experiments:
        name = placed.config.name
        check_field_types(placed.config, f"{origin}, experiment {name}")
        if name in seen:
            raise UserError(f"{origin} has two experiments named {name}.")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,60}", name):
            raise UserError(f'"{name}" is no name for an experiment: use letters, digits, dots and dashes.')
        if placed.pod not in pods:
            raise UserError(f"{origin}: {name} wants to run on {placed.pod}, which is no pod of it.")
        seen.add(name)
    return found


def _pods(name: str, number: int, ttl_hours: float) -> list[PodSpec]:
    return [
        PodSpec(
            name=f"{name.replace('_', '-')}-{index}",
            gpu_type="A100",
            gpu_count=8,
            ttl_hours=ttl_hours,
            min_upload_mbps=500,
            min_download_mbps=500,
        )
        for index in range(number)
    ]


def _lr_sweep() -> ExperimentSet:
    rates = (1e-6, 3e-6, 5e-6, 1e-5)
    configs = [ExperimentConfig(name=f"lr-{rate:.0e}", learning_rate=rate, eval_every=20) for rate in rates]
    return spread("lr_sweep", _pods("lr_sweep", 2, 6), configs)


def _multi_dataset() -> ExperimentSet:
    configs = [ExperimentConfig(name=name, dataset=name, eval_every=20) for name in ("gsm8k", "math", "mbpp")]
    return spread("multi_dataset", _pods("multi_dataset", 3, 8), configs)


def _model_size() -> ExperimentSet:
    configs = [
        ExperimentConfig(name=f"qwen-{size}", model_id=f"Qwen/Qwen2.5-{size}-Instruct", eval_every=20)
        for size in ("1.5B", "3B", "7B")
    ]
    return spread("model_size", _pods("model_size", 3, 12), configs)


def _batch_grid() -> ExperimentSet:
    configs = [
        ExperimentConfig(name=f"batch-{size}x{steps}", batch_size=size, grad_accum_steps=steps, eval_every=20)
        for size, steps in ((2, 256), (4, 128), (8, 64), (16, 32))
    ]
    return spread("batch_grid", _pods("batch_grid", 4, 8), configs)


def _custom_advanced() -> ExperimentSet:
    config = ExperimentConfig(name="advanced", eval_every=20, custom_env={"GRAIL_TRAINER_WARMUP_STEPS": "50"})
    return spread("custom_advanced", _pods("custom_advanced", 1, 10), [config])


BUILT_IN: Mapping[str, Callable[[], ExperimentSet]] = {
    "lr_sweep": _lr_sweep,
    "multi_dataset": _multi_dataset,
    "model_size": _model_size,
    "batch_grid": _batch_grid,
    "custom_advanced": _custom_advanced,
}


def load(name: str) -> ExperimentSet:
    """A built-in set, or that of a .toml or .py file. Raises UserError.

    A TOML file has [[pods]] and [[experiments]]; an experiment may say `pod`, else they are spread in turn. A Python
    file has a function `experiments()` that returns an ExperimentSet, or a list of PodSpecs and one of
    ExperimentConfigs.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    path = Path(name)
    if path.suffix == ".py":
        return _of_python(path)
    if path.suffix == ".toml":
        return _of_toml(path)
    raise UserError(f'"{name}" is none of {", ".join(BUILT_IN)}, and no .toml or .py file.')


def _of_python(path: Path) -> ExperimentSet:
    found = called(path, "experiments")
    if isinstance(found, ExperimentSet):
        return _checked(found, str(path))
    if isinstance(found, tuple) and len(found) == 2:
        specs, configs = found
        if _all_are(PodSpec, specs) and _all_are(ExperimentConfig, configs):
            return spread(path.stem, specs, configs)
    raise UserError(
        f"experiments() in {path} has to return an ExperimentSet, or PodSpecs and ExperimentConfigs."
    )


def _all_are(kind: type, items: object) -> bool:
    return isinstance(items, list | tuple) and all(isinstance(item, kind) for item in items)


def _of_toml(path: Path) -> ExperimentSet:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}.") from error
    specs = specs_of(tables.get("pods"), str(path))
    entries = tables.get("experiments") or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{path} has no [[experiments]].")
    configs = []
    for index, entry in enumerate(entries):
        unknown = sorted(set(entry) - _CONFIG_FIELDS - {"pod"})
        if unknown:
            known = ", ".join(sorted(_CONFIG_FIELDS))
            raise UserError(f"{path}, experiment {index}: unknown field {unknown[0]}; there are {known}.")
        values = {key: value for key, value in entry.items() if key != "pod"}
        configs.append(ExperimentConfig(**{"name": f"experiment-{index}", **values}))
    found = spread(path.stem, specs, configs)
    placed = [
        replace(one, pod=entry.get("pod", one.pod))
        for entry, one in zip(entries, found.experiments, strict=True)
    ]
    return _checked(replace(found, experiments=placed), str(path))
