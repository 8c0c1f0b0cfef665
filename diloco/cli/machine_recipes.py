"""What `provision`, `peer` and `run` train where nobody names a model, or no more than a preset: whatever the machine
trains well.

The trainers themselves, under torchrun, keep the defaults of options.py, which are OpenDiLoCo's.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.options.flags import MUON_DEFAULTS
from diloco.options.trainer import TrainConfig, flat_values, shared_fields
from diloco.train.devices import Machine

_GIB = 2**30
_SHORT_RUN = {"hv.outer_lr": 0.7, "hv.outer_momentum": 0.6}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training, and what a peer needs for it: so many cores and so much memory, or a GPU with so much."""

    cores: float
    memory_gib: float
    gpu_gib: float
    values: Mapping[str, Any]
    """Fields of TrainConfig by their dotted names."""
    rates: Mapping[str, Mapping[str, float]]
    """The same, by optimizer; beside Muon's, those for whoever names adamw."""


RECIPES = (
    # Small batches, because many steps count for more here than many tokens. In a rehearsal, one seed, two peers, Muon
    # ended at 1.70 bits per byte on Python's own sources (at 0.02: 1.72) and AdamW at 1.98. With an outer rate of 0.7
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
    # By the 30 to 50 GFLOP/s of a core that were measured with these models, an epoch of the next two takes between 20
    # and 80 s on so many cores. On GPUs none of this has been measured. Muon's inner rate is MuLoCo's, tuned on longer
    # runs, as are the outer rates of 150m. The outer rates of the next two, for 40 and 80 outer steps, are the best in
    # the grid of benchmarks/convergence (four peers, 87 outer steps). MuLoCo's for four peers, 0.85 and 0.75, were not
    # in it; on both sides of them, 1.0 and 0.6 ended 2 to 7 % higher, 0.7 and 0.8 ended 8 to 19 % higher.
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
    """A configuration, and which fields were chosen here; none if the user named the model."""

    config: TrainConfig
    fields: frozenset[str] = frozenset()
    why: str = ""

    def in_words(self, agreed: TrainConfig, *, has_joined: bool = False) -> str:
        """One line on what is trained once the swarm has agreed on it, and who has chosen it: another peer, if this one
        `has_joined` its swarm.
        """
        mine, theirs = flat_values(self.config), flat_values(agreed)
        if has_joined or any(mine[name] != theirs[name] for name in shared_fields()):
            return f"{trained(agreed)}; as the swarm does"
        return f"{trained(agreed)}; {self.why}" if self.why else trained(agreed)


def recipe_for(machine: Machine) -> Recipe:
    """The heaviest recipe for which a peer's share of the machine is enough; the lightest is always tried."""
    return next((recipe for recipe in reversed(RECIPES) if _is_enough(machine, recipe)), RECIPES[0])


def chosen(config: TrainConfig, named: Collection[str], machine: Machine, *, num_ranks: int = 1) -> Choice:
    """The configuration with the machine's recipe, or that of the preset that the user names, in the fields that the
    user did not name.

    Unchanged where the user names another model, or a batch beside a preset, and in reinforcement, whose models have
    to know something already.
    """
    recipe = _recipe_of(config.path_model, named) if "path_model" in named else recipe_for(machine)
    if config.mode != "pretrain":
        return Choice(config=config)
    if recipe is None:
        is_preset = any(one.values["path_model"] == config.path_model for one in RECIPES)
        why = "with --total-batch-size no size is chosen for it: give --seq-length and --total-steps, too"
        return Choice(config=config, why=why if is_preset else "")
    why = f"chosen for {machine.in_words()} (--path-model names another model)"
    if "path_model" in named:
        why = f"sizes chosen for {config.path_model}"
    return _filled(config, named, recipe, num_ranks, why)


def possible(config: TrainConfig, named: Collection[str], *, num_ranks: int = 1) -> list[TrainConfig]:
    """All that `chosen` may make of a configuration, by the machine."""
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
    # Not changed: the rates are part of the manifest, and a few steps of a long run may be a trial of them.
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
        # Its residuals stand in for the momentum; see peers.core.defaults.
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
    """The recipe of a preset, unless the user has a training of their own in mind, with a batch of its own."""
    found = (recipe for recipe in RECIPES if recipe.values["path_model"] == path_model)
    return None if "total_batch_size" in named else next(found, None)


def _is_enough(machine: Machine, recipe: Recipe) -> bool:
    if machine.gpu_bytes:
        return machine.gpu_bytes_each >= recipe.gpu_gib * _GIB
    memory = machine.memory_bytes_each
    return machine.cores_each >= recipe.cores and (memory is None or memory >= recipe.memory_gib * _GIB)
