"""`diloco grpo-sweep`: runs several GRPO trainings on one machine at the same time, each with its own GPUs and port."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

from cyclopts import App, Parameter

from diloco.cli.machine_recipes import settled
from diloco.errors import UserError, print_note
from diloco.options.flags import LARGEST, Count
from diloco.options.model_files import load_model_config
from diloco.options.sources import ValueSource
from diloco.options.trainer import (
    ConfigPath,
    TrainConfig,
    TrainFlags,
    flag_of,
    flat_values,
    notes_on_unused_flags,
)
from diloco.output import lose_unwritable
from diloco.train.devices import check_gpus_listed, this_machine

_SOURCE = ValueSource()

app = App(name="grpo-sweep", config=[_SOURCE])

OfSweep = Parameter(group="Sweep")
Seeds = Annotated[str | None, Parameter(group="Sweep", metavar="S,S,...")]


@app.default
def grpo_sweep(
    train: TrainFlags = TrainConfig(),  # noqa: B008
    *,
    instances: Annotated[Count, OfSweep] = 4,
    seeds: Seeds = None,
    config: ConfigPath = None,
) -> int:
    """Train the same task with several seeds at once, side by side on one machine.

    The trainer of instance i uses GPU 2i + 1, and starts a vLLM server on GPU 2i. All settings are checked before the
    first instance starts.

    Parameters
    ----------
    instances: int
        Number of instances; 1 is a quick test.
    seeds: str
        One seed per instance, separated by commas; default: --seed and the numbers after it.
    """
    from diloco.cli.interrupts import run_interruptible
    from diloco.doctor.before_start import check_choices
    from diloco.launch.sweep import PER_INSTANCE_FIELDS, Sweep, plan_instances

    lose_unwritable("stdout")
    named = _SOURCE.named | {"mode"}
    train = replace(train, mode="grpo")
    for note in notes_on_unused_flags(train, named):
        print_note(note)
    values, defaults = flat_values(train), flat_values(TrainConfig())
    for name in PER_INSTANCE_FIELDS:
        if name in named and values[name] != defaults[name]:
            print_note(f"{flag_of(name)} has no effect in a sweep: each instance has its own.")
    train = settled(train, named).config
    # A mistyped name is reported once here, instead of by each instance.
    load_model_config(train.path_model)
    machine = this_machine(os.environ, train.device)
    check_gpus_listed(os.environ, train.device, machine.gpus)
    check_choices(train, machine)
    plan = plan_instances(train, seeds=seeds_of(seeds, instances, train.seed), gpus=machine.gpus)
    return run_interruptible(Sweep(train, named, plan).run())


def seeds_of(text: str | None, num_instances: int, first: int) -> list[int]:
    """The seeds of --seeds, or `num_instances` seeds from `first` on. Raises UserError for an invalid list."""
    if text is None:
        return list(range(first, first + num_instances))
    parts = [part for part in text.replace(" ", ",").split(",") if part]
    seeds = {int(part): None for part in parts if part.isdecimal() and int(part) <= LARGEST}
    if not len(parts) == len(seeds) == num_instances:
        raise UserError(
            f"--seeds {text} must be {num_instances} different whole numbers up to {LARGEST}, one for each instance"
        )
    return list(seeds)
