"""Dialogues of a model with an environment (rl/environments.py), as tokens: what the model said, and what it was told.

Only the model's own tokens are trained on. `turns` has the numbers of tokens by turns: the model's, the environment's,
the model's, and so on; the model has the last word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from diloco.rl.environments import EnvironmentTask
from diloco.rl.sampling import token_ids
from diloco.rl.server_client import Sampling, Written
from diloco.rl.tasks import Example, Message

Complete = Callable[[Sequence[list[int]], int, Sampling, int], list[Written]]
"""(prompts, completions of each, sampling, seed) -> completions by the newest weights."""
_SAID = "\ue000"
"""Stands for what the model said, where the words after it are looked for: a character of private use."""


@dataclass
class _Dialogue:
    example: Example
    prompt: list[int]
    room: int
    """Tokens that it may still take."""
    said: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float | None]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.turns.append(len(tokens))
        self.room -= len(tokens)


def held(
    task: EnvironmentTask,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    count: int,
    complete: Complete,
    sampling: Sampling,
    seed: int,
) -> list[list[dict[str, Any]]]:
    """`count` judged dialogues of each example, each of at most `sampling.max_tokens`, as rl/generator.py has them."""
    prompts = token_ids(tokenizer, [example.prompt for example in examples])
    every = [
        _Dialogue(example, prompt, sampling.max_tokens)
        for example, prompt in zip(examples, prompts, strict=True)
        for _ in range(count)
    ]
    written, talking = complete(prompts, count, sampling, seed), every
    for turn in range(1, task.max_turns + 1):
        talking = [
            dialogue
            for dialogue, one in zip(talking, _each(written), strict=True)
            if _goes_on(task, tokenizer, dialogue, *one, is_last=turn == task.max_turns)
        ]
        if not talking:
            break
        longest = replace(sampling, max_tokens=max(dialogue.room for dialogue in talking))
        written = complete(
            [dialogue.prompt + dialogue.tokens for dialogue in talking], 1, longest, seed + turn
        )
    judged = [
        {
            "tokens": one.tokens,
            "logprobs": one.logprobs,
            "turns": one.turns,
            "scores": [task.reward(one.example, one.said)],
        }
        for one in every
    ]
    return [judged[start : start + count] for start in range(0, len(judged), count)]


def scored_again(
    task: EnvironmentTask,
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    tokens: Sequence[int],
    turns: Sequence[int],
) -> list[float]:
    """The scores of a dialogue by its tokens; infinite if the environment would not have said what it holds."""
    said: list[str] = []
    place = 0
    for own, told in _pairs(turns or [len(tokens)]):
        spoken = list(tokens[place : place + own])
        said.append(_text(tokenizer, spoken))
        place += own
        reply = task.reply(example, said) if told else None
        if told and (
            reply is None
            or list(tokens[place : place + told]) != _told(tokenizer, example, said, task, spoken, reply)
        ):
            return [math.inf]
        place += told
    return [task.reward(example, said)]


def own_mask(turns: Sequence[int], num_tokens: int) -> list[int]:
    """1 for each token of the model, 0 for those that it was told."""
    if not turns:
        return [1] * num_tokens
    return [1 - index % 2 for index, length in enumerate(turns) for _ in range(length)]


def _pairs(turns: Sequence[int]) -> list[tuple[int, int]]:
    """The lengths of what the model said and of what it was told then; the last is 0."""
    return list(zip(turns[::2], (*turns[1::2], 0), strict=True))


def _each(written: Sequence[Written]) -> list[tuple[list[int], list[float | None]]]:
    return [one for group in written for one in zip(group.token_ids, group.logprobs, strict=True)]


def _goes_on(
    task: EnvironmentTask,
    tokenizer: PreTrainedTokenizerBase,
    dialogue: _Dialogue,
    tokens: list[int],
    logprobs: list[float | None],
    *,
    is_last: bool,
) -> bool:
    """Take what the model has said, and add the environment's reply. False: the dialogue is over."""
    # Others of the batch may have had more room.
    is_cut_off = len(tokens) >= dialogue.room and tokens[dialogue.room - 1] != tokenizer.eos_token_id
    spoken = tokens[: dialogue.room]
    dialogue.append(spoken, logprobs[: dialogue.room])
    dialogue.said.append(_text(tokenizer, spoken))
    if is_cut_off or is_last or (reply := task.reply(dialogue.example, dialogue.said)) is None:
        return False
    told = _told(tokenizer, dialogue.example, dialogue.said, task, spoken, reply)
    if not told or len(told) >= dialogue.room:
        return False
    dialogue.append(told, [0.0] * len(told))
    return True


def _told(
    tokenizer: PreTrainedTokenizerBase,
    example: Example,
    said: Sequence[str],
    task: EnvironmentTask,
    spoken: Sequence[int],
    reply: str,
) -> list[int]:
    """The tokens between what the model said last and what it says next, by the chat template."""
    messages: list[Message] = list(example.prompt)
    for index, text in enumerate(said[:-1], 1):
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": task.reply(example, said[:index]) or ""})
    messages += [{"role": "assistant", "content": _SAID}, {"role": "user", "content": reply}]
    rendered: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = list(tokenizer(rendered.rpartition(_SAID)[2], add_special_tokens=False)["input_ids"])
    # The template ends the model's message as well as the model does.
    repeats_end = bool(ids) and spoken[-1] == tokenizer.eos_token_id == ids[0]
    return ids[1:] if repeats_end else ids


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
