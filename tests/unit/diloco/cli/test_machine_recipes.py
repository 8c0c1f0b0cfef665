"""The model that a command trains if none is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from diloco.cli.machine_recipes import RECIPES, chosen, recipe_for, trained
from diloco.options.model_files import load_model_config
from diloco.options.trainer import TrainConfig, flat_values, parse_train_config, with_mode_defaults
from diloco.train.devices import Machine
from diloco.train.memory import check_memory, memory_needed_bytes
from diloco.train.model import num_parameters

GIB = 2**30


def machine(cores: int, memory_gib: float | None = 1000.0, **more: Any) -> Machine:
    return Machine(
        num_cores=cores, memory_bytes=None if memory_gib is None else int(memory_gib * GIB), **more
    )


def gpus(number: int, gib: float, num_peers: int = 1) -> Machine:
    return machine(4, 4.0, gpus=tuple(map(str, range(number))), gpu_bytes=int(gib * GIB), num_peers=num_peers)


@pytest.mark.parametrize(
    ("on", "model"),
    [
        (machine(1, 1.0), "demo"),
        (machine(2), "demo"),
        (machine(8), "2m"),
        (machine(8, None), "2m"),
        (machine(8, 3.0), "demo"),
        (machine(15, num_peers=2), "demo"),
        (machine(16, num_peers=2), "2m"),
        (machine(32), "15m"),
        (machine(32, 8.0, num_peers=2), "2m"),
        (machine(256), "15m"),
        (gpus(1, 0.5), "demo"),
        (gpus(1, 8), "15m"),
        (gpus(1, 24), "150m"),
        (gpus(1, 24, num_peers=2), "15m"),
        (gpus(2, 24, num_peers=2), "150m"),
        (gpus(2, 24, num_peers=3), "15m"),
    ],
)
def test_the_heaviest_model_is_chosen_that_a_peers_share_of_the_machine_is_enough_for(on, model):
    assert recipe_for(on).values["path_model"] == model


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=lambda recipe: recipe.values["path_model"])
def test_a_recipe_fits_the_least_machine_that_it_is_chosen_for(recipe):
    """Activations are counted twice, for what their estimate leaves out."""
    config = chosen(TrainConfig(), (), gpus(1, recipe.gpu_gib)).config
    model = load_model_config(config.path_model)
    samples = min(int(config.per_device_train_batch_size), config.total_batch_size)
    need = memory_needed_bytes(
        num_parameters(model),
        activation_tokens=2 * samples * config.seq_length,
        config=model,
        on_gpu=True,
    )
    check_memory(
        need,
        path_model=config.path_model,
        available=int(recipe.memory_gib * GIB),
        device_available=int(recipe.gpu_gib * GIB),
    )


def test_recipes_name_fields_that_there_are_and_go_from_light_to_heavy():
    known = flat_values(TrainConfig()).keys()
    for recipe in RECIPES:
        assert recipe.values.keys() | recipe.rates["muon"].keys() | recipe.rates["adamw"].keys() <= known
    needs = [(recipe.cores, recipe.memory_gib, recipe.gpu_gib) for recipe in RECIPES]
    assert needs == sorted(needs)


def test_what_the_user_names_is_kept_and_the_rest_is_chosen():
    config = replace(TrainConfig(), total_batch_size=24, lr=0.5)
    choice = chosen(config, {"total_batch_size", "lr"}, machine(2))
    values = flat_values(choice.config)
    assert (values["total_batch_size"], values["lr"]) == (24, 0.5)
    assert (values["path_model"], values["seq_length"], values["hv.local_steps"]) == ("demo", 128, 50)
    assert "lr" not in choice.fields and "hv.local_steps" in choice.fields


@pytest.mark.parametrize(
    ("given", "named", "optimizer", "lr", "weight_decay"),
    [
        (TrainConfig(), (), "muon", 0.012, 2e-3),
        (TrainConfig(optimizer="adamw"), ("optimizer",), "adamw", 1e-2, 0.1),
        (TrainConfig(lr=0.5), ("lr",), "muon", 0.5, 2e-3),
    ],
)
def test_rates_are_those_of_the_optimizer(given, named, optimizer, lr, weight_decay):
    config = chosen(with_mode_defaults(given, named), named, machine(2)).config
    assert (config.optimizer, config.lr, config.weight_decay) == (optimizer, lr, weight_decay)


@pytest.mark.parametrize(
    ("preset", "optimizer", "rates"),
    [
        ("demo", "muon", (0.8, 0.5)),
        ("2m", "muon", (0.7, 0.6)),
        ("15m", "muon", (0.7, 0.6)),
        ("15m", "adamw", (None, None)),
        ("150m", "muon", (None, None)),
    ],
)
def test_short_runs_with_muon_have_outer_rates_of_their_own_unless_they_send_top_k(preset, optimizer, rates):
    config = TrainConfig(path_model=preset, optimizer=optimizer)
    named = {"path_model", "optimizer"}
    hv = chosen(config, named, machine(2)).config.hv
    assert (hv.outer_lr, hv.outer_momentum) == rates
    sparse = replace(config, hv=replace(config.hv, compression="topk"))
    hv = chosen(sparse, {*named, "hv.compression"}, machine(2)).config.hv
    assert (hv.outer_lr, hv.outer_momentum) == (None, None)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.values["path_model"])
def test_a_preset_comes_with_its_recipe_on_any_machine(recipe):
    """The trainers' default steps of 524,288 tokens would take minutes on two cores."""
    preset = recipe.values["path_model"]
    choice = chosen(TrainConfig(path_model=preset), {"path_model"}, machine(2))
    values = flat_values(choice.config)
    assert {name: values[name] for name in recipe.values} == recipe.values
    assert choice.config.optimizer == "muon" and choice.config.lr == recipe.rates["muon"]["lr"]
    assert choice.in_words(choice.config).endswith(f"; sizes chosen for {preset}")


