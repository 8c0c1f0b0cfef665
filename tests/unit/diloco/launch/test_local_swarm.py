"""Which GPUs each peer of `diloco run` gets."""

from __future__ import annotations

import pytest

from diloco.launch.local_swarm import LocalSwarm
from diloco.options.flags import GrpoConfig, TrainConfig

GPUS = ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("config", "gpus", "expected"),
    [
        (TrainConfig(), GPUS, ["0", "1"]),
        (TrainConfig(mode="grpo"), GPUS, ["1,0", "3,2"]),
        (TrainConfig(mode="grpo"), [], [None, None]),
        (TrainConfig(mode="grpo", device="cpu"), ["0"], ["0", "0"]),
        (TrainConfig(mode="grpo", grpo=GrpoConfig(vllm_gpu="3")), GPUS, ["0", "1"]),
        (TrainConfig(mode="grpo", grpo=GrpoConfig(rollout="hf")), GPUS, ["0", "1"]),
    ],
)
def test_a_peer_that_starts_a_server_has_a_gpu_for_it(tmp_path, config, gpus, expected):
    swarm = LocalSwarm(config, frozenset(), tmp_path, 2, print)
    assert [swarm._gpus(rank, gpus).get("CUDA_VISIBLE_DEVICES") for rank in range(2)] == expected
