from __future__ import annotations

from diloco.options.flags import GrpoConfig
from diloco.rl.task_choice import open_task
from diloco.rl.trainer import reward_functions


def test_each_component_is_a_function_of_its_own_name_that_hands_trl_the_scores_of_the_rows():
    task = open_task(GrpoConfig(dataset="reasoning-gym:chain_sum"), seed=0)
    functions = reward_functions(task)
    assert [function.__name__ for function in functions] == ["correct", "answer_tag"]
    scores = [[0.25, 0.5], [1.0, 0.75]]
    found = [function(completions=[None] * 2, prompts=None, scores=scores) for function in functions]
    assert found == [[0.25, 1.0], [0.5, 0.75]]
