from __future__ import annotations

import re
from dataclasses import replace

import pytest

from diloco.options.trainer import flat_values, parse_train_config
from provisioning.errors import UserError
from provisioning.experiments.sets import BUILT_IN, ExperimentConfig, built_in, load
from provisioning.experiments.trainers import (
    GRPO,
    PRETRAIN,
    TRAINERS,
    argv,
    environment,
    job_name,
    wanted_values,
)


def values(name: str, field: str) -> list[object]:
    return [getattr(placed.config, field) for placed in built_in(name).experiments]


def test_the_built_in_sets_hold_the_values_of_the_original_ones():
    assert values("lr_sweep", "learning_rate") == [1e-6, 3e-6, 5e-6, 1e-5]
    assert values("multi_dataset", "dataset") == ["gsm8k", "math", "mbpp"]
    assert [("1.5B" in one, "3B" in one, "7B" in one) for one in values("model_size", "model_id")] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    sizes = zip(values("batch_grid", "batch_size"), values("batch_grid", "grad_accum_steps"), strict=True)
    assert list(sizes) == [(2, 256), (4, 128), (8, 64), (16, 32)]
    assert values("custom_advanced", "custom_env") == [{"GRAIL_TRAINER_WARMUP_STEPS": "50"}]
    shape = {name: (len(built_in(name).pods), built_in(name).pods[0].ttl_hours) for name in BUILT_IN}
    assert shape == {
        "lr_sweep": (2, 6),
        "multi_dataset": (3, 8),
        "model_size": (3, 12),
        "batch_grid": (4, 8),
        "custom_advanced": (1, 10),
    }
    for name in BUILT_IN:
        for spec in built_in(name).pods:
            assert (spec.gpu_type, spec.gpu_count, spec.min_upload_mbps, spec.min_download_mbps) == (
                *("A100", 8),
                *(500, 500),
            )
        assert all(placed.config.eval_every == 20 for placed in built_in(name).experiments)


@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=TRAINERS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_value_reaches_the_trainers_resolved_configuration(name, trainer):
    """Checked through the trainer's own parser, together with a flag of the user."""
    for placed in built_in(name).experiments:
        config = replace(placed.config, custom_args=("--seed", "7"))
        words = argv(trainer, config, "python", "/tmp/run", has_gpus=True)
        resolved, named = parse_train_config(words[3:], "grpo" if trainer is GRPO else "pretrain")
        wanted = wanted_values(trainer, config, has_gpus=True)
        values = flat_values(resolved)
        for key, value in wanted.items():
            assert values[key] == (tuple(value) if isinstance(value, list) else value), key
        assert set(wanted) <= named and resolved.seed == 7


def test_changed_values_are_another_job_and_the_same_are_the_same():
    config = ExperimentConfig(name="x")
    assert job_name(PRETRAIN, config) == job_name(PRETRAIN, ExperimentConfig(name="x"))
    for change in ({"learning_rate": 1e-3}, {"custom_env": {"A": "1"}}, {"custom_args": ("--seed", "7")}):
        assert job_name(PRETRAIN, replace(config, **change)) != job_name(PRETRAIN, config)


def test_the_trainer_has_its_own_gpu_and_the_users_variables():
    config = ExperimentConfig(name="x", train_gpu_device="3", custom_env={"A": "b"})
    assert environment(PRETRAIN, config, has_gpus=True) == {"CUDA_VISIBLE_DEVICES": "3", "A": "b"}
    assert environment(GRPO, config, has_gpus=True)["CUDA_VISIBLE_DEVICES"] == "3,1,2,3,4"
    assert environment(PRETRAIN, config, has_gpus=False) == {"A": "b"}


def test_a_set_of_ones_own_comes_from_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[pods]]\nname = "big"\nprovider = "lium"\ngpu_count = 4\n[[pods]]\nname = "small"\nprovider = "local"\n'
        '[[experiments]]\nname = "a"\nlearning_rate = 1e-4\n'
        '[[experiments]]\nname = "b"\npod = "big"\ncustom_env = {X = "1"}\n'
    )
    found = load(str(path))
    assert [(one.pod, one.config.name) for one in found.experiments] == [("big", "a"), ("big", "b")]
    assert found.experiments[0].config.learning_rate == 1e-4 and found.pods[0].gpu_count == 4
    assert [(spec.provider, spec.gpu_type) for spec in found.pods] == [("lium", "A100"), ("local", "cpu-1")]
    path.write_text(path.read_text() + "learning_rte = 1\n")
    with pytest.raises(UserError, match=r"unknown field learning_rte"):
        load(str(path))


def test_a_name_that_is_none_is_answered_with_those_there_are():
    with pytest.raises(UserError, match=r"lr_sweep, multi_dataset"):
        load("lr_swep")


POD = '[[pods]]\nname = "p"\nprovider = "lium"\n'
WRONG_TOML = {
    "a number as text": (
        f'{POD}ttl_hours = "6"\n[[experiments]]\n',
        "Expected `float | null`, got `str` in `ttl_hours`",
    ),
    "no finite number": (
        f"{POD}max_price = nan\n[[experiments]]\n",
        "in `max_price`",
    ),
    "no provider": ('[[pods]]\nname = "p"\n[[experiments]]\n', r"pod p: say where it is to run"),
    "a name that is none": (
        "[[pods]]\nname = 5\nprovider = 'lium'\n[[experiments]]\n",
        "Expected `str`, got `int` in `name`",
    ),
    "yes as a number": (
        f"{POD}gpu_count = true\n[[experiments]]\n",
        "Expected `int | null`, got `bool` in `gpu_count`",
    ),
    "no table": ("pods = [1]\n", "has no [[pods]]"),
    "no experiments": (f"experiments = 3\n{POD}", "has no [[experiments]]"),
    "a rate as text": (
        f'{POD}[[experiments]]\nlearning_rate = "x"\n',
        "Expected `float`, got `str` in `learning_rate`",
    ),
    "a number in the environment": (
        f"{POD}[[experiments]]\ncustom_env = {{A = 1}}\n",
        "got `int` in `custom_env",
    ),
    "a pod that is not there": (
        f'{POD}[[experiments]]\nname = "a"\npod = "q"\n',
        "a is assigned to q, which is not one of its pods",
    ),
}


@pytest.mark.parametrize("case", WRONG_TOML)
def test_a_value_of_another_type_is_named(case, tmp_path):
    text, said = WRONG_TOML[case]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        load(str(path))
