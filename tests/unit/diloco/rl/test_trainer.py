from __future__ import annotations

import pytest

from benchmarks.format_model import bare_model
from diloco.data.tokenizer import load_tokenizer
from diloco.options.flags import GrpoConfig
from diloco.rl.task_choice import open_task
from diloco.rl.tasks import Example
from diloco.rl.trainer import left_padded, reward_functions, token_ids


def test_prompts_of_unlike_lengths_end_where_generation_begins():
    ids, mask = left_padded([[5, 6, 7], [8]], 0)
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_a_prompt_ends_with_the_invitation_to_answer(tmp_path):
    tokenizer = load_tokenizer(str(bare_model(tmp_path / "model")))
    [ids] = token_ids(tokenizer, [[{"role": "user", "content": "Hi"}]])
    assert bytes(ids) == b"user: Hi\nassistant: "


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
