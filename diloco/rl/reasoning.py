"""Tasks from the generators of reasoning-gym, which make any number of examples without a download."""

from __future__ import annotations

from typing import Any

from diloco.errors import UserError
from diloco.rl.answers import Completion, number_of, same_answer
from diloco.rl.own_code import options_of
from diloco.rl.tasks import SHORT_SYSTEM, Example, Reward, Task, answered, conversation

PREFIX = "reasoning-gym"
DEFAULT_GENERATOR = "chain_sum"
_NUM_EXAMPLES = 1_000_000
_NUM_HELD_OUT = 1024
# Added to the seed. Generators use seed + index, so the offset keeps held-out examples apart from trained ones.
_HELD_OUT_SEED = 2**40


def open_generator(name: str, *, seed: int) -> Task:
    """Open `reasoning-gym:<generator>[,option=value...]`. Raises UserError for unknown generators and options.

    An example is a pure function of (generator, options, seed, index).
    """
    generator, options = _parsed(name)
    try:
        import reasoning_gym
    except ImportError as error:
        raise UserError(f"--dataset {name} needs reasoning-gym: pip install 'diloco[grpo]'") from error
    try:
        trained, held_out = [
            reasoning_gym.create_dataset(generator, seed=start, size=size, **options)
            for start, size in ((seed, _NUM_EXAMPLES), (seed + _HELD_OUT_SEED, _NUM_HELD_OUT))
        ]
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise UserError(f"--dataset {name}: reasoning-gym cannot make that: {error}") from error

    def correct(completion: Completion, example: Example) -> float:
        """1 for the right answer; for answers that are not numbers, else the generator's score from 0 to 1."""
        if not completion.has_answer:
            return 0.0
        if same_answer(completion.answer, example.gold):
            return 1.0
        if number_of(example.gold) is not None:
            # The generator's score is not used: some generators score any text that contains the number.
            return 0.0
        score = float(trained.score_answer(completion.answer, example.data))
        return min(max(score, 0.0), 1.0)

    return Task(
        name=name,
        num_examples=_NUM_EXAMPLES,
        num_held_out=_NUM_HELD_OUT,
        example=lambda index: _example(trained[index]),
        held_out=lambda index: _example(held_out[index]),
        rewards=(Reward("correct", 0.9, correct), Reward("answer_tag", 0.1, answered)),
        solved=correct,
    )


def _parsed(name: str) -> tuple[str, dict[str, Any]]:
    generator, *settings = name.removeprefix(PREFIX).removeprefix(":").split(",")
    return generator or DEFAULT_GENERATOR, options_of(name, settings)


def _example(entry: dict[str, Any]) -> Example:
    return Example(conversation(SHORT_SYSTEM, entry["question"]), str(entry["answer"]), entry)
