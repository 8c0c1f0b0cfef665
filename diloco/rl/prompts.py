"""Which prompts a generation is about: a function of (seed, epoch, world rank, data_base, local step) alone.

As in pretraining there is no position to save or restore, and no prompt is given to two peers in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco.data.sampling import Block, windows_of
from diloco.outer.diloco import Diloco
from diloco.rl.tasks import Example, Task


@dataclass(frozen=True, kw_only=True)
class Deal:
    """How a peer's generations follow each other."""

    seed: int
    steps_per_epoch: int
    period: int
    """Inner steps that a generation serves."""
    prompts_per_generation: int
    """Unlike ones, of all ranks together."""

    @property
    def prompts_per_block(self) -> int:
        return -(-self.steps_per_epoch // self.period) * self.prompts_per_generation

    def numbers(self, block: Block, local_step: int, *, num_examples: int) -> list[int]:
        """The numbers of the examples that are generated before this local step of the block's epoch."""
        first = min(local_step, self.steps_per_epoch - 1) // self.period * self.prompts_per_generation
        offsets = np.arange(first, first + self.prompts_per_generation, dtype=np.int64)
        indices = block.indices(offsets, self.prompts_per_block)
        return [int(number) for number in windows_of(indices, num_windows=num_examples, seed=self.seed)]


def place_of(outer: Diloco, step: int, *, steps_per_epoch: int) -> tuple[Block, int]:
    """The block that a trainer takes its prompts from before inner step `step`, and the local step in it."""
    if outer.world_rank is not None:
        position = outer.position
        block = Block(epoch=position.epoch, world_rank=outer.world_rank, data_base=position.data_base)
        return block, position.local_step
    # Alone there are no epochs; blocks follow one another as if there were.
    number, local_step = divmod(step, steps_per_epoch)
    return Block(epoch=number, world_rank=0, data_base=number), local_step


def rows_of(task: Task, numbers: Sequence[int], *, copies: int) -> list[dict[str, object]]:
    """What TRL wants: each prompt as many times as it is to be completed, one after the other."""
    examples = [task.example(number) for number in numbers]
    return [{"prompt": example.prompt, "example": example} for example in examples for _ in range(copies)]


def held_out_examples(task: Task, count: int) -> list[Example]:
    return [task.held_out(index) for index in range(min(count, task.num_held_out))]
