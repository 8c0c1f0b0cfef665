"""Tasks of several turns: the user's environment replies to the model until the dialogue is over.

`--dataset guess.py:Guess,highest=9` makes an environment by `Guess(highest=9)`, which has

    num_examples                the number of examples to train on, from number 0; held-out ones are numbered after them
    prompt(number)              the first message to the model, or a list of chat messages
    reply(number, said)         the reply to the model's turns so far, a list of texts; None: the dialogue is over
    reward(number, said)        from 0 to 1; 1 means solved

and, if they are not the defaults, `num_held_out` and `max_turns`. All of them must depend on their arguments only, so
that a learner can replay the dialogues of a rollout peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from diloco.errors import UserError
from diloco.rl.answers import Completion
from diloco.rl.own_code import finite, loaded, options_of
from diloco.rl.tasks import Example, Message, Reward, Task

T = TypeVar("T")
_NUM_HELD_OUT = 64
_MAX_TURNS = 8
_PARTS = ("num_examples", "prompt", "reply", "reward")


class EnvironmentTask(Task):
    """An environment as a task. Its completions are dialogues (rl/dialogues.py)."""

    def __init__(self, name: str, environment: Any) -> None:
        self._environment = environment
        num_examples = int(environment.num_examples)
        super().__init__(
            name=name,
            num_examples=num_examples,
            num_held_out=int(getattr(environment, "num_held_out", _NUM_HELD_OUT)),
            example=self._example,
            held_out=lambda index: self._example(num_examples + index),
            rewards=(Reward("reward", 1.0, self._of_a_text),),
            solved=self._of_a_text,
            max_turns=int(getattr(environment, "max_turns", _MAX_TURNS)),
        )

    def reply(self, example: Example, said: Sequence[str]) -> str | None:
        """The environment's reply; None if the dialogue is over. Raises UserError if the user's code fails."""
        reply = self._asked(lambda: self._environment.reply(example.data["number"], list(said)))
        return None if reply is None else str(reply)

    def reward(self, example: Example, said: Sequence[str]) -> float:
        """Raises UserError if the user's code fails."""
        value = self._asked(lambda: self._environment.reward(example.data["number"], list(said)))
        return finite(value, f"--dataset {self.name}: reward")

    def scores(self, example: Example, said: Sequence[str]) -> list[float]:
        return [self.reward(example, said)]

    def is_solved(self, example: Example, said: Sequence[str]) -> bool:
        return self.reward(example, said) >= 1.0

    def _example(self, index: int) -> Example:
        prompt = self._asked(lambda: self._environment.prompt(index))
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Example(messages, "", {"number": index})

    def _of_a_text(self, completion: Completion, example: Example) -> float:
        return self.reward(example, [completion.text])

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise UserError(f"--dataset {self.name} failed with {type(error).__name__}: {error}") from error


def named_of(name: str) -> str:
    """`guess.py:Guess` of `guess.py:Guess,highest=9`."""
    return name.partition(",")[0]


def open_environment(name: str) -> EnvironmentTask:
    """Raises UserError if there is no such environment, or it lacks a part."""
    _, *settings = name.split(",")
    options: Mapping[str, Any] = options_of(name, settings)
    made = loaded("--dataset", named_of(name))
    try:
        environment = made(**options)
    except Exception as error:
        raise UserError(f"--dataset {name} failed with {type(error).__name__}: {error}") from error
    if missing := [part for part in _PARTS if not hasattr(environment, part)]:
        raise UserError(f"--dataset {name} has no {missing[0]}; it needs {', '.join(_PARTS)}")
    return EnvironmentTask(name, environment)
