"""TRL's GRPOTrainer for a peer's worker: trains on completions that come with the prompts, evaluates by pass@k."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from diloco.callback import checkpoint_of
from diloco.data.sampling import PromptSchedule
from diloco.errors import UserError
from diloco.options.trainer import TrainConfig
from diloco.outer.world import World
from diloco.rl.tasks import Task
from diloco.train.sharding import Precision

log = logging.getLogger(__name__)

Rows = Callable[[], list[dict[str, Any]]]
RewardFunction = Callable[..., list[float]]
Compared = Callable[[Sequence[tuple[int, float]]], None]
"""Called with pairs of a row number in the last generation and the mean absolute difference between the trainer's and
the sampler's log-probabilities of that row, in nats per token."""

_LEAST_LOGPROB = -50.0
"""A sampled token cannot be less probable. If a peer claims so, the ratio could overflow, and gradients become NaN."""


class PeerTrainer(GRPOTrainer):
    """A GRPOTrainer with a placeholder data set, which generates nothing.

    `rows` returns a rank's part of the next generation: prompts, each with the `tokens` of a completion, the `logprobs`
    with which they were sampled, the `mask` of those to train on, and `scores`.
    """

    def __init__(
        self,
        *,
        rows: Rows,
        is_sampled_elsewhere: bool,
        evaluation: Callable[[], dict[str, float]],
        compared: Compared | None = None,
        **arguments: Any,
    ) -> None:
        """`is_sampled_elsewhere`: a server with this trainer's weights samples; its log-probabilities differ a little.

        `compared` is given if completions come from other peers, whose policies may be old. It is called on the main
        rank after each batch's forward pass, whose log-probabilities it uses."""
        super().__init__(**arguments)
        # With `use_vllm`, TRL weights tokens by the ratio of the trainer's probability to the sampler's. As an argument
        # of the configuration it would also make TRL connect to a server of its own kind.
        self.use_vllm = is_sampled_elsewhere
        model: Any = self.model
        if "ref" in getattr(model, "peft_config", {}):
            # TRL's copy of the initial adapters, as the reference model. Without adapters the model is the same.
            model.delete_adapter("ref")
        self._rows, self._compared = rows, compared
        self._evaluation = evaluation
        self._own: list[dict[str, Any]] = []
        """This rank's rows."""
        self._logprobs: Tensor | None = None
        """Log-probabilities of the completions in the last forward pass, [rows, tokens]."""

    @property
    def batch_of_step(self) -> int:
        """The number of the next batch in its optimizer step: a step may need several generations."""
        return int(self._step % self.args.gradient_accumulation_steps)

    def set_initial_training_values(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        """Lift the limit of passes over the data: a peer that gives up a fork trains more steps than the run has."""
        _, *others = super().set_initial_training_values(*arguments, **named)
        return (sys.maxsize, *others)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        # Generate at the same steps as a trainer that began at step 0. TRL counts batches, from 0 after a resume too:
        # after one within a generation, or a jump to the step of the others, later generations would begin elsewhere.
        first = self.state.global_step * self.args.gradient_accumulation_steps
        if self.batch_of_step == 0 and self._step != first:
            self._step, self._buffered_inputs = first, None
        return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor | Any]:
        # Choose the prompts here rather than in the data loader, which reads ahead past an outer step.
        self._own = self._rows()
        assert len(self._own) == len(inputs), (len(self._own), len(inputs))
        found: dict[str, Tensor | Any] = super()._generate_and_score_completions(self._own)
        if self._compared is not None:
            # Clip the ratio to the policy that sampled. TRL clips the ratio to the trainer's own policy, which is 1 in
            # the first step: an old batch could move the policy without limit.
            found["old_per_token_logps"] = found["sampling_per_token_logps"].clamp(min=_LEAST_LOGPROB)
            # To recognize the rows after TRL has shuffled them.
            first = self.accelerator.process_index * len(inputs)
            found["row"] = torch.arange(first, first + len(inputs))
        return found

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self._logprobs = found[0].detach()
        return found

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor | Any]) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)
        if self._compared is not None:
            self._compare(self._compared, inputs)
        self._logprobs = None
        return loss

    def _compare(self, compared: Compared, inputs: dict[str, Tensor | Any]) -> None:
        """A collective."""
        assert self._logprobs is not None
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        apart = (self._logprobs - inputs["sampling_per_token_logps"]).abs() * mask
        each = apart.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        # Listed under the names that TRL uses with its own servers. TRL records the mean of the values in each list.
        metrics, name = self._metrics["train"], "sampling/sampling_logp_difference"
        total, count = (
            self.accelerator.gather(torch.stack([apart.sum(), mask.sum()])[None]).sum(dim=0).tolist()
        )
        metrics[f"{name}/mean"].append(total / max(count, 1.0))
        greatest = self.accelerator.gather(apart.max()).max().item()
        metrics[f"{name}/max"] = [max([greatest, *metrics[f"{name}/max"]])]
        pairs = gather_object(list(zip(inputs["row"].tolist(), each.tolist(), strict=True)))
        if self.accelerator.is_main_process:
            compared(pairs)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, ids, _, *others = super()._generate(prompts)
        return prompt_ids, ids, [row["mask"] for row in self._own], *others

    def _generate_single_turn(self, *_: Any, **__: Any) -> tuple[list[list[int]], list[list[float | None]]]:
        return [row["tokens"] for row in self._own], [row["logprobs"] for row in self._own]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint. A failure is only logged, since a full disk must not end the training."""
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            log.error("the checkpoint of step %d was not written: %s", self.state.global_step, error)
            shutil.rmtree(checkpoint_of(self.args, self.state), ignore_errors=True)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """pass@k on the held-out prompts."""
        figures = self._evaluation()
        # Resets `control.should_evaluate`.
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures


def reward_functions(task: Task) -> list[RewardFunction]:
    """One function per component, with its name, under which TRL records its mean. The rows have the scores."""

    def component(index: int) -> RewardFunction:
        def score(scores: Sequence[Sequence[float]], **_: Any) -> list[float]:
            return [one[index] for one in scores]

        score.__name__ = task.rewards[index].name
        return score

    return [component(index) for index in range(len(task.rewards))]


# Generations per pass over the placeholder data set, at least; the trainer makes as many passes as it needs.
_GENERATIONS_PER_PASS = 64
_LARGEST_RATIO = 4.0
"""Limit of the ratio of a token with a negative advantage: above the limit, the token has no gradient."""


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


def placeholders(prompts: PromptSchedule) -> Dataset:
    """A data set of empty prompts for one pass. PeerTrainer replaces each row when it generates."""
    # Whole steps: the last step of a pass would otherwise have fewer batches than others.
    num_batches = math.lcm(_GENERATIONS_PER_PASS * prompts.batches_per_generation, prompts.batches_per_step)
    num_prompts = num_batches // prompts.batches_per_generation * prompts.prompts_per_generation
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": ""}]] * num_prompts})
