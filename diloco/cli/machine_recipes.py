"""The settings that `provision`, `peer` and `run` choose: those that suit the machine if the user names no model, or
those of the preset that the user names.

The trainers themselves, under torchrun, keep the defaults of options/flags.py, which are OpenDiLoCo's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.options.flags import MUON_DEFAULTS
from diloco.options.trainer import (
    TrainConfig,
    flag_of,
    flat_values,
    shared_fields,
    with_fitting_batch_size,
    with_mode_defaults,
)
from diloco.train.devices import Machine, gpus_for_ranks, num_ranks

_GIB = 2**30
_SHORT_RUN = {"hv.outer_lr": 0.7, "hv.outer_momentum": 0.6}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a training, and what a peer needs for it: cores and memory, or memory of each GPU."""

    cores: float
    memory_gib: float
    gpu_gib: float
    values: Mapping[str, Any]
    """Fields of TrainConfig by their dotted names."""
    rates: Mapping[str, Mapping[str, float]]
    """Further fields, by inner optimizer: `muon` is the default, `adamw` applies if the user names it."""


RECIPES = (
    # Small batches, because many steps count for more here than many tokens. In a test (one seed, two peers) Muon ended
    # at 1.70 bits per byte on Python's own sources (with lr 0.02: 1.72) and AdamW at 1.98. With an outer rate of 0.7
    # and a momentum of 0.9, thirty outer steps of AdamW ended 0.3 higher.
    Recipe(
        cores=1,
        memory_gib=0.0,
        gpu_gib=1.0,
        values={
            "path_model": "demo",
            "seq_length": 128,
            "total_batch_size": 8,
            "warmup_steps": 30,
            "total_steps": 1200,
            "eval_interval": 500,
            "eval_tokens": 65_536,
            "hv.local_steps": 50,
            "hv.outer_lr": 0.8,
            "hv.outer_momentum": 0.5,
        },
        rates={"muon": MUON_DEFAULTS | {"lr": 12e-3}, "adamw": {"lr": 1e-2}},
    ),
    # One core was measured at 30 to 50 GFLOP/s with these models, so an epoch of the next two recipes takes 20 to 80 s
    # on the cores that they require. Nothing was measured on GPUs. Muon's inner rate is MuLoCo's, tuned on longer
    # runs, as are the outer rates of 150m. The outer rates of the next two, for 40 and 80 outer steps, are the best in
    # the grid of benchmarks/convergence (four peers, 87 outer steps). MuLoCo's rate and momentum for four peers, 0.85
    # and 0.75, were not in it; next to them, 1.0 and 0.6 ended 2 to 7 % higher, 0.7 and 0.8 ended 8 to 19 % higher.
    Recipe(
        cores=8,
        memory_gib=4.0,
        gpu_gib=2.0,
        values={
            "path_model": "2m",
            "seq_length": 256,
            "total_batch_size": 32,
            "warmup_steps": 60,
            "total_steps": 2000,
            "eval_interval": 500,
            "hv.local_steps": 50,
        },
        rates={"muon": MUON_DEFAULTS | _SHORT_RUN, "adamw": {"lr": 4e-3}},
    ),
    Recipe(
        cores=32,
        memory_gib=8.0,
        gpu_gib=4.0,
        values={
            "path_model": "15m",
            "seq_length": 512,
            "total_batch_size": 32,
            "warmup_steps": 100,
            "total_steps": 4000,
            "eval_interval": 500,
            "hv.local_steps": 50,
        },
        rates={"muon": MUON_DEFAULTS | _SHORT_RUN, "adamw": {"lr": 2e-3}},
    ),
    Recipe(
        cores=math.inf,
        memory_gib=32.0,
        gpu_gib=20.0,
        values={
            "path_model": "150m",
            "seq_length": 1024,
            "total_batch_size": 64,
            "per_device_train_batch_size": 8,
            "warmup_steps": 200,
            "total_steps": 10_000,
            "eval_interval": 500,
            "hv.local_steps": 50,
        },
        rates={"muon": MUON_DEFAULTS, "adamw": {"lr": 4e-4}},
    ),
)
"""From the lightest to the heaviest."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration, and those of its fields that a recipe has set."""

    config: TrainConfig
    fields: frozenset[str] = frozenset()
    why: str = ""

    def in_words(self, agreed: TrainConfig, *, has_joined: bool = False) -> str:
        """One line on the training that the swarm has agreed on, and on who chose it.

        `has_joined`: this peer has joined the swarm of another peer, which chose it."""
        mine, theirs = flat_values(self.config), flat_values(agreed)
        if has_joined or any(mine[name] != theirs[name] for name in shared_fields()):
            return f"{trained(agreed)}; as the swarm does"
        return f"{trained(agreed)}; {self.why}" if self.why else trained(agreed)


def recipe_for(machine: Machine) -> Recipe:
    """The heaviest recipe for which a peer's share of the machine is enough; the lightest is always tried."""
    return next((recipe for recipe in reversed(RECIPES) if _is_enough(machine, recipe)), RECIPES[0])


