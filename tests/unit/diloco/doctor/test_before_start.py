"""The checks before a peer starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.doctor import before_start
from diloco.doctor.before_start import check_memory_and_disk
from diloco.errors import UserError
from diloco.options.flags import GrpoConfig, TrainConfig
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
MACHINE = Machine(num_cores=64, num_gpus=8, gpu_bytes=80 * 2**30)


def check(config: TrainConfig, machine: Machine = MACHINE, num_ranks: int = 8) -> None:
    check_memory_and_disk(config, machine, Path("state"), num_ranks=num_ranks)


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
