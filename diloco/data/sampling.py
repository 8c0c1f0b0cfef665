"""Assigns samples to peers and steps by pure integer arithmetic, so the result does not depend on machine or numpy.

Sample indices form one infinite global sequence. In an epoch the peer of world rank r owns the block of indices
[data_base + r * B, data_base + (r + 1) * B), where B is the number of samples that a peer trains per epoch. A commit
advances data_base by the number of samples assigned, so no index is assigned twice, even if the run is resumed with
another batch size. With N windows in the dataset, index i is window `permuted(i mod N)` of pass i div N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from diloco.outer.diloco import Diloco

_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class Block:
    """The samples of one peer in one epoch."""

    epoch: int
    world_rank: int
    data_base: int
    """Number of samples assigned in all earlier epochs."""

    def indices(self, offsets: np.ndarray, samples_per_block: int) -> np.ndarray:
        """Global sample indices (int64) of offsets within the block."""
        check_offsets(offsets, samples_per_block)
        return self.data_base + self.world_rank * samples_per_block + offsets


def place_of(outer: Diloco, step: int, *, steps_per_epoch: int, samples_per_block: int) -> tuple[Block, int]:
    """The block from which this peer's next inner step, `step`, takes its samples, and the local step in it."""
    position = outer.position
    if outer.world_rank is not None:
        data_base = position.data_base * (1 if outer.counts_samples else samples_per_block)
        block = Block(epoch=position.epoch, world_rank=outer.world_rank, data_base=data_base)
        return block, position.local_step
    # Without a swarm there are no epochs: use one block for every `steps_per_epoch` steps.
    number, local_step = divmod(step, steps_per_epoch)
    return Block(epoch=number, world_rank=0, data_base=number * samples_per_block), local_step


def check_offsets(offsets: np.ndarray, samples_per_block: int) -> None:
    """Raise ValueError for an offset outside the block, which would be another peer's sample."""
    if len(offsets) and (offsets.min() < 0 or offsets.max() >= samples_per_block):
        raise ValueError(
            f"offsets {offsets.min()}..{offsets.max()} leave a block of {samples_per_block} samples"
        )


def step_offsets(local_step: int, *, total_batch_size: int, rank: int = 0, num_ranks: int = 1) -> np.ndarray:
    """Offsets (int64) of the samples of one rank in a local step: every num_ranks-th of the peer's batch."""
    first = local_step * total_batch_size
    return np.arange(first + rank, first + total_batch_size, num_ranks, dtype=np.int64)


def windows_of(indices: np.ndarray, *, num_windows: int, seed: int) -> np.ndarray:
    """Window numbers (int64) of global sample indices. Each pass has every window once, in an order of its own."""
    passes, places = np.divmod(indices.astype(np.uint64), np.uint64(num_windows))
    return permuted(places, size=num_windows, seed=seed, passes=passes)


def permuted(places: np.ndarray, *, size: int, seed: int, passes: np.ndarray) -> np.ndarray:
    """A pseudo-random permutation of range(size) for each (seed, pass), in O(1) memory: a cycle-walking Feistel cipher.

    `places` and `passes` are uint64 arrays of the same shape. numpy's generators are not used, because they may change
    between versions and all peers must agree.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = scrambled(np.uint64(seed), passes)
    values = _feistel(places, keys, half)
    # Cycle walking: values outside range(size) are encrypted again. The domain is at most four times too large.
    while (outside := values >= np.uint64(size)).any():
        values[outside] = _feistel(values[outside], keys[outside], half)
    return values.astype(np.int64)


def random_tokens(indices: np.ndarray, *, length: int, vocab_size: int, seed: int) -> np.ndarray:
    """Random ids, int64 [len(indices), length], each a pure function of (seed, sample index, position)."""
    rows = scrambled(np.uint64(seed), indices.astype(np.uint64))[:, None]
    hashes = scrambled(rows, np.arange(length, dtype=np.uint64)[None, :])
    return (hashes % np.uint64(vocab_size)).astype(np.int64)


def scrambled(key: np.uint64 | np.ndarray, value: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser applied to key and value (uint64, broadcast)."""
    with np.errstate(over="ignore"):
        x = (value + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _feistel(values: np.ndarray, keys: np.ndarray, half: int) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (scrambled(scrambled(keys, np.full_like(right, number)), right) & mask)
    return (left << shift) | right


@dataclass(frozen=True, kw_only=True)
class PromptSchedule:
    """How the prompts of a peer's block are divided into generations of GRPO.

    As in pretraining there is no read position to save, and no two peers get the same prompt in the same pass.
    """

    seed: int
    steps_per_epoch: int
    batches_per_step: int
    batches_per_generation: int
    """Batches that train on one generation. Those of an epoch have to be a multiple."""
    prompts_per_generation: int
    """Distinct prompts, over all ranks."""

    @property
    def prompts_per_block(self) -> int:
        """The same on all peers, though their batches may differ in size."""
        num_batches = self.steps_per_epoch * self.batches_per_step
        return num_batches // self.batches_per_generation * self.prompts_per_generation

    def numbers(self, block: Block, local_step: int, batch_of_step: int, *, num_examples: int) -> list[int]:
        """The example numbers of the generation that serves this batch of a local step of the block's epoch."""
        batch = min(local_step, self.steps_per_epoch - 1) * self.batches_per_step + batch_of_step
        first = batch // self.batches_per_generation * self.prompts_per_generation
        offsets = np.arange(first, first + self.prompts_per_generation, dtype=np.int64)
        indices = block.indices(offsets, self.prompts_per_block)
        return [int(number) for number in windows_of(indices, num_windows=num_examples, seed=self.seed)]
