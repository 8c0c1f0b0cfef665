"""Chooses the prompts of a generation, as a function of (seed, epoch, world rank, data_base, local step) only.

As in pretraining there is no read position to save, and no two peers get the same prompt in the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diloco.data.sampling import Block, windows_of
from diloco.rl.tasks import Example, Task


@dataclass(frozen=True, kw_only=True)
class PromptSchedule:
    """How the prompts of a peer's block are divided into generations."""

    seed: int
    steps_per_epoch: int
    period: int
    """Inner steps per generation."""
    prompts_per_generation: int
    """Distinct prompts, over all ranks."""

    @property
    def prompts_per_block(self) -> int:
        return -(-self.steps_per_epoch // self.period) * self.prompts_per_generation

    def numbers(self, block: Block, local_step: int, *, num_examples: int) -> list[int]:
        """The example numbers of the generation that serves this local step of the block's epoch."""
        first = min(local_step, self.steps_per_epoch - 1) // self.period * self.prompts_per_generation
        offsets = np.arange(first, first + self.prompts_per_generation, dtype=np.int64)
        indices = block.indices(offsets, self.prompts_per_block)
        return [int(number) for number in windows_of(indices, num_windows=num_examples, seed=self.seed)]


def held_out_examples(task: Task, count: int) -> list[Example]:
    return [task.held_out(index) for index in range(min(count, task.num_held_out))]
