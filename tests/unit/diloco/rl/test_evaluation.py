from __future__ import annotations

import itertools

import pytest

from benchmarks.format_model import bare_model
from diloco.data.tokenizer import load_tokenizer
from diloco.options.flags import GrpoConfig
from diloco.rl.evaluation import means, measured, pass_at_k
from diloco.rl.sampling import token_ids
from diloco.rl.server_client import Written
from diloco.rl.task_choice import open_task


@pytest.mark.parametrize(("samples", "solved", "k"), [(5, 2, 1), (5, 2, 3), (6, 1, 6), (4, 0, 2), (4, 4, 2)])
def test_pass_at_k_is_the_share_of_choices_of_k_that_hold_a_solved_one(samples, solved, k):
    choices = list(itertools.combinations(range(samples), k))
    share = sum(any(one < solved for one in choice) for choice in choices) / len(choices)
    assert pass_at_k(samples, solved, k) == pytest.approx(share)


def test_an_impossible_pass_at_k_is_refused():
    with pytest.raises(ValueError, match="pass@6"):
        pass_at_k(5, 1, 6)


def test_an_evaluation_counts_solved_completions_of_each_prompt(tmp_path):
    task = open_task(GrpoConfig(dataset="reasoning-gym:chain_sum"), seed=0)
    tokenizer = load_tokenizer(str(bare_model(tmp_path / "model")))
    examples = [task.held_out(index) for index in range(2)]

    def complete(prompts, count, sampling, seed):
        assert prompts == token_ids(tokenizer, [example.prompt for example in examples])
        assert (sampling.max_tokens, seed) == (50, 1)
        right = [
            tokenizer(f"<SOLUTION>{example.gold}</SOLUTION>", add_special_tokens=False)["input_ids"]
            for example in examples
        ]
        empty = [tokenizer.eos_token_id]
        ids = [[right[0]] * count, [right[1], *[empty] * (count - 1)]]
        return [Written(one, [[-1.0] * len(tokens) for tokens in one]) for one in ids]

    figures = measured(task, tokenizer, examples, complete, samples=4, max_tokens=50, seed=1)
    assert [one["reward"] for one in figures] == pytest.approx([1.0, 1 / 4])
    assert means(figures) == pytest.approx({"reward": 5 / 8, "pass_at_1": 5 / 8, "pass_at_4": 1.0})