def test_a_preset_with_a_batch_of_the_users_own_keeps_the_defaults_for_the_rest():
    config = TrainConfig(path_model="2m")
    choice = chosen(config, {"path_model", "total_batch_size"}, machine(2))
    assert choice.config == config
    assert "88000 steps" in choice.in_words(config)
    assert choice.why.endswith("no other size is chosen for it: give --seq-length and --total-steps too")
    named = {"path_model", "total_batch_size", "seq_length"}
    assert chosen(config, named, machine(2)).why.endswith("give --total-steps too")
    assert chosen(config, {*named, "total_steps"}, machine(2)).why == ""


def test_a_preset_with_fewer_steps_keeps_its_batch():
    """100 steps of the trainers' default of half a million tokens would take hours."""
    config = TrainConfig(path_model="demo", total_steps=100)
    choice = chosen(config, {"path_model", "total_steps"}, machine(2)).config
    assert (choice.total_steps, choice.total_batch_size, choice.seq_length) == (100, 8, 128)


def test_who_names_a_model_without_a_recipe_or_learns_by_reinforcement_is_given_nothing():
    own, preset = TrainConfig(path_model="./model"), TrainConfig(path_model="2m", mode="grpo")
    for config, named in ((own, {"path_model"}), (preset, {"path_model"}), (preset, set[str]())):
        choice = chosen(config, named, machine(2))
        assert (choice.config, choice.fields, choice.why) == (config, frozenset(), "")


def test_a_chosen_batch_divides_by_the_ranks_of_the_peer():
    assert chosen(TrainConfig(), (), machine(2), num_ranks=3).config.total_batch_size == 9


def test_one_line_says_what_is_trained_and_why():
    choice = chosen(TrainConfig(), (), machine(2, num_peers=3))
    what = "trains demo on stdlib: 1200 steps of 8 samples of 128 tokens, averaged every 50 steps"
    why = "chosen for 2 cores without a GPU, shared by 3 peers (--path-model names another model)"
    assert choice.in_words(choice.config) == f"{what}; {why}"
    assert choice.in_words(replace(choice.config, lr=1.0)) == f"{what}; as the swarm does"
    assert choice.in_words(choice.config, has_joined=True) == f"{what}; as the swarm does"
    named = chosen(TrainConfig(path_model="demo"), {"path_model", "total_batch_size"}, machine(2))
    assert "averaged every 500 steps; with --total-batch-size" in named.in_words(named.config)
    on_gpus = chosen(TrainConfig(), (), gpus(1, 24))
    assert "chosen for 1 GPU of 24 GiB (" in on_gpus.in_words(on_gpus.config)


@pytest.mark.parametrize(("total_steps", "is_said"), [(300, True), (1001, False)])
def test_a_warm_up_that_the_training_does_not_outlast_is_told(total_steps, is_said):
    said = trained(TrainConfig(total_steps=total_steps))
    assert said.endswith("rises for all of them, since --warmup-steps is 1000") == is_said


def test_the_trainers_keep_the_defaults_of_opendiloco():
    config, named = parse_train_config(["--fake-data"])
    assert named == {"fake_data"}
    assert (config.path_model, config.seq_length, config.total_batch_size) == ("2m", 1024, 512)
    assert (config.total_steps, config.hv.local_steps) == (88_000, 500)
