"""The checks before a peer starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.doctor import before_start
from diloco.doctor.before_start import check_memory_and_disk
from diloco.errors import UserError
from diloco.options.flags import CkptConfig, GrpoConfig, TrainConfig
from diloco.train import memory
from diloco.train.devices import Machine
from tests.support.commands import model_directory

EIGHT_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
ONE_AND_A_HALF_BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 25,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
MACHINE = Machine(num_cores=64, gpus=tuple("01234567"), gpu_bytes=80 * 2**30)


def check(config: TrainConfig, machine: Machine = MACHINE, num_ranks: int = 8, **settled: Any) -> None:
    check_memory_and_disk(config, machine, Path("state"), num_ranks=num_ranks, **settled)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(before_start, "check_disk", lambda *_, **__: [])
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: None)
    return TrainConfig(path_model=str(model_directory(tmp_path / "model", **EIGHT_BILLION)))


def test_all_weights_of_a_model_in_grpo_have_to_fit_each_gpu(config):
    grpo = replace(config, mode="grpo")
    with pytest.raises(
        UserError, match=r"640\.0 GiB are free; .* GPUs with more .* adapters only"
    ) as refusal:
        check(grpo)
    assert "more GPUs" not in str(refusal.value)
    check(replace(grpo, grpo=GrpoConfig(lora_rank=16)))
    check(grpo, replace(MACHINE, gpu_bytes=141 * 2**30))


def test_adapters_have_to_fit_each_gpu_beside_the_model(config):
    grpo = replace(config, mode="grpo", grpo=GrpoConfig(lora_rank=16))
    with pytest.raises(UserError, match=r"each holds all of it$"):
        check(grpo, replace(MACHINE, gpu_bytes=16 * 2**30))


def test_pretraining_shards_the_model_unless_that_is_turned_off(config):
    sharded = replace(config, per_device_train_batch_size=1, activation_checkpointing=True)
    check(sharded)
    with pytest.raises(UserError, match="GPUs with more memory"):
        check(replace(sharded, sharding_strategy="NO_SHARD"))


def test_a_peer_has_the_memory_of_its_own_ranks_alone(config):
    """The last GPU may be that of a vLLM server."""
    sharded = replace(config, per_device_train_batch_size=1, activation_checkpointing=True)
    with pytest.raises(UserError, match=r"80\.0 GiB are free; .* more GPUs$"):
        check(sharded, num_ranks=1)


def test_the_memory_of_the_optimizer_that_is_chosen_is_counted(config, tmp_path):
    path_model = str(model_directory(tmp_path / "smaller", **ONE_AND_A_HALF_BILLION))
    one = {"per_device_train_batch_size": 1, "seq_length": 1024, "activation_checkpointing": True}
    adamw = replace(config, path_model=path_model, optimizer="adamw", **one)
    of_24_gb = replace(MACHINE, gpus=("0",), gpu_bytes=25_757_220_864)
    check(replace(adamw, optimizer="muon"), of_24_gb, num_ranks=1)
    with pytest.raises(UserError, match="GPU memory"):
        check(adamw, of_24_gb, num_ranks=1)


def test_the_copies_of_which_checkpoints_are_written_have_to_fit(config, monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 32 * 2**30)
    plain = TrainConfig(path_model="1b", per_device_train_batch_size=1)
    saving = replace(plain, ckpt=CkptConfig(interval=100))
    cpu = Machine(num_cores=64)
    check(plain, cpu, num_ranks=1)
    with pytest.raises(UserError, match=r"32\.0 GiB are free; .* no checkpoints"):
        check(saving, cpu, num_ranks=1)
    # Those of GRPO are written by transformers.
    check(replace(saving, mode="grpo"), cpu, num_ranks=1)


def test_an_optimizer_that_the_swarm_may_choose_counts_as_the_one_that_takes_less(config, tmp_path):
    path_model = str(model_directory(tmp_path / "smaller", **ONE_AND_A_HALF_BILLION))
    default = replace(config, path_model=path_model)
    small = replace(MACHINE, gpus=("0",), gpu_bytes=24_000_000_000)
    check(default, small, num_ranks=1, is_settled=False)
    with pytest.raises(UserError, match="GPU memory"):
        check(default, small, num_ranks=1, is_settled=False, named={"optimizer"})