def settled(
    config: TrainConfig, named: Collection[str], machine: Machine | None = None, *, num_ranks: int = 1
) -> Choice:
    """A peer's settings before it knows those of its swarm: the user's, the mode's, those chosen for the machine, and a
    batch size that divides. Raises UserError.

    Without a machine nothing is chosen for it: for a program of the user's own, and for peers that do not pretrain.
    """
    config = with_mode_defaults(config, named)
    if "total_batch_size" not in named:
        unit = math.lcm(num_ranks, config.grpo.num_generations if config.mode == "grpo" else 1)
        config = replace(config, total_batch_size=max(round(config.total_batch_size / unit), 1) * unit)
    choice = Choice(config=config)
    if machine is not None:
        choice = chosen(config, named, machine, num_ranks=num_ranks)
    return replace(choice, config=with_fitting_batch_size(choice.config, named, num_ranks=num_ranks))


def own_ranks(config: TrainConfig, named: Collection[str], wanted: str, num_gpus: int) -> int:
    """The ranks of a peer that does not know the settings of its swarm yet, of those that `--nproc-per-node` asks for.

    They divide the batch size that the user names; if none is named, `settled` chooses one that they divide.
    """
    batch_size = config.total_batch_size if "total_batch_size" in named else None
    return num_ranks(wanted, config.device, gpus_for_ranks(config, num_gpus), batch_size=batch_size)


def chosen(config: TrainConfig, named: Collection[str], machine: Machine, *, num_ranks: int = 1) -> Choice:
    """Fill the fields that the user did not name from a recipe: that of the preset that the user names, else the
    machine's.

    Changes nothing if the user names another model, or a batch size with a preset; nor for GRPO, which needs a
    pretrained model.
    """
    recipe = _recipe_of(config.path_model, named) if "path_model" in named else recipe_for(machine)
    if config.mode != "pretrain":
        return Choice(config=config)
    if recipe is None:
        is_preset = any(one.values["path_model"] == config.path_model for one in RECIPES)
        missing = [flag_of(name) for name in ("seq_length", "total_steps") if name not in named]
        why = f"with --total-batch-size, no other size is chosen for it: give {' and '.join(missing)} too"
        return Choice(config=config, why=why if is_preset and missing else "")
    why = f"chosen for {machine.in_words()} (--path-model names another model)"
    if "path_model" in named:
        why = f"sizes chosen for {config.path_model}"
    return _filled(config, named, recipe, num_ranks, why)


def possible(config: TrainConfig, named: Collection[str], *, num_ranks: int = 1) -> list[TrainConfig]:
    """The configurations that `chosen` may return, depending on the machine."""
    recipes = [_recipe_of(config.path_model, named)] if "path_model" in named else RECIPES
    if config.mode != "pretrain":
        recipes = [None]
    return [
        config if recipe is None else _filled(config, named, recipe, num_ranks).config for recipe in recipes
    ]


def trained(config: TrainConfig) -> str:
    """What a configuration trains, in one line."""
    if config.mode == "grpo":
        data, batch = config.grpo.dataset, f"{config.total_batch_size} completions"
    else:
        data = "random tokens" if config.fake_data else config.dataset_name_or_path
        batch = f"{config.total_batch_size} samples of {config.seq_length} tokens"
    # Reported, not corrected: the manifest has the warmup steps, and a short run may be a trial of a long run's rates.
    warmup = ""
    if config.end_step <= config.warmup_steps:
        warmup = f"; the learning rate rises for all of them, since --warmup-steps is {config.warmup_steps}"
    return (
        f"trains {config.path_model} on {data}: {config.end_step} steps of {batch}, "
        f"averaged every {config.hv.local_steps} steps{warmup}"
    )


def _filled(
    config: TrainConfig, named: Collection[str], recipe: Recipe, num_ranks: int, why: str = ""
) -> Choice:
    """The configuration with the recipe's values in the fields that the user did not name."""
    optimizer = config.optimizer if "optimizer" in named else "muon"
    recipes_own = {"optimizer": optimizer, **recipe.values, **recipe.rates[optimizer]}
    values = {name: value for name, value in recipes_own.items() if name not in named}
    if config.hv.compression == "topk":
        # The residuals of topk replace the outer momentum; see peers/core/defaults.py.
        values = {name: value for name, value in values.items() if not name.startswith("hv.outer_")}
    if "total_batch_size" in values:
        values["total_batch_size"] += -values["total_batch_size"] % num_ranks
    hv = {name.removeprefix("hv."): value for name, value in values.items() if name.startswith("hv.")}
    own = {name: value for name, value in values.items() if not name.startswith("hv.")}
    return Choice(
        config=replace(config, **own, hv=replace(config.hv, **hv)),
        fields=frozenset(values),
        why=why,
    )


def _recipe_of(path_model: str, named: Collection[str]) -> Recipe | None:
    """The recipe of a preset; None for another model, or if the user names a batch size."""
    found = (recipe for recipe in RECIPES if recipe.values["path_model"] == path_model)
    return None if "total_batch_size" in named else next(found, None)


def _is_enough(machine: Machine, recipe: Recipe) -> bool:
    if machine.gpu_bytes:
        return machine.gpu_bytes_each >= recipe.gpu_gib * _GIB
    memory = machine.memory_bytes_each
    return machine.cores_each >= recipe.cores and (memory is None or memory >= recipe.memory_gib * _GIB)
