"""TRL's GRPOTrainer for a peer's worker: prompts chosen by the peer's position in the run, evaluation by pass@k."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer

from diloco.callback import checkpoint_of
from diloco.rl.evaluation import TEMPERATURE, TOP_K, TOP_P
from diloco.rl.tasks import Example, Message, Task, scores

log = logging.getLogger(__name__)

Rows = Callable[[], list[dict[str, object]]]
RewardFunction = Callable[..., list[float]]
_EVALUATION_BATCH = 64


class PeerTrainer(GRPOTrainer):
    """A GRPOTrainer with a placeholder data set: `rows` returns the prompts of the next generation on all ranks."""

    def __init__(self, *, rows: Rows, evaluation: Callable[[], dict[str, float]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._rows = rows
        self._evaluation = evaluation

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor | Any]:
        # Choose the prompts here rather than in the data loader, which reads ahead past an outer step.
        rows = self._rows()
        first = self.accelerator.process_index * len(inputs)
        own = rows[first : first + len(inputs)]
        assert len(own) == len(inputs), (len(rows), len(inputs), first)
        return super()._generate_and_score_completions(own)

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
        def score(completions: Sequence[list[Message]], example: Sequence[Example], **_: Any) -> list[float]:
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


def completed_by_the_trainer(
    trainer: GRPOTrainer,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[Message]],
    count: int,
    *,
    max_tokens: int,
    seed: int,
) -> list[list[str]]:
    """`count` completions of each prompt by transformers' `generate`. Leaves torch's random state as it was."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    texts: list[str] = []
    was_training = model.training
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            asked = [ids for ids in token_ids(tokenizer, prompts) for _ in range(count)]
            for start in range(0, len(asked), _EVALUATION_BATCH):
                input_ids, mask = left_padded(
                    asked[start : start + _EVALUATION_BATCH], tokenizer.pad_token_id or 0
                )
                output = model.generate(
                    input_ids=input_ids.to(model.device),
                    attention_mask=mask.to(model.device),
                    max_new_tokens=max_tokens,
                    do_sample=True,
                    temperature=TEMPERATURE,
                    top_p=TOP_P,
                    top_k=TOP_K,
                    use_cache=True,
                    eos_token_id=trainer.eos_token_ids,
                    pad_token_id=tokenizer.pad_token_id,
                )
                new = output[:, input_ids.shape[1] :]
                texts += tokenizer.batch_decode(new, skip_special_tokens=True)
    finally:
        model.train(was_training)
    return [texts[index : index + count] for index in range(0, len(texts), count)]


def token_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[Message]]) -> list[list[int]]:
    """The token ids of each prompt, rendered by the chat template."""
    rendered: list[list[int]] = []
    for prompt in prompts:
        text: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        rendered.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return rendered


def left_padded(rows: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Left-padded token ids and attention mask, both [len(rows), longest], so that all rows end in the last column."""
    longest = max(map(len, rows))
    ids = [[padding] * (longest - len(row)) + list(row) for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)
