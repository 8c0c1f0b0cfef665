"""Judged completions of a task, as tokens: the model's text, or a dialogue of the model with an environment.

All completions for training and evaluation are made here, by learners and by rollout peers. Only the model's tokens are
trained on. `turns` has the number of tokens of each turn of a dialogue: the model's, the environment's, the model's,
and so on; the last turn is the model's.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase

from diloco.rl.sampling import token_ids
from diloco.rl.server_client import Sampling, Written
from diloco.rl.tasks import Example, Message, Task

T = TypeVar("T")
log = logging.getLogger(__name__)

Complete = Callable[[Sequence[list[int]], int, Sampling, int], list[Written]]
"""(prompts, completions of each, sampling, seed) -> completions by the newest weights."""
_NO_REPLY = "\ue001"
"""Stands for the reply of an environment that ends its process: a private-use character."""
_SAID = "\ue000"
"""Placeholder for the model's turn in a rendered template, to find the text after it: a private-use character."""


@dataclass
class _Dialogue:
    example: Example
    prompt: list[int]
    room: int
    """Number of tokens that may still be added."""
    messages: list[Message]
    """The conversation before the model's last turn."""
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

    Each has log-probabilities and scores, and `turns` if there was more than one.
    """
    prompts = token_ids(tokenizer, [example.prompt for example in examples])
    every = [
        _Dialogue(example, prompt, sampling.most_tokens, list(example.prompt))
        for example, prompt in zip(examples, prompts, strict=True)
        for _ in range(count)
    ]
    written, talking = complete(prompts, count, sampling, seed), every
    for turn in range(1, task.max_turns + 1):
        talking = [
            dialogue
            for dialogue, one in zip(talking, _each(written), strict=True)
            if _speaks(tokenizer, dialogue, *one)
        ]
        if turn == task.max_turns:
            break
        replies = task.pool.each("reply", task.reply, [(one.example, one.said) for one in talking])
        talking = [
            dialogue
            for dialogue, reply in zip(talking, replies, strict=True)
            if _hears(tokenizer, dialogue, reply)
        ]
        if not talking:
            break
        rest = replace(sampling, max_tokens=tuple(dialogue.room for dialogue in talking))
        written = complete([dialogue.prompt + dialogue.tokens for dialogue in talking], 1, rest, seed + turn)
    scores = task.pool.each("scores", task.scores, [(one.example, one.said) for one in every])
    found = [
        {
            "tokens": one.tokens,
            "logprobs": one.logprobs,
            "turns": one.turns if len(one.turns) > 1 else [],
            "scores": of,
        }
        for one, of in zip(every, scores, strict=True)
    ]
    return [found[start : start + count] for start in range(0, len(found), count)]


def judged_again(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    completions: Sequence[tuple[int, Sequence[int], Sequence[int]]],
) -> list[list[float]]:
    """The scores that rollout peers should have found for these completions, each an example's number, tokens, turns.

    They are infinite for a completion that cannot be judged, or is impossible, because the environment would not have
    given the replies in it. There are none if judging it ends the process: this machine may lack memory.
    """

    def reply(example: Example, said: Sequence[str]) -> str | None:
        return _judged_at_all(lambda: task.reply(example, said))

    def scores(example: Example, said: Sequence[str]) -> list[float]:
        return _judged_at_all(lambda: task.scores(example, said)) or [math.inf]

    talks = [_judged_at_all(partial(_said_by, task, tokenizer, *one)) for one in completions]
    asked = [
        (talk.example, talk.said[:number])
        for talk in filter(None, talks)
        for number, (_, told) in enumerate(talk.turns, 1)
        if told
    ]
    replies: list[str | None] = task.pool.each("reply", reply, asked, no_verdict=_NO_REPLY)
    each = iter(replies)
    heard = [_hears_the_same(tokenizer, talk, each) if talk else False for talk in talks]
    sound = [
        (talk.example, talk.said) for talk, is_same in zip(talks, heard, strict=True) if talk and is_same
    ]
    found = iter(task.pool.each("scores", scores, sound, no_verdict=list[float]()))
    return [next(found) if is_same else [] if is_same is None else [math.inf] for is_same in heard]


def _judged_at_all(action: Callable[[], T]) -> T | None:
    """None if it fails: no completion of a rollout peer may end a learner."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        log.warning("a completion of a rollout peer cannot be judged: %s", error)
        return None


