"""The tasks gsm8k, math and mbpp, from Hugging Face or from a directory in the same format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diloco.errors import UserError
from diloco.rl.answers import Completion, number_of, same_answer
from diloco.rl.code_rewards import code_rewards, passes_all
from diloco.rl.math_answers import boxed, equivalent
from diloco.rl.tasks import (
    SYSTEM,
    Example,
    Reward,
    answered,
    conversation,
    nothing_after,
    reasoned,
    strict,
)

Row = Mapping[str, Any]
_CODE_SYSTEM = SYSTEM.replace("your answer", "the Python code, without any explanation,")


@dataclass
class HubTask:
    """A finite data set: trains on the training split and holds out the test split."""

    name: str
    rewards: tuple[Reward, ...]
    solved: Callable[[Completion, Example], bool]
    read: Callable[[Row], Example]
    train: Any
    test: Any

    @property
    def num_examples(self) -> int:
        return len(self.train)

    @property
    def num_held_out(self) -> int:
        return len(self.test)

    def example(self, index: int) -> Example:
        return self.read(self.train[index])

    def held_out(self, index: int) -> Example:
        return self.read(self.test[index])

    def is_solved(self, completion: Completion, example: Example) -> bool:
        return self.solved(completion, example)


@dataclass(frozen=True)
class _HubTaskSpec:
    path: str
    configuration: str | None
    columns: tuple[str, ...]
    read: Callable[[Row], Example]
    rewards: tuple[Reward, ...]
    solved: Callable[[Completion, Example], bool]


def open_hub_task(kind: str, directory: str | None = None) -> HubTask:
    """Open gsm8k, math or mbpp. Raises UserError if the data cannot be loaded or lacks the columns of the task."""
    known = HUB_TASKS[kind]
    splits = _loaded(directory or known.path, None if directory else known.configuration, kind)
    if "train" not in splits or "test" not in splits:
        raise UserError(f"--dataset {kind}: {directory or known.path} has no splits train and test")
    missing = sorted(set(known.columns) - set(splits["train"].column_names))
    if missing:
        raise UserError(f"--dataset {kind}: {directory or known.path} has no column {missing[0]}")
    return HubTask(kind, known.rewards, known.solved, known.read, splits["train"], splits["test"])


def _loaded(path: str, configuration: str | None, kind: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--dataset {kind} comes from Hugging Face; pip install 'diloco[grpo]' reads it"
        ) from error
    try:
        return datasets.load_dataset(path, configuration)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--dataset {kind}: {path} is not to be had ({reason}); name a directory with its train and test files, "
            f"--dataset {kind}=path/to/it"
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
        solved=lambda completion, example: _same_number(completion, example) == 1.0,
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
        solved=lambda completion, example: _equivalent(completion, example) == 1.0,
    ),
    "mbpp": _HubTaskSpec(
        path="google-research-datasets/mbpp",
        configuration="full",
        columns=("test_list",),
        read=_mbpp,
        rewards=code_rewards(),
        solved=passes_all,
    ),
}
