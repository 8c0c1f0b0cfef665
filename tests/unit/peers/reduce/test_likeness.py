from __future__ import annotations

import numpy as np
import pytest

from peers.reduce.likeness import ENOUGH_COMMITS, SAMPLE_NUMEL, Likeness, Samples


def drawn(seed: int, numel: int = SAMPLE_NUMEL) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(numel).astype(np.float32)


def parallel_among(*rows: np.ndarray, me: int = 0) -> tuple[int, ...]:
    samples = Samples()
    for member, row in enumerate(rows):
        samples.take(member, row)
    return samples.parallel_to(me)


def test_the_same_work_at_another_length_and_with_a_little_noise_is_parallel():
    assert parallel_among(drawn(0), 3 * drawn(0), drawn(1), drawn(0) + 0.1 * drawn(2)) == (1, 3)
    assert parallel_among(drawn(0), -drawn(0), drawn(0) + drawn(1)) == ()


@pytest.mark.parametrize("row", [np.zeros(SAMPLE_NUMEL, np.float32), drawn(0, 100)], ids=["zeros", "few"])
def test_of_nothing_and_of_little_nothing_is_said(row):
    assert parallel_among(row, row) == ()


def test_what_was_taken_stays_when_the_memory_is_used_again():
    values, samples = drawn(0), Samples()
    samples.take(0, values)
    samples.take(1, drawn(0))
    values[:] = drawn(1)
    assert samples.parallel_to(0) == (1,)


def test_it_takes_several_commits_in_a_row():
    likeness = Likeness()
    for parallel in ((2,), (2, 3), (3,), (2, 3)):
        likeness.committed(parallel)
    assert ENOUGH_COMMITS == 3 and likeness.world_ranks == [3]
    likeness.committed(())
    assert likeness.world_ranks == []
