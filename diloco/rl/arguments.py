"""Translates our configuration to TRL's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from diloco.errors import UserError
from diloco.options.trainer import TrainConfig
from diloco.outer.world import World
from diloco.train.sharding import Precision

# Generations per pass over the placeholder data set; the trainer makes as many passes as it needs.
_GENERATIONS_PER_PASS = 64
_LARGEST_RATIO = 4.0
"""Of a token with a negative advantage: above it, the token moves nothing."""


def batches_of(config: TrainConfig, num_ranks: int) -> tuple[int, int, int]:
    """Completions per batch of one rank, batches per inner step, batches per generation.

    Raises UserError if a generation is not a multiple of --grpo.num-generations.
    """
    grpo = config.grpo
    per_rank = config.total_batch_size // num_ranks
    per_device = config.per_device_train_batch_size
    accumulation = per_rank // per_device
    batches = grpo.steps_per_generation or accumulation
    if per_device * batches * num_ranks % grpo.num_generations:
        raise UserError(
            f"a generation of {per_device * batches * num_ranks} completions does not divide by "
            f"--grpo.num-generations {grpo.num_generations}; --total-batch-size "
            f"{-(-config.total_batch_size // grpo.num_generations) * grpo.num_generations} would do"
        )
    return per_device, accumulation, batches


def grpo_arguments(
    config: TrainConfig,
    world: World,
    device: torch.device,
    *,
    end_step: int,
    output_dir: Path,
    seed: int,
    reward_weights: Sequence[float],
) -> GRPOConfig:
    """TRL's arguments. Raises UserError."""
    per_device, accumulation, batches = batches_of(config, world.num_ranks)
    precision = Precision.of(config.precision, device)
    grpo = config.grpo
    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=end_step,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=batches,
        num_generations=grpo.num_generations,
        num_iterations=grpo.num_iterations,
        max_completion_length=grpo.max_completion_length,
        temperature=grpo.temperature,
        beta=grpo.beta,
        reward_weights=list(reward_weights),
        max_grad_norm=config.max_grad_norm,
        learning_rate=config.lr,
        seed=seed,
        data_seed=seed,
        use_cpu=device.type == "cpu",
        bf16=precision.compute == torch.bfloat16,
        fp16=precision.compute == torch.float16,
        torch_compile=False,
        **_activation_checkpointing(config.activation_checkpointing),
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="steps" if config.ckpt.interval else "no",
        save_steps=config.ckpt.interval or 500,
        save_only_model=False,
        report_to=[],
        disable_tqdm=True,
        # Two-sided clipping: arXiv 2505.07291.
        delta=_LARGEST_RATIO if grpo.rollout == "peers" else None,
    )


def _activation_checkpointing(is_on: bool) -> dict[str, Any]:
    """The argument under its name in this transformers: 5.17 has the older one only."""
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    name = "activation_checkpointing"
    return {name if name in known else "gradient_checkpointing": is_on}


def placeholders(prompts_per_generation: int) -> Dataset:
    """A data set of empty prompts for one pass. PeerTrainer replaces each row when it generates."""
    row = [{"role": "user", "content": ""}]
    return Dataset.from_dict({"prompt": [row] * (prompts_per_generation * _GENERATIONS_PER_PASS)})
