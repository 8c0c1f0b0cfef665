"""Answers that scorers of reasoning-gym evaluate as Python."""

from __future__ import annotations

import signal

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from diloco.rl import hub_tasks
from diloco.rl.evaluated_answers import evaluates_answers, may_be_evaluated
from diloco.rl.hub_tasks import open_generator

EVALUATE = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)


def test_all_generators_are_known_whose_scorers_evaluate_answers():
    found = {name for name, (made, _) in DATASETS.items() if evaluates_answers(made.__new__(made))}
    # A composite passes answers to other scorers, and no flag can select it.
    assert found - {"composite"} == set(EVALUATE)


@pytest.mark.parametrize("generator", EVALUATE)
def test_an_answer_is_not_run_and_the_right_one_still_scores(generator, tmp_path):
    task = open_generator(f"reasoning-gym:{generator}", seed=1)
    example, mark = task.example(0), tmp_path / "was-run"
    code = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for answer in (code, f"[{code}]", repr(code), f"[{code!r}]"):
        assert task.scores(example, [f"<SOLUTION>{answer}</SOLUTION>"])[0] == 0.0
    assert not mark.exists()
    assert task.scores(example, [f"<SOLUTION>{example.gold}</SOLUTION>"])[0] == 1.0


def test_right_answers_in_other_forms_are_evaluated():
    made = reasoning_gym.create_dataset("n_queens", seed=1, size=1)[0]
    task = open_generator("reasoning-gym:n_queens", seed=1)
    board = [line.split() for line in made["answer"].splitlines()]
    assert task.scores(task.example(0), [f"<SOLUTION>{board}</SOLUTION>"])[0] == 0.5
    for answer in (
        "_ Q\nQ _",
        "[[0, 1], [-2, 3.5]]",
        "C + 2*x**9/3 - x",
        "2*(3*x + 1)**(3/2)/9 + exp(-2*x**2)*sin(x)",
    ):
        assert may_be_evaluated(answer, "x**2 + sin(x) + C"), answer


@pytest.mark.parametrize(
    "answer",
    [
        "9**9**9",
        "((9**9)**9)**9",
        "9**(99999999*x/x)",
        "9**(1/(1 - 99/100))",
        "x**100",
        "exp(exp(exp(100)))",
        "1e999999999",
        "1e-999999999",
        "factorial(99999)",
        "'ab'",
        "'a' + 'b'",
        "['a' 'b']",
        "[1]*9",
        "[*'a']",
        "[x for x in [1]]",
        "f'{x}'",
        "x.diff",
        "S",
        "y",
        "lambda: 1",
        "24 # 3 8",
        "\x00",
        "(" * 500,
        "[" * 5000,
        "-" * 5000 + "1",
    ],
)
def test_everything_else_is_not(answer):
    assert not may_be_evaluated(answer, "x**2 + sin(x) + C")


def test_functions_are_only_evaluated_where_the_right_answer_has_some():
    assert not may_be_evaluated("log(" * 9 + "2" + ")" * 9, "94*4 - 61 - 6")
    assert may_be_evaluated("log(2)", "exp(x)")


def test_an_answer_that_takes_for_ever_to_simplify_scores_0(monkeypatch):
    monkeypatch.setattr(hub_tasks, "_SCORING_S", 0.2)
    task = open_generator("reasoning-gym:intermediate_integration", seed=1)
    example = next(one for one in map(task.example, range(100)) if "sin" in one.gold)
    answer = "(x + sin(x) + log(x))**20*(x - cos(x))**20"
    assert may_be_evaluated(answer, example.gold)
    assert task.scores(example, [f"<SOLUTION>{answer}</SOLUTION>"])[0] == 0.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
