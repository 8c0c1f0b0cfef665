"""The layout of a sweep: runs share no GPU or directory, and an impossible sweep is refused before it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.cli.grpo_sweep import seeds_of
from diloco.cli.machine_recipes import settled
from diloco.errors import UserError
from diloco.launch.sweep import Sweep, plan_instances
from diloco.options.flags import GrpoConfig, TrainConfig
from diloco.rl.own_server import _only_diloco, server_environment
from diloco.rl.trainer import batches_of
from diloco.train.devices import gpus_for_ranks, split_gpus
from diloco.train.run_dir import slug
from diloco.train.sinks import run_name

CONFIG = TrainConfig(mode="grpo", path_model="Qwen/Qwen2.5-1.5B", grpo=GrpoConfig(dataset="gsm8k"))
SEEDS = [42, 1337, 2024, 9999]
EIGHT = [str(number) for number in range(8)]


def test_four_instances_on_eight_gpus_share_nothing():
    plan = plan_instances(CONFIG, seeds=SEEDS, gpus=EIGHT)
    assert [one.gpus for one in plan] == [("1", "0"), ("3", "2"), ("5", "4"), ("7", "6")]
    second = plan[1]
    assert second.output_dir == Path("outputs/trl_gsm8k_instance1_seed1337")
    assert second.log == Path("logs/parallel_training/training_instance1_gpu3_seed1337.log")
    named = replace(CONFIG, grpo=replace(CONFIG.grpo, run_suffix=second.suffix))
    assert run_name(named) == "trl_gsm8k_grpo_Qwen2.5-1.5B_instance1_seed1337"


def test_a_generators_options_are_no_part_of_names():
    assert slug("reasoning-gym:chain_sum,min_terms=1,max_terms=2") == "reasoning-gym-chain_sum"
    assert slug("gsm8k=/data/gsm8k") == "gsm8k"


def test_a_trainer_gets_its_own_seed_directories_and_gpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    plan = plan_instances(CONFIG, seeds=SEEDS, gpus=EIGHT)
    command = Sweep(CONFIG, frozenset(), plan).trainer(plan[1])
    told = dict(zip(command.argv[3::2], command.argv[4::2], strict=True))
    assert told["--seed"] == "1337"
    assert told["--ckpt.delta-path"] == "checkpoints/deltas_gsm8k_instance1_seed1337"
    assert (command.env["CUDA_VISIBLE_DEVICES"], command.env["OMP_NUM_THREADS"]) == ("3,2", "3")
    assert split_gpus(["3", "2"], num_ranks=1, server=None, starts_server=True) == (("3",), "2")


def test_too_few_gpus_and_an_old_run_are_found_before_the_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="4 instances need 8 GPUs, two each, but this machine has 6"):
        plan_instances(CONFIG, seeds=SEEDS, gpus=EIGHT[:6])
    (instance,) = plan_instances(CONFIG, seeds=[1], gpus=EIGHT)
    instance.output_dir.mkdir(parents=True)
    (instance.output_dir / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="already holds a run"):
        plan_instances(CONFIG, seeds=[1], gpus=EIGHT)


def test_a_server_finds_this_package_where_another_one_was_before(tmp_path):
    (tmp_path / "diloco").symlink_to("/nowhere/diloco")
    for _ in range(2):
        assert (_only_diloco(tmp_path) / "diloco" / "rl" / "server_extension.py").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["diloco"]


def test_seeds_are_numbers_apart_by_commas():
    assert seeds_of("42,1337, 2024", 3, 0) == [42, 1337, 2024]
    assert seeds_of(None, 3, 7) == [7, 8, 9]
    for wrong in ("42;43", "1", "1,1", "1,01", "1,-1", f"1,{10**20}"):
        with pytest.raises(UserError, match="2 different whole numbers"):
            seeds_of(wrong, 2, 0)


def test_a_peers_server_has_a_gpu_that_no_rank_trains_on():
    assert split_gpus(EIGHT, num_ranks=7, server=None, starts_server=True) == (tuple(EIGHT[:7]), "7")
    assert split_gpus(["0", "1"], num_ranks=1, server="0", starts_server=True) == (("1",), "0")
    assert split_gpus(["0"], num_ranks=1, server="0", starts_server=True) == (("0",), "0")
    assert split_gpus(EIGHT, num_ranks=8, server="7", starts_server=True) == (tuple(EIGHT), "7")
    assert split_gpus(["0", "1"], num_ranks=2, server=None, starts_server=False) == (("0", "1"), None)
    with pytest.raises(UserError, match="needs a GPU beside"):
        split_gpus(["0"], num_ranks=1, server=None, starts_server=True)
    assert gpus_for_ranks(CONFIG, 8) == 7 and gpus_for_ranks(TrainConfig(), 8) == 8


def test_a_batch_that_nobody_named_divides_by_the_ranks_and_generations_of_any_machine():
    for num_gpus in range(1, 17):
        ranks = gpus_for_ranks(CONFIG, num_gpus)
        config = settled(replace(CONFIG, mode="grpo"), {"mode"}, num_ranks=ranks).config
        batches_of(config, ranks)
        assert config.total_batch_size % ranks == 0 and 40 <= config.total_batch_size <= 120, num_gpus
    assert settled(TrainConfig(), (), num_ranks=6).config.total_batch_size == 510
    with pytest.raises(UserError, match="not a multiple of this peer's 7 ranks"):
        settled(replace(CONFIG, total_batch_size=64), {"mode", "total_batch_size"}, num_ranks=7)


def test_a_server_gets_its_gpu_and_nothing_of_the_swarm(tmp_path):
    ours = {"PATH": os.defpath, "DILOCO_LINK": "l", "RANK": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": "src"}
    told = server_environment(ours, "5", tmp_path)
    assert told["CUDA_VISIBLE_DEVICES"] == "5" and told["PYTHONPATH"] == str(tmp_path)
    assert told["VLLM_SERVER_DEV_MODE"] == "1" and told["PATH"] == os.defpath
    assert not {"DILOCO_LINK", "RANK", "OMP_NUM_THREADS"} & told.keys()
