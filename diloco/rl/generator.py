"""Generates and judges rollouts by the policies of a learner, with a model in this process or a vLLM server."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from diloco.errors import DilocoError
from diloco.options.flags import GrpoConfig
from diloco.options.trainer import TrainConfig
from diloco.rl.adapters import has_adapters, merged, trained
from diloco.rl.dialogues import Complete, judged
from diloco.rl.rollouts import Rollouts
from diloco.rl.sampling import sampled
from diloco.rl.server_client import Sampling, Written
from diloco.rl.tasks import Task
from diloco.rl.weights import ANY_FLOAT, Expected, Held

_FLOAT_BYTES = 4
_ROOM_BYTES = 1 << 20


class Generator:
    """Generates by the policy that `load` was given last."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        expected: Expected,
        *,
        use: Callable[[dict[str, Tensor]], None],
        complete: Complete,
    ) -> None:
        """`expected` are the model's parameters; `use` takes the weights that `complete` then generates with."""
        self.task, self._tokenizer, self._grpo = task, tokenizer, config.grpo
        self._expected, self._use, self._complete = expected, use, complete
        self._held = Held()

    @property
    def digest(self) -> str:
        return self._held.digest

    @property
    def most_bytes(self) -> int:
        """Most bytes of the files that lead to a policy: one of all weights, and patches not much longer together."""
        values = sum(torch.Size(shape).numel() for _, shape in self._expected.values())
        return 3 * _FLOAT_BYTES * values + _ROOM_BYTES

    def load(self, blobs: Iterable[bytes]) -> None:
        """Use the weights after these blobs in turn. Raises BadBlob; the weights in use then stay the same."""
        digest, state = self._held.after(blobs, self._expected)
        self._use(state)
        self._held.state, self._held.digest = state, digest

    def forget(self) -> None:
        self._held = Held()

    def generate(self, numbers: Sequence[int]) -> list[list[dict[str, Any]]]:
        """For each example of the task: judged completions, with the fields of peers.protocol.rollouts.Completion."""
        seed = secrets.randbits(31)
        groups = generated(self.task, self._tokenizer, numbers, self._grpo, self._complete, seed)
        for completion in itertools.chain(*groups):
            completion["logprobs"] = _numbers(completion["logprobs"])
        return groups


def generated(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    numbers: Sequence[int],
    grpo: GrpoConfig,
    complete: Complete,
    seed: int,
) -> list[list[dict[str, Any]]]:
    """For each example of the task: judged completions to train on."""
    examples = [task.example(number) for number in numbers]
    sampling = Sampling(max_tokens=grpo.max_completion_length, temperature=grpo.temperature)
    return judged(task, tokenizer, examples, grpo.num_generations, complete, sampling, seed)


def of_model(
    config: TrainConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    dtype: torch.dtype,
) -> Generator:
    """A Generator that uses transformers, in this dtype."""
    torch.nn.Module.to(model, dtype)

    def complete(prompts: Sequence[list[int]], count: int, sampling: Sampling, seed: int) -> list[Written]:
        return sampled(model, tokenizer, prompts, count, sampling, seed=seed)

    use = partial(_load, model)
    return Generator(config, task, tokenizer, expected_of(model), use=use, complete=complete)


def of_server(
    config: TrainConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    server: Rollouts,
) -> Generator:
    """A Generator that uses a vLLM server, to which each policy is pushed before its first rollout.

    It keeps the model only if that has adapters, to merge them into the other weights.
    """
    publisher, expected = server.publisher, expected_of(model)
    base = model if has_adapters(model) else None
    del model

    def use(state: dict[str, Tensor]) -> None:
        weights: Iterable[tuple[str, Tensor]] = state.items()
        if base is not None:
            _load(base, state)
            weights = merged(base, base.named_parameters())
        publisher.take(weights, may_change=False)

    def complete(prompts: Sequence[list[int]], count: int, sampling: Sampling, seed: int) -> list[Written]:
        return server.complete(prompts, count, sampling, seed=seed)

    return Generator(config, task, tokenizer, expected, use=use, complete=complete)


def expected_of(model: PreTrainedModel) -> Expected:
    """The trained parameters, in any floating-point type: the learner's may differ from this peer's."""
    return {name: (ANY_FLOAT, tuple(tensor.shape)) for name, tensor in trained(model).items()}


@torch.no_grad()
def _load(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    own = trained(model)
    for name, tensor in state.items():
        own[name].copy_(tensor)


def prompts_at_once(config: TrainConfig) -> int:
    """How many prompts fill a batch of --per-device-train-batch-size."""
    return max(1, config.per_device_train_batch_size // config.grpo.num_generations)


def _numbers(logprobs: Sequence[float | None]) -> list[float]:
    if None in logprobs:
        raise DilocoError("the server left out a token's log-probability, which training needs")
    # Rounding may leave a log-probability a little above 0.
    return [min(float(value or 0.0), 0.0) for value in logprobs]
