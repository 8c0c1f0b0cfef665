"""Which prompts are dealt: none twice in a pass, whoever comes and goes, and the same after a restart."""

from __future__ import annotations

from diloco.data.sampling import Block, PromptSchedule

DEAL = PromptSchedule(seed=5, steps_per_epoch=6, period=2, prompts_per_generation=4)


def epoch_of(rank, data_base):
    block = Block(epoch=0, world_rank=rank, data_base=data_base)
    return [n for step in range(0, 6, 2) for n in DEAL.numbers(block, step, num_examples=96)]


def test_no_prompt_is_dealt_twice_in_a_pass():
    dealt = [number for base in (0, 4) for rank in range(4) for number in epoch_of(rank, base)]
    assert sorted(dealt) == list(range(96))


def test_a_generation_is_the_same_from_every_step_that_it_serves():
    block = Block(epoch=3, world_rank=1, data_base=7)
    first, second = (DEAL.numbers(block, step, num_examples=50) for step in (2, 3))
    assert first == second != DEAL.numbers(block, 4, num_examples=50)


def test_another_seed_deals_other_prompts():
    block = Block(epoch=0, world_rank=0, data_base=0)
    other = PromptSchedule(seed=6, steps_per_epoch=6, period=2, prompts_per_generation=4)
    assert DEAL.numbers(block, 0, num_examples=10_000) != other.numbers(block, 0, num_examples=10_000)
