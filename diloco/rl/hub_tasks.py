"""The tasks gsm8k, math and mbpp, from Hugging Face or a directory in the same format, and reasoning-gym's generators.

The code of mbpp is rewarded by the share of tests that it passes in the sandbox. Generators make any number of examples
without a download.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from diloco.errors import UserError
from diloco.rl.answers import Completion, boxed, equivalent, number_of, same_answer
from diloco.rl.evaluated_answers import evaluates_answers, may_be_evaluated, time_limit
from diloco.rl.own_code import options_of
from diloco.rl.sandbox.run import Verdict, run_tests
from diloco.rl.tasks import (
    SHORT_SYSTEM,
    SYSTEM,
    Example,
    Reward,
    Task,
    answered,
    conversation,
    nothing_after,
    reasoned,
    strict,
)

Row = Mapping[str, Any]
log = logging.getLogger(__name__)
_FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_CODE_SYSTEM = SYSTEM.replace("your answer", "the Python code, without any explanation,")


@dataclass(frozen=True)
class _HubTaskSpec:
    path: str
    configuration: str | None
    columns: tuple[str, ...]
    read: Callable[[Row], Example]
    rewards: tuple[Reward, ...]
    """A completion that earns all of the first reward has solved the example."""


def open_hub_task(kind: str, directory: str | None = None) -> Task:
    """Open gsm8k, math or mbpp. Raises UserError if the data cannot be loaded or lacks the columns of the task."""
    known = HUB_TASKS[kind]
    splits = _loaded(directory or known.path, None if directory else known.configuration, kind)
    if "train" not in splits or "test" not in splits:
        raise UserError(f"--dataset {kind}: {directory or known.path} has no splits train and test")
    missing = sorted(set(known.columns) - set(splits["train"].column_names))
    if missing:
        raise UserError(f"--dataset {kind}: {directory or known.path} has no column {missing[0]}")
    train, test = splits["train"], splits["test"]
    return Task(
        name=kind,
        num_examples=len(train),
        num_held_out=len(test),
        example=lambda index: known.read(train[index]),
        held_out=lambda index: known.read(test[index]),
        rewards=known.rewards,
        solved=known.rewards[0].score,
    )


def _loaded(path: str, configuration: str | None, kind: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(path, configuration)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--dataset {kind}: {path} cannot be loaded ({reason}); name a directory with its train and test "
            f"files, --dataset {kind}=path/to/it"
        ) from error


def _gsm8k(row: Row) -> Example:
    gold = str(row["answer"]).rpartition("####")[2].strip()
    return Example(conversation(SYSTEM, row["question"]), gold)


def _math(row: Row) -> Example:
    return Example(conversation(SYSTEM, row["problem"]), boxed(str(row["solution"])))


def _mbpp(row: Row) -> Example:
    tests = [str(test) for test in row["test_list"]]
    imports = [str(line) for line in row.get("test_imports") or []]
    setup = "\n".join([*imports, str(row.get("test_setup_code") or "")]).strip()
    shown = "\n".join(tests)
    question = f"{row.get('text') or row.get('prompt')}\nThe code has to pass these tests:\n{shown}"
    return Example(conversation(_CODE_SYSTEM, question), "", {"tests": tests, "setup": setup})


def _same_number(completion: Completion, example: Example) -> float:
    return float(number_of(completion.answer) is not None and same_answer(completion.answer, example.gold))


def _equivalent(completion: Completion, example: Example) -> float:
    return float(completion.has_answer and equivalent(completion.answer, example.gold))


def _code_of(completion: Completion) -> str:
    """The code of an answer, without its Markdown fence if it has one."""
    match = _FENCE.search(completion.answer)
    return match[1] if match else completion.answer


def _compiles(completion: Completion, _example: Example) -> float:
    """1 if the answer parses as Python and is not empty, else 0."""
    try:
        tree = ast.parse(_code_of(completion))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.0
    return float(bool(tree.body))


def _pass_rate(completion: Completion, example: Example) -> float:
    """The share of the example's tests that pass. Code that does not parse is not run and fails all."""
    tests = tuple(example.data["tests"])
    if not tests or not _compiles(completion, example):
        return 0.0
    return _tested(_code_of(completion), tests, str(example.data.get("setup") or "")).num_passed / len(tests)


