"""`diloco grpo-sweep`: several GRPO trainings side by side on one machine, each with GPUs and a port of its own."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Annotated

from cyclopts import App, Parameter

from diloco.errors import UserError
from diloco.launch.sweep import check_resources, notes_on_overridden_flags, plan_instances
from diloco.options.checks import at_least, whole
from diloco.options.model_files import load_model_config
from diloco.options.sources import ValueSource
from diloco.options.trainer import (
    ConfigPath,
    TrainConfig,
    TrainFlags,
    notes_on_unused_flags,
    with_fitting_batch_size,
    with_mode_defaults,
)
from diloco.train.devices import this_machine, visible_gpus

_SOURCE = ValueSource()

app = App(name="grpo-sweep", config=[_SOURCE])

Instances = Annotated[int, Parameter(group="Sweep", converter=whole, validator=at_least(1))]
Seeds = Annotated[str | None, Parameter(group="Sweep", metavar="S,S,...")]
Average = Annotated[bool, Parameter(group="Sweep", negative="")]
FreeSpace = Annotated[float, Parameter(name="--min-free-gb", group="Sweep", validator=at_least(0))]


@app.default
def grpo_sweep(
    train: TrainFlags = TrainConfig(),  # noqa: B008
    *,
    instances: Instances = 4,
    seeds: Seeds = None,
    average: Average = False,
    min_free_gb: FreeSpace = 5.0,
    config: ConfigPath = None,
) -> int:
    """Train the same task with several seeds at once, or with --average as the peers of one swarm.

    Instance i has its trainer on GPU 2i + 1, which starts a vLLM server on GPU 2i and port 8000 + i. Everything is
    checked before anything starts.

    Parameters
    ----------
    instances: int
        Number of instances; 1 is a quick test.
    seeds: str
        One per instance, separated by commas; default: --seed and the numbers after it.
    average: bool
        Let the instances average their weights: one run, of the first seed, with as many peers.
    min_free_gb: float
        Gigabytes that have to be free on the disk.
    config: Path
        A TOML file of these flags, with sections [grpo], [hv] and [ckpt]; flags beat it.
    """
    from diloco.cli.interrupts import run_interruptible
    from diloco.doctor.before_start import check_choices

    named = _SOURCE.named | {"mode"}
    train = replace(train, mode="grpo")
    for remark in [*notes_on_unused_flags(train, named), *notes_on_overridden_flags(train, named)]:
        print(f"note: {remark}", file=sys.stderr, flush=True)
    train = with_fitting_batch_size(with_mode_defaults(train, named), named)
    # So that a mistyped name is reported once, not by each instance.
    load_model_config(train.path_model)
    check_choices(train, this_machine(os.environ, train.device))
    plan = plan_instances(
        train,
        num_instances=instances,
        seeds=seeds_of(seeds, instances, train.seed),
        gpus=visible_gpus(os.environ),
    )
    check_resources(plan, train, os.environ, min_free_bytes=int(min_free_gb * 1e9))
    from diloco.launch.sweep_run import Sweep

    return run_interruptible(Sweep(train, named, plan, average).until_reported())


def seeds_of(text: str | None, num_instances: int, first: int) -> list[int]:
    """The seeds that were named, or as many from `first` on. Raises UserError for what is no number."""
    if text is None:
        return list(range(first, first + num_instances))
    try:
        return [int(part) for part in text.replace(" ", ",").split(",") if part]
    except ValueError as error:
        raise UserError(f"--seeds {text} is not a list of whole numbers apart by commas") from error
