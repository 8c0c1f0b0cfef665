"""Train in the test's own process, with the real trainer on a tiny byte-level model and random tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diloco.launch.worker import Assignment
from diloco.options.flags import CkptConfig, HvConfig, TrainConfig
from diloco.outer.world import World, barrier
from diloco.train_fsdp import Trainer
from tests.support.commands import model_directory, records_of


def tiny_config(directory: Path, **changes: Any) -> TrainConfig:
    """Six steps on random tokens; the model's config.json lies in `directory`."""
    heads = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = model_directory(directory / "model", **heads, num_hidden_layers=2, intermediate_size=27)
    config = TrainConfig(
        path_model=str(model),
        fake_data=True,
        seq_length=16,
        total_batch_size=4,
        per_device_train_batch_size=2,
        lr=1e-2,
        warmup_steps=2,
        total_steps=6,
        eval_tokens=64,
        device="cpu",
        ckpt=CkptConfig(path=str(directory / "checkpoints")),
        hv=HvConfig(local_steps=4),
    )
    return replace(config, **changes)


def train(config: TrainConfig, run_dir: Path, world: World = World()) -> list[dict[str, Any]]:  # noqa: B008
    """The metrics of a whole training."""
    run_dir.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(Assignment(config=config, run_dir=run_dir), world, torch.device("cpu"), [])
    with trainer.metrics:
        trainer.train()
    # Rank 0 writes the metrics: without a barrier, another rank could read half a line.
    barrier()
    return records_of(run_dir)


def of_kind(kind: str, records: list[dict[str, Any]], *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(record[key] for key in keys) for record in records if record["kind"] == kind]
