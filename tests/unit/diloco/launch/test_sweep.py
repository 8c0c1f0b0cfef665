"""How a sweep is laid out: no GPU or directory is shared, and what cannot be is said before anything starts."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.cli.grpo_sweep import seeds_of
from diloco.errors import UserError
from diloco.launch.sweep import (
    check_resources,
    notes_on_overridden_flags,
    plan_instances,
    trainer_environment,
)
from diloco.launch.sweep_run import Sweep
from diloco.options.flags import GrpoConfig, HvConfig, TrainConfig
from diloco.rl.own_server import _only_diloco, server_environment
from diloco.train.devices import gpus_for_ranks, split_gpus
from diloco.train.run_dir import slug
from diloco.train.sinks import run_name
from peers.admission.secrets import SECRET_ENV

CONFIG = TrainConfig(mode="grpo", path_model="Qwen/Qwen2.5-1.5B", grpo=GrpoConfig(dataset="gsm8k"))
SEEDS = [42, 1337, 2024, 9999]
EIGHT = [str(number) for number in range(8)]


def test_four_instances_on_eight_gpus_share_nothing():
    plan = plan_instances(CONFIG, num_instances=4, seeds=SEEDS, gpus=EIGHT)
    assert [(one.server_gpu, one.trainer_gpu) for one in plan] == [
        ("0", "1"),
        ("2", "3"),
        ("4", "5"),
        ("6", "7"),
    ]
    second = plan[1]
    assert second.output_dir == Path("outputs/trl_gsm8k_instance1_seed1337")
    assert second.deltas_dir == Path("checkpoints/deltas_gsm8k_instance1_seed1337")
    assert second.log == Path("logs/parallel_training/training_instance1_gpu3_seed1337.log")
    named = replace(CONFIG, grpo=replace(CONFIG.grpo, run_suffix=second.suffix))
    assert run_name(named) == "trl_gsm8k_grpo_Qwen2.5-1.5B_instance1_seed1337"


def test_a_generators_options_are_no_part_of_names():
    assert slug("reasoning-gym:chain_sum,min_terms=1,max_terms=2") == "reasoning-gym-chain_sum"
    assert slug("gsm8k=/data/gsm8k") == "gsm8k"


def test_the_seed_is_really_in_the_trainers_arguments():
    second = plan_instances(CONFIG, num_instances=4, seeds=SEEDS, gpus=EIGHT)[1]
    flags = second.flags(seed=second.seed)
    told = dict(zip(flags[::2], flags[1::2], strict=True))
    assert told["--seed"] == "1337"
    assert trainer_environment(second, {"A": "b", "OMP_NUM_THREADS": "3"}, num_instances=4) == {
        "A": "b",
        "OMP_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "3,2",
    }
    assert split_gpus(["3", "2"], num_ranks=1, server=None, starts_server=True) == (("3",), "2")


@pytest.mark.parametrize(
    ("instances", "seeds", "gpus", "says"),
    [
        (
            4,
            SEEDS,
            EIGHT[:6],
            "4 instances need 8 GPUs, two each, but this machine has 6; --instances 3 would do",
        ),
        (1, [1], EIGHT[:1], "--device cpu needs none"),
        (2, [1], EIGHT, "need as many different seeds"),
        (2, [1, 1], EIGHT, "need as many different seeds"),
        (2, [1, -1], EIGHT, "-1 is not a seed"),
    ],
)
def test_what_cannot_be_is_said(instances, seeds, gpus, says):
    with pytest.raises(UserError, match=says):
        plan_instances(CONFIG, num_instances=instances, seeds=seeds, gpus=gpus)


def test_what_each_instance_has_of_its_own_is_said_to_have_no_effect():
    config = replace(CONFIG, run_dir="here", grpo=replace(CONFIG.grpo, rollout_url=("http://host:1",)))
    assert notes_on_overridden_flags(config, {"run_dir", "grpo.rollout_url", "ckpt.path"}) == [
        "--run-dir has no effect in a sweep: each instance has its own.",
        "--grpo.rollout-url has no effect in a sweep: each instance has its own.",
    ]


def test_a_server_finds_this_package_where_another_one_was_before(tmp_path):
    (tmp_path / "diloco").symlink_to("/nowhere/diloco")
    for _ in range(2):
        assert (_only_diloco(tmp_path) / "diloco" / "rl" / "server_extension.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["diloco"]


def test_seeds_are_numbers_apart_by_commas():
    assert seeds_of("42,1337, 2024", 3, 0) == [42, 1337, 2024]
    assert seeds_of(None, 3, 7) == [7, 8, 9]
    with pytest.raises(UserError, match="not a list"):
        seeds_of("42;43", 2, 0)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = replace(CONFIG, device="cpu")
    return config, plan_instances(config, num_instances=1, seeds=[1], gpus=[])


def test_a_full_disk_an_old_run_and_a_missing_key_are_found_before_the_start(plan):
    config, instances = plan
    check_resources(instances, config, {}, min_free_bytes=0)
    with pytest.raises(UserError, match="are free on this disk"):
        check_resources(instances, config, {}, min_free_bytes=10**18)
    wandb = replace(config, metric_logger_type="wandb")
    nowhere = {"NETRC": "/nowhere"}
    with pytest.raises(UserError, match="WANDB_API_KEY is not set"):
        check_resources(instances, wandb, nowhere, min_free_bytes=0)
    check_resources(instances, wandb, {**nowhere, "WANDB_API_KEY": "k"}, min_free_bytes=0)
    check_resources(instances, wandb, {**nowhere, "WANDB_MODE": "offline"}, min_free_bytes=0)
    instances[0].output_dir.mkdir(parents=True)
    (instances[0].output_dir / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="already holds a run"):
        check_resources(instances, config, {}, min_free_bytes=0)


def test_a_peers_server_has_a_gpu_that_no_rank_trains_on():
    assert split_gpus(EIGHT, num_ranks=7, server=None, starts_server=True) == (tuple(EIGHT[:7]), "7")
    assert split_gpus(["0", "1"], num_ranks=1, server="0", starts_server=True) == (("1",), "0")
    assert split_gpus(["0"], num_ranks=1, server="0", starts_server=True) == (("0",), "0")
    assert split_gpus(["0", "1"], num_ranks=2, server=None, starts_server=False) == (("0", "1"), None)
    with pytest.raises(UserError, match="needs a GPU beside"):
        split_gpus(["0"], num_ranks=1, server=None, starts_server=True)
    assert gpus_for_ranks(CONFIG, 8) == 7 and gpus_for_ranks(TrainConfig(), 8) == 8


def test_a_server_gets_its_gpu_and_nothing_of_the_swarm(tmp_path):
    ours = {"PATH": os.defpath, "DILOCO_LINK": "l", "RANK": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": "src"}
    told = server_environment(ours, "5", tmp_path)
    assert told["CUDA_VISIBLE_DEVICES"] == "5" and told["PYTHONPATH"] == str(tmp_path)
    assert told["VLLM_SERVER_DEV_MODE"] == "1" and told["PATH"] == os.defpath
    assert not {"DILOCO_LINK", "RANK", "OMP_NUM_THREADS"} & told.keys()


def test_a_swarm_of_instances_is_open_whatever_secret_the_user_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECRET_ENV, "of another swarm")
    config = TrainConfig(mode="grpo", device="cpu", lr=1e-5, hv=HvConfig(swarm_secret_file="secret"))
    instances = plan_instances(config, num_instances=2, seeds=[1, 2], gpus=[])
    named = frozenset({"lr", "hv.swarm_secret_file"})
    sweep = Sweep(config, named, instances, average=True)
    written = tomllib.loads(sweep._config_path.read_text())
    assert (written["lr"], written["hv"]) == (1e-5, {})
    assert SECRET_ENV not in sweep._trainer(instances[0], []).env
