"""Judged completions of a task, as tokens: what the model said, and, in a dialogue, what an environment has told it.

All completions that are trained on or evaluated are made here, whoever generates. Only the model's own tokens are
trained on. `turns` has the numbers of tokens of a dialogue by turns: the model's, the environment's, the model's, and
so on; the model has the last word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from diloco.rl.sampling import token_ids
from diloco.rl.server_client import Sampling, Written
from diloco.rl.tasks import Example, Message, Task

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


def judged(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    count: int,
    complete: Complete,
    sampling: Sampling,
    seed: int,
) -> list[list[dict[str, Any]]]:
    """`count` completions of each example, each of at most `sampling.max_tokens` tokens.

    With their log-probabilities and scores, and with turns if there was more than one.
    """
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
    found = [
        {
            "tokens": one.tokens,
            "logprobs": one.logprobs,
            "turns": one.turns if len(one.turns) > 1 else [],
            "scores": task.scores(one.example, one.said),
        }
        for one in every
    ]
    return [found[start : start + count] for start in range(0, len(found), count)]


def judged_again(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    number: int,
    tokens: Sequence[int],
    turns: Sequence[int],
) -> list[float]:
    """The scores of a completion, as whoever generated it should have found them; infinite if that cannot be one:
    the environment would not have said what it holds."""
    example = task.example(number)
    said: list[str] = []
    for spoken, told in _turns_of(tokens, turns):
        said.append(_text(tokenizer, spoken))
        reply = task.reply(example, said) if told else None
        if told and (reply is None or told != _told(tokenizer, example, said, task, spoken, reply)):
            return [math.inf]
    return task.scores(example, said)


def is_solved(
    task: Task, tokenizer: PreTrainedTokenizerBase, example: Example, completion: Mapping[str, Any]
) -> bool:
    turns = _turns_of(completion["tokens"], completion["turns"])
    return task.is_solved(example, [_text(tokenizer, spoken) for spoken, _ in turns])


def own_mask(turns: Sequence[int], num_tokens: int) -> list[int]:
    """1 for each token of the model, 0 for those that it was told."""
    if not turns:
        return [1] * num_tokens
    return [1 - index % 2 for index, length in enumerate(turns) for _ in range(length)]


def _turns_of(tokens: Sequence[int], turns: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """What the model said, and what it was told then, turn by turn; at last it was told nothing."""
    ends = list(itertools.accumulate(turns or [len(tokens)]))
    parts = [list(tokens[start:end]) for start, end in itertools.pairwise([0, *ends])]
    return list(zip(parts[::2], [*parts[1::2], []], strict=True))


def _each(written: Sequence[Written]) -> list[tuple[list[int], list[float | None]]]:
    return [one for group in written for one in zip(group.token_ids, group.logprobs, strict=True)]


def _goes_on(
    task: Task,
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
    task: Task,
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
