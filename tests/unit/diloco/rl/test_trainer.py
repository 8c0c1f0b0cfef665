from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.data.sampling import PromptSchedule
from diloco.options.flags import GrpoConfig
from diloco.options.trainer import TrainConfig, shared_values
from diloco.rl.task_choice import open_task
from diloco.rl.trainer import batches_of, placeholders, reward_functions
from peers.core.schedule import Schedule


def test_each_component_is_a_function_of_its_own_name_that_hands_trl_the_scores_of_the_rows():
    task = open_task(GrpoConfig(dataset="reasoning-gym:chain_sum"), seed=0)
    functions = reward_functions(task)
    assert [function.__name__ for function in functions] == ["correct", "answer_tag"]
    scores = [[0.25, 0.5], [1.0, 0.75]]
    found = [function(completions=[None] * 2, prompts=None, scores=scores) for function in functions]
    assert found == [[0.25, 1.0], [0.5, 0.75]]


@pytest.mark.parametrize(
    ("num_ranks", "per_device", "grpo"),
    [
        (1, 8, {}),
        (2, 4, {"num_generations": 4}),
        (4, 2, {"num_generations": 2, "steps_per_generation": 1}),
        (1, 4, {"num_generations": 2, "steps_per_generation": 12, "num_iterations": 2}),
    ],
)
def test_the_swarm_advances_by_the_prompts_that_a_peer_trains_in_an_epoch(num_ranks, per_device, grpo):
    config = TrainConfig(mode="grpo", total_batch_size=16, per_device_train_batch_size=per_device)
    config = replace(config, grpo=replace(config.grpo, **grpo), hv=replace(config.hv, local_steps=12))
    size, batches_per_step, batches = batches_of(config, num_ranks)
    prompts = PromptSchedule(
        seed=0,
        steps_per_epoch=12,
        batches_per_step=batches_per_step,
        batches_per_generation=batches * config.grpo.num_iterations,
        prompts_per_generation=size * batches * num_ranks // config.grpo.num_generations,
    )
    assert Schedule.of(shared_values(config)).samples_per_block == prompts.prompts_per_block > 0


@pytest.mark.parametrize(("per_step", "per_generation"), [(1, 1), (4, 1), (6, 6), (6, 4), (6, 12), (96, 5)])
def test_a_pass_over_the_placeholders_ends_with_a_whole_step(per_step, per_generation):
    """After a shorter step, batches would no longer be counted as in the schedule of prompts."""
    prompts = PromptSchedule(
        seed=0,
        steps_per_epoch=30,
        batches_per_step=per_step,
        batches_per_generation=per_generation,
        prompts_per_generation=2,
    )
    num_generations = len(placeholders(prompts)) // 2
    assert num_generations >= 64 and num_generations * per_generation % per_step == 0
