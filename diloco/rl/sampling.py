"""Completions by transformers' `generate`, with the log-probabilities with which they were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from diloco.errors import DilocoError
from diloco.rl.server_client import Sampling, Written
from diloco.rl.tasks import Message

AT_ONCE = 64
"""Completions in one batch, unless the caller says otherwise."""


class BadPolicy(DilocoError):
    """The model does not generate with these weights, as where it gives no probabilities."""


def sampled(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sampling,
    *,
    seed: int,
    at_once: int = AT_ONCE,
) -> list[Written]:
    """`count` completions of each prompt. Leaves torch's random state and the model's mode as they were.

    Raises BadPolicy if the weights, though finite, are so large that the logits are not.
    The log-probabilities are those at the sampling temperature, as TRL's are, before top-p, top-k and the like.
    """
    was_training = model.training
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    written: list[tuple[list[int], list[float | None]]] = []
    asked = [list(prompt) for prompt in prompts for _ in range(count)]
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(seed)
            for start in range(0, len(asked), at_once):
                written += _batch(model, tokenizer, asked[start : start + at_once], sampling)
    finally:
        model.train(was_training)
    return [
        Written([ids for ids, _ in own], [logprobs for _, logprobs in own])
        for own in (written[start : start + count] for start in range(0, len(written), count))
    ]


def _batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> list[tuple[list[int], list[float | None]]]:
    padding, ends = tokenizer.pad_token_id or 0, end_tokens(model, tokenizer)
    input_ids, mask = (part.to(model.device) for part in left_padded(prompts, padding))
    generate: Any = model.generate
    kept = _KeepLogprobs(sampling.temperature)
    # Every setting is named: a model's own generation_config may hold others. Some configurations switch the cache off,
    # for training: without it this takes five times as long.
    output = generate(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=sampling.most_tokens,
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
        use_cache=True,
        eos_token_id=ends,
        pad_token_id=padding,
        logits_processor=LogitsProcessorList([kept]),
    )
    new = output[:, input_ids.shape[1] :]
    logprobs = kept.of(new)
    found: list[tuple[list[int], list[float | None]]] = []
    for row, values in zip(new.tolist(), logprobs.tolist(), strict=True):
        length = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
        found.append((row[:length], values[:length]))
    return found


class _KeepLogprobs(LogitsProcessor):
    """Keeps the log-probability of each sampled token, and no others."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._values: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called by `generate` before it samples a token; `input_ids` ends with the token that it sampled before."""
        self._note(input_ids[:, -1])
        self._last = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        if bool(self._last.isnan().any()):
            raise BadPolicy("the policy's logits are not finite: its training has diverged")
        return scores

    def of(self, new: Tensor) -> Tensor:
        """The log-probabilities of all new tokens, once `generate` has returned: [rows, tokens]."""
        self._note(new[:, -1])
        self._last = None
        return torch.stack(self._values, dim=1)

    def _note(self, tokens: Tensor) -> None:
        if self._last is not None:
            # Rounding may leave a log-probability a little above 0.
            self._values.append(self._last.gather(1, tokens[:, None]).squeeze(1).clamp(max=0.0))


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a completion, as TRL chooses them."""
    said: Any = model.generation_config.eos_token_id if model.generation_config else None
    ends = [said] if isinstance(said, int) else list(said or [])
    own: Any = tokenizer.eos_token_id
    return ends if own in ends or own is None else [own, *ends]


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
