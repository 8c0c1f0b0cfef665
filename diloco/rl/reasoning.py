"""Tasks from the generators of reasoning-gym, which make any number of examples without a download."""

from __future__ import annotations

from typing import Any

from diloco.errors import UserError
from diloco.rl.answers import Completion, number_of, same_answer
from diloco.rl.own_code import options_of
from diloco.rl.tasks import SHORT_SYSTEM, Example, Reward, answered, conversation

PREFIX = "reasoning-gym"
DEFAULT_GENERATOR = "chain_sum"
_NUM_EXAMPLES = 1_000_000
_NUM_HELD_OUT = 1024
# Added to the seed. Generators use seed + index, so the offset keeps held-out examples apart from trained ones.
_HELD_OUT_SEED = 2**40


class GeneratorTask:
    """One generator. An example is a pure function of (generator, options, seed, index)."""

    num_examples = _NUM_EXAMPLES
    num_held_out = _NUM_HELD_OUT

    def __init__(self, name: str, trained: Any, held_out: Any) -> None:
        self.name = name
        self._trained, self._held_out = trained, held_out
        self.rewards: tuple[Reward, ...] = (
            Reward("correct", 0.9, self._correct),
            Reward("answer_tag", 0.1, answered),
        )

    def example(self, index: int) -> Example:
        return _example(self._trained[index])

    def held_out(self, index: int) -> Example:
        return _example(self._held_out[index])

    def is_solved(self, completion: Completion, example: Example) -> bool:
        return self._correct(completion, example) >= 1.0

    def _correct(self, completion: Completion, example: Example) -> float:
        """1 for the right answer; for answers that are not numbers, else the generator's score from 0 to 1."""
        if not completion.has_answer:
            return 0.0
        if same_answer(completion.answer, example.gold):
            return 1.0
        if number_of(example.gold) is not None:
            # The generator's score is not used: some generators score any text that contains the number.
            return 0.0
        score = float(self._trained.score_answer(completion.answer, example.data))
        return min(max(score, 0.0), 1.0)


def open_generator(name: str, *, seed: int) -> GeneratorTask:
    """Open `reasoning-gym:<generator>[,option=value...]`. Raises UserError for unknown generators and options."""
    generator, options = _parsed(name)
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(f"--dataset {name} needs reasoning-gym: pip install 'diloco[grpo]'") from error
    try:
        made = [
            reasoning_gym.create_dataset(generator, seed=start, size=size, **options)
            for start, size in ((seed, _NUM_EXAMPLES), (seed + _HELD_OUT_SEED, _NUM_HELD_OUT))
        ]
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise UserError(f"--dataset {name}: reasoning-gym cannot make that: {error}") from error
    return GeneratorTask(name, *made)


def _parsed(name: str) -> tuple[str, dict[str, Any]]:
    generator, *settings = name.removeprefix(PREFIX).removeprefix(":").split(",")
    return generator or DEFAULT_GENERATOR, options_of(name, settings)


def _example(entry: dict[str, Any]) -> Example:
    return Example(conversation(SHORT_SYSTEM, entry["question"]), str(entry["answer"]), entry)
