"""TRL's GRPOTrainer for a peer's worker: prompts chosen by the peer's position in the run, evaluation by pass@k."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor
from trl import GRPOTrainer

from diloco.callback import checkpoint_of
from diloco.rl.tasks import Example, Message, Task, scores

log = logging.getLogger(__name__)

Rows = Callable[[], list[dict[str, Any]]]
RewardFunction = Callable[..., list[float]]

_LEAST_LOGPROB = -50.0
"""Of a sampled token. A lower claim is false, and its ratio could overflow, which clipping turns into NaN gradients."""


class PeerTrainer(GRPOTrainer):
    """A GRPOTrainer with a placeholder data set: `rows` returns the prompts of the next generation on all ranks.

    A row that holds `written`, tokens, log-probabilities and the mask of those to train on, has been completed already,
    and `judged` has its scores.
    """

    def __init__(
        self,
        *,
        rows: Rows,
        evaluation: Callable[[], dict[str, float]],
        compared: Callable[[Sequence[float]], None] | None = None,
        **arguments: Any,
    ) -> None:
        """`compared`: completions are other peers', by policies that may be old. It is called on the main rank with the
        mean absolute difference between the trainer's and the sampler's log-probabilities of each row, in nats per
        token."""
        super().__init__(**arguments)
        self._rows, self._compared = rows, compared
        self._evaluation = evaluation
        self._written: list[tuple[list[int], list[float], list[int]] | None] = []

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor | Any]:
        # Choose the prompts here rather than in the data loader, which reads ahead past an outer step.
        rows = self._rows()
        first = self.accelerator.process_index * len(inputs)
        own = rows[first : first + len(inputs)]
        assert len(own) == len(inputs), (len(rows), len(inputs), first)
        self._written = [row.pop("written", None) for row in own]
        found: dict[str, Tensor | Any] = super()._generate_and_score_completions(own)
        if self._compared is not None:
            differences = self._differences(found)
            if self.accelerator.is_main_process:
                self._compared(differences)
            # Clip the ratio to the policy that sampled. TRL clips the ratio to the trainer's own policy, which is 1 in
            # the first step, and multiplies by a truncated weight: an old batch could move the policy without limit.
            found["old_per_token_logps"] = found["sampling_per_token_logps"].clamp(min=_LEAST_LOGPROB)
            found["importance_sampling_ratio"] = torch.ones_like(found["sampling_per_token_logps"])
        return found

    def _differences(self, found: dict[str, Tensor | Any]) -> list[float]:
        """Of all ranks' rows. A collective."""
        mask = found["completion_mask"] * found.get("tool_mask", 1)
        apart = (found["old_per_token_logps"] - found["sampling_per_token_logps"]).abs() * mask
        each = (apart.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).tolist()
        all_ranks: list[float] = gather_object(each)
        return all_ranks

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids, ids, mask, *others = super()._generate(prompts)
        if written := [one for one in self._written if one is not None]:
            mask = [mask for _, _, mask in written]
        return prompt_ids, ids, mask, *others

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *arguments: Any, **named: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        written = [one for one in self._written if one is not None]
        if written:
            return [tokens for tokens, _, _ in written], [logprobs for _, logprobs, _ in written]
        generated: tuple[list[list[int]], list[list[float]] | None]
        generated = super()._generate_single_turn(prompt_ids, *arguments, **named)
        return generated

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
    """One function per component, with its name. Each completion is scored once and the scores are shared."""
    read: dict[tuple[str, int], list[float]] = {}

    def component(index: int) -> RewardFunction:
        def score(
            completions: Sequence[list[Message]],
            example: Sequence[Example],
            judged: Sequence[Sequence[float]] | None = None,
            **_: Any,
        ) -> list[float]:
            if judged is not None:
                return [one[index] for one in judged]
            found = []
            for completion, one in zip(completions, example, strict=True):
                text = completion[0]["content"]
                key = (text, id(one))
                if index == 0:
                    read[key] = scores(task, text, one)
                found.append(read[key][index])
            if index == len(task.rewards) - 1:
                read.clear()
            return found

        score.__name__ = task.rewards[index].name
        return score

    return [component(index) for index in range(len(task.rewards))]
