"""The tasks, on the real loading code: generators, and small data sets on disk in the form of Hugging Face's."""

from __future__ import annotations

import json

import pytest

from diloco.errors import UserError
from diloco.options.flags import GrpoConfig
from diloco.rl.answers import boxed, equivalent
from diloco.rl.task_choice import open_task
from tests.support.rollouts import reward_of
from tests.support.sandboxed import needs_bubblewrap

ROWS = {
    "gsm8k": {"question": "How many?", "answer": "First 1,000.\nThen 200 more.\n#### 1,200"},
    "math": {"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "level": "1", "type": "a"},
    "mbpp": {
        "text": "Write a function that adds.",
        "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"],
        "test_setup_code": "",
    },
}


def opened(name, *, seed=0):
    return open_task(GrpoConfig(dataset=name), seed=seed)


REASONED = "<think>so</think>"


@pytest.fixture
def task(tmp_path, monkeypatch):
    """`task(kind)`: that task, from a directory with one row to train on and one held out."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))

    def make(kind):
        directory = tmp_path / kind
        directory.mkdir()
        for split in ("train", "test"):
            (directory / f"{split}.jsonl").write_text(json.dumps(ROWS[kind]) + "\n")
        return opened(f"{kind}={directory}", seed=0)

    return make


def answer(text):
    return f"{REASONED}<SOLUTION>{text}</SOLUTION>"


def test_the_rewards_of_every_task_add_up_to_one():
    from diloco.rl.hub_tasks import HUB_TASKS

    for rewards in [kind.rewards for kind in HUB_TASKS.values()] + [opened("reasoning-gym", seed=1).rewards]:
        assert sum(reward.weight for reward in rewards) == pytest.approx(1.0)


@pytest.mark.parametrize("test_split", ['{"question": "How', ""], ids=["torn", "empty"])
def test_a_data_set_that_is_torn_or_empty_is_named_at_the_start(tmp_path, monkeypatch, test_split):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS["gsm8k"]) + "\n")
    (tmp_path / "test.jsonl").write_text(test_split)
    with pytest.raises(UserError, match="cannot be loaded"):
        opened(f"gsm8k={tmp_path}", seed=0)


@pytest.mark.parametrize("kind", ["gsm8k", "math", pytest.param("mbpp", marks=needs_bubblewrap)])
def test_empty_text_earns_nothing(task, kind):
    opened = task(kind)
    assert [reward_of(opened, text, opened.example(0)) for text in ("", " \n")] == [0.0, 0.0]


def test_gsm8k_compares_numbers_and_pays_for_form(task):
    gsm8k = task("gsm8k")
    example = gsm8k.held_out(0)
    assert example.gold == "1,200" and example.prompt[-1]["content"] == "How many?"
    assert reward_of(gsm8k, answer("1200.0"), example) == pytest.approx(1.0)
    assert reward_of(gsm8k, answer("1201"), example) == pytest.approx(0.4)
    assert reward_of(gsm8k, answer("1200") + " units", example) == pytest.approx(0.6 + 0.1 + 0.1)
    assert reward_of(gsm8k, "1200", example) == 0.0
    assert gsm8k.is_solved(example, ["<SOLUTION>1,200</SOLUTION>"])


def test_math_takes_any_form_of_the_same_value(task):
    math = task("math")
    example = math.example(0)
    assert example.gold == "\\frac{1}{2}"
    for text in ("0.5", "1/2", "\\frac12", "$\\boxed{0.50}$", "\\frac{2}{4}"):
        assert math.is_solved(example, [answer(text)]), text
    assert not math.is_solved(example, [answer("0.51")])
    assert reward_of(math, answer("x"), example) == pytest.approx(0.3)


def test_the_last_box_of_a_solution_counts_with_its_nested_braces():
    assert boxed("\\boxed{1} and then \\boxed{\\sqrt{a_{1}}}.") == "\\sqrt{a_{1}}"
    assert boxed("nothing") == "" and not equivalent("", "") and not equivalent("1", "")


@needs_bubblewrap
def test_mbpp_is_solved_by_code_that_passes_all_tests_and_pays_for_some(task):
    mbpp = task("mbpp")
    example = mbpp.example(0)
    assert "assert add(1, 2) == 3" in example.prompt[-1]["content"]
    right = answer("```python\ndef add(a, b):\n    return a + b\n```")
    part = answer("def add(a, b): return 0")
    assert reward_of(mbpp, right, example) == pytest.approx(1.0) and mbpp.is_solved(example, [right])
    assert reward_of(mbpp, part, example) == pytest.approx(0.7 * 2 / 3 + 0.3)
    assert not mbpp.is_solved(example, [part])
    assert reward_of(mbpp, answer("def add(a, b: return"), example) == pytest.approx(0.2)
    assert reward_of(mbpp, answer("import os; os._exit(0)"), example) == pytest.approx(0.3)


def test_generators_are_the_same_everywhere_and_hold_other_examples_out():
    first, again = (opened("reasoning-gym:chain_sum", seed=3) for _ in range(2))
    assert first.example(17) == again.example(17) != opened("reasoning-gym:chain_sum", seed=4).example(17)
    trained = {first.example(index).prompt[-1]["content"] for index in range(200)}
    held_out = {first.held_out(index).prompt[-1]["content"] for index in range(200)}
    assert len(trained & held_out) < 5
    example = first.example(0)
    assert reward_of(first, f"<SOLUTION>{example.gold}.0</SOLUTION>", example) == pytest.approx(1.0)
    assert reward_of(first, f"<SOLUTION>{example.gold}7</SOLUTION>", example) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("generator", "answer"), [("prime_factorization", "zzz"), ("boxnet", "-1"), ("game_of_life", "{}")]
)
def test_an_answer_that_a_generator_does_not_understand_scores_nothing(generator, answer):
    task = opened(f"reasoning-gym:{generator}", seed=1)
    assert task.scores(task.example(0), [f"<SOLUTION>{answer}</SOLUTION>"])[0] == 0.0


def test_generators_that_take_seeds_of_32_bits_have_held_out_examples():
    task = opened("reasoning-gym:pool_matrix", seed=42)
    assert task.held_out(0) != task.example(0)


def test_options_of_a_generator_are_part_of_its_name():
    task = opened("reasoning-gym:chain_sum,min_terms=1,max_terms=1,min_digits=1,max_digits=1", seed=0)
    assert all(0 <= int(task.example(index).gold) <= 9 for index in range(50))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gsm9k", "is no task"),
        ("reasoning-gym:nothing_such", "cannot create this dataset"),
        ("reasoning-gym:chain_sum,max_terms", "not option=value"),
        ("reasoning-gym:chain_sum,no_option=3", "cannot create this dataset"),
        ("gsm8k=/nowhere/at/all", "cannot be loaded"),
    ],
)
def test_a_task_that_there_is_not_is_refused_in_words(name, says):
    with pytest.raises(UserError, match=says):
        opened(name, seed=0)


def test_a_data_set_without_the_columns_of_its_task_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "a"}\n')
    with pytest.raises(UserError, match="no column answer"):
        opened(f"gsm8k={tmp_path}", seed=0)
