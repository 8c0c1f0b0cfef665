"""A reward of the user's own, as the tutorial writes it, and what is said of one that does not work."""

from __future__ import annotations

import re

import pytest

from diloco.errors import UserError
from diloco.options.flags import GrpoConfig
from diloco.rl.task_choice import check_task, open_task
from tests.support.commands import ROOT
from tests.support.rollouts import reward_of

TASK = "reasoning-gym:chain_sum,min_terms=1,max_terms=1,min_digits=1,max_digits=1"


def with_own(reward):
    return open_task(GrpoConfig(dataset=TASK, reward=reward), seed=0)


def test_the_reward_of_the_tutorial_pays_for_short_right_answers(tmp_path):
    text = (ROOT / "docs" / "tutorials" / "grpo.md").read_text()
    code = re.search(r"<!-- test: reward -->\n```python\n(.*?)```", text, re.DOTALL)
    assert code and len(code[1].splitlines()) <= 10
    (tmp_path / "rewards.py").write_text(code[1])
    task = with_own(f"{tmp_path}/rewards.py:short")
    example = task.example(0)
    answer = f"<SOLUTION>{example.gold}</SOLUTION>"
    assert [reward.name for reward in task.rewards] == ["short"]
    assert reward_of(task, answer, example) == pytest.approx(1.0 - 0.5 * len(answer) / 200)
    assert reward_of(task, answer + "x" * 500, example) == pytest.approx(0.5)
    assert reward_of(task, "<SOLUTION>no</SOLUTION>", example) == 0.0
    plain = open_task(GrpoConfig(dataset=TASK), seed=0)
    assert task.example(7) == plain.example(7) and task.held_out(7) == plain.held_out(7)


def test_a_module_of_the_users_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text("def one(completion, example): return True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = with_own("rewards_of_mine:one")
    assert reward_of(task, "anything", task.example(0)) == 1.0


def test_the_file_of_a_reward_may_have_dataclasses(tmp_path):
    """dataclasses looks up the module of a class whose annotations are strings."""
    code = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    code += "@dataclass\nclass Length:\n    tokens: int\n"
    (tmp_path / "lengths.py").write_text(code + "def one(completion, example): return Length(2).tokens\n")
    task = with_own(f"{tmp_path}/lengths.py:one")
    assert reward_of(task, "anything", task.example(0)) == 2.0


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "names nothing in a file or module; write --grpo.reward file.py:name"),
        ("nowhere.py:short", "there is no file nowhere.py"),
        ("no_such_package.rewards:short", "there is no module no_such_package.rewards"),
    ],
)
def test_a_reward_that_there_is_not_is_refused_before_anything_starts(name, says):
    with pytest.raises(UserError, match=says):
        check_task(GrpoConfig(dataset=TASK, reward=name))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_thing", "fails with ModuleNotFoundError: No module named 'no_such_thing'"),
        ("long = 3", "has no short that can be called"),
        (
            "def short(completion, example): return 1 / 0",
            "failed with ZeroDivisionError.*for the completion 'x'",
        ),
        (
            "def short(completion, example): return float('nan')",
            "returned nan; it must return a finite number",
        ),
        ("def short(completion, example): return None", "returned None"),
    ],
)
def test_a_reward_that_does_not_work_is_told_by_its_name(tmp_path, code, says):
    path = tmp_path / "rewards.py"
    path.write_text(code)
    with pytest.raises(UserError, match=rf"--grpo\.reward {path}:short.*{says}"):
        task = with_own(f"{path}:short")
        reward_of(task, "x", task.example(0))
