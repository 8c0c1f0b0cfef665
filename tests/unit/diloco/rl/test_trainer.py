from __future__ import annotations

import pytest

from diloco.options.flags import GrpoConfig
from diloco.rl.task_choice import open_task
from diloco.rl.tasks import Example
from diloco.rl.trainer import reward_functions


def test_each_component_is_a_function_of_its_own_name_for_trl():
    task = open_task(GrpoConfig(dataset="reasoning-gym:chain_sum"), seed=0)
    example: Example = task.example(0)
    completions = [
        [{"role": "assistant", "content": text}] for text in (f"<SOLUTION>{example.gold}</SOLUTION>", "")
    ]
    functions = reward_functions(task)
    assert [function.__name__ for function in functions] == ["correct", "answer_tag"]
    for _ in range(2):
        found = [
            function(completions=completions, example=[example] * 2, prompts=None) for function in functions
        ]
        assert found == [[pytest.approx(1.0), 0.0], [1.0, 0.0]]


def test_completions_that_were_judged_elsewhere_are_not_judged_again():
    task = open_task(GrpoConfig(dataset="reasoning-gym:chain_sum"), seed=0)
    completions = [[{"role": "assistant", "content": "wrong"}]] * 2
    judged = [[0.25, 0.5], [1.0, 0.75]]
    found = [
        function(completions=completions, example=[task.example(0)] * 2, judged=judged)
        for function in reward_functions(task)
    ]
    assert found == [[0.25, 1.0], [0.5, 0.75]]