@lru_cache(maxsize=512)
def _tested(code: str, tests: tuple[str, ...], setup: str) -> Verdict:
    """Cached: completions of a group are often identical, and an evaluation judges each of them twice."""
    return run_tests(code, tests, setup=setup)


HUB_TASKS: dict[str, _HubTaskSpec] = {
    "gsm8k": _HubTaskSpec(
        path="openai/gsm8k",
        configuration="main",
        columns=("question", "answer"),
        read=_gsm8k,
        rewards=(
            Reward("exact", 0.6, _same_number),
            Reward("strict_format", 0.15, strict),
            Reward("thinking", 0.1, reasoned),
            Reward("answer_tag", 0.1, answered),
            Reward("no_trailing", 0.05, nothing_after),
        ),
    ),
    "math": _HubTaskSpec(
        path="DigitalLearningGmbH/MATH-lighteval",
        configuration="default",
        columns=("problem", "solution"),
        read=_math,
        rewards=(
            Reward("correct", 0.7, _equivalent),
            Reward("answer_tag", 0.15, answered),
            Reward("thinking", 0.1, reasoned),
            Reward("no_trailing", 0.05, nothing_after),
        ),
    ),
    "mbpp": _HubTaskSpec(
        path="google-research-datasets/mbpp",
        configuration="full",
        columns=("test_list",),
        read=_mbpp,
        rewards=(
            Reward("pass_rate", 0.7, _pass_rate),
            Reward("syntax", 0.1, _compiles),
            Reward("answer_tag", 0.1, answered),
            Reward("thinking", 0.1, reasoned),
        ),
    ),
}


PREFIX = "reasoning-gym"
DEFAULT_GENERATOR = "chain_sum"
_NUM_EXAMPLES = 1_000_000
_NUM_HELD_OUT = 1024
# Added to the seed. Generators use seed + index, so the offset keeps held-out examples apart from trained ones. Some
# generators take only seeds of 32 bits.
_HELD_OUT_SEED = 2**31
_SCORING_S = 5.0


def open_generator(name: str, *, seed: int) -> Task:
    """Open `reasoning-gym:<generator>[,option=value...]`. Raises UserError for unknown generators and options.

    An example is a pure function of (generator, options, seed, index).
    """
    generator, options = _parsed(name)
    import reasoning_gym

    try:
        trained, held_out = [
            reasoning_gym.create_dataset(generator, seed=start, size=size, **options)
            for start, size in ((seed, _NUM_EXAMPLES), (seed + _HELD_OUT_SEED, _NUM_HELD_OUT))
        ]
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise UserError(f"--dataset {name}: reasoning-gym cannot create this dataset: {error}") from error

    is_guarded = evaluates_answers(trained)

    def correct(completion: Completion, example: Example) -> float:
        """1 for the right answer; else 0 if the right answer is a number, or the generator's score from 0 to 1."""
        if not completion.has_answer:
            return 0.0
        if same_answer(completion.answer, example.gold):
            return 1.0
        if number_of(example.gold) is not None:
            # The generator's score is not used: some generators score any text that contains the number.
            return 0.0
        if is_guarded and not may_be_evaluated(completion.answer, example.gold):
            return 0.0
        try:
            with time_limit(_SCORING_S):
                score = float(trained.score_answer(completion.answer, example.data))
        except Exception as error:  # noqa: BLE001 - many scorers raise for answers of a form that they do not expect
            log.debug("%s does not understand %.100r: %s", name, completion.answer, error)
            return 0.0
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