class _Talk(NamedTuple):
    example: Example
    turns: list[tuple[list[int], list[int]]]
    """The tokens of each turn of the model, and of the reply to it."""
    said: list[str]
    """The model's turns as texts."""


def _said_by(
    task: Task, tokenizer: PreTrainedTokenizerBase, number: int, tokens: Sequence[int], turns: Sequence[int]
) -> _Talk | None:
    """None if it has more turns than the task allows."""
    talk = _turns_of(tokens, turns)
    if len(talk) > task.max_turns:
        return None
    return _Talk(task.example(number), talk, [_text(tokenizer, spoken) for spoken, _ in talk])


def _hears_the_same(
    tokenizer: PreTrainedTokenizerBase, talk: _Talk, replies: Iterator[str | None]
) -> bool | None:
    """Whether the environment's replies, one for each in the talk, are those in the talk; None if it gives no reply,
    but ends its process."""
    messages, is_same, has_ended = list(talk.example.prompt), True, False
    for (spoken, told), said in zip(talk.turns, talk.said, strict=True):
        if told:
            reply = next(replies)
            has_ended |= reply == _NO_REPLY
            # A reply made of what the peer said may not even be text that a tokenizer takes.
            is_same &= reply is not None and told == _judged_at_all(
                partial(_told, tokenizer, messages, spoken, reply)
            )
            messages += _exchange(said, reply or "")
    return None if has_ended else is_same


def said_in(tokenizer: PreTrainedTokenizerBase, completion: Mapping[str, Any]) -> list[str]:
    """The texts of the model's turns."""
    return [_text(tokenizer, spoken) for spoken, _ in _turns_of(completion["tokens"], completion["turns"])]


def own_mask(turns: Sequence[int], num_tokens: int) -> list[int]:
    """1 for each token of the model, 0 for each token of the environment."""
    if not turns:
        return [1] * num_tokens
    return [1 - index % 2 for index, length in enumerate(turns) for _ in range(length)]


def _turns_of(tokens: Sequence[int], turns: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Each turn of the model with the environment's reply to it; the last reply is empty."""
    ends = list(itertools.accumulate(turns or [len(tokens)]))
    parts = [list(tokens[start:end]) for start, end in itertools.pairwise([0, *ends])]
    return list(zip(parts[::2], [*parts[1::2], []], strict=True))


def _each(written: Sequence[Written]) -> list[tuple[list[int], list[float | None]]]:
    return [one for group in written for one in zip(group.token_ids, group.logprobs, strict=True)]


def _speaks(
    tokenizer: PreTrainedTokenizerBase,
    dialogue: _Dialogue,
    tokens: list[int],
    logprobs: list[float | None],
) -> bool:
    """Add the model's turn. Returns False if it was cut off."""
    # transformers generates a batch with the limit of the dialogue that has the most room, so this may be too long.
    is_cut_off = len(tokens) >= dialogue.room and tokens[dialogue.room - 1] != tokenizer.eos_token_id
    spoken = tokens[: dialogue.room]
    dialogue.append(spoken, logprobs[: dialogue.room])
    dialogue.said.append(_text(tokenizer, spoken))
    return not is_cut_off


def _hears(tokenizer: PreTrainedTokenizerBase, dialogue: _Dialogue, reply: str | None) -> bool:
    """Add the environment's reply. Returns False if the dialogue is over."""
    if reply is None:
        return False
    told = _told(tokenizer, dialogue.messages, dialogue.tokens, reply)
    if not told or len(told) >= dialogue.room:
        return False
    dialogue.append(told, [0.0] * len(told))
    dialogue.messages += _exchange(dialogue.said[-1], reply)
    return True


def _exchange(said: str, reply: str) -> list[Message]:
    return [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]


def _told(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[Message], tokens: Sequence[int], reply: str
) -> list[int]:
    """The tokens between the model's last turn, which `tokens` end with, and its next one, by the chat template."""
    messages = [*before, *_exchange(_SAID, reply)]
    rendered: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = list(tokenizer(rendered.rpartition(_SAID)[2], add_special_tokens=False)["input_ids"])
    # The model and the template may both end the model's turn with eos.
    repeats_end = bool(ids) and tokens[-1] == tokenizer.eos_token_id == ids[0]
    return ids[1:] if repeats_end else ids


def _text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
