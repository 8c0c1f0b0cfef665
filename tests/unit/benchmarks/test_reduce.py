import math

import pytest
import torch

from benchmarks.reduce import contenders, rows
from benchmarks.reduction import vectors
from benchmarks.reduction.seats import Outcome, Round


def outcome(*seconds, error=0.0, digests="aaaa"):
    """The outcome of a group of four peers: one round for each of `seconds`, the time of its slowest peer."""
    return Outcome(
        [
            [Round(10.0, 10.0 + s / (1 + peer), 0.5, error, digests[peer]) for peer in range(4)]
            for s in seconds
        ],
        peak_bytes=5_000_000,
    )


def figures(outcomes):
    return {(row.case, row.metric): row.median for row in rows(outcomes, 4, 1 << 18)}


def test_a_round_lasts_until_its_slowest_peer_is_done():
    found = figures({"gloo": [outcome(1.0, 2.0), outcome(4.0)]})
    assert found["4 x 1 MB gloo", "time"] == pytest.approx(2.0)
    assert found["4 x 1 MB gloo", "CPU time"] == pytest.approx(4 * 0.5 / (4 * 4 * (1 << 18) / 1e9))
    assert found["4 x 1 MB gloo", "memory beyond tensors"] == 5.0


def test_peers_that_end_with_different_bits_are_counted():
    found = figures({"hivemind none": [outcome(1.0, digests="abca")]})
    assert found["4 x 1 MB hivemind none", "distinct results"] == 3


def test_who_only_moves_bytes_is_held_to_no_result():
    found = figures({"raw TCP": [outcome(1.0, error=math.nan)]})
    assert ("4 x 1 MB raw TCP", "relative error") not in found


def test_ratios_are_taken_within_each_repetition():
    found = figures(
        {
            "raw TCP": [outcome(1.0), outcome(10.0), outcome(1.0)],
            "ours fp32 tcp": [outcome(1.5), outcome(14.0), outcome(1.6)],
        }
    )
    assert found["4 x 1 MB ours fp32 tcp / raw TCP", "time"] == pytest.approx(1.5)


def test_every_process_can_tell_how_far_a_result_is_from_the_mean():
    numel = 3_000_000
    mean = sum(vectors.delta(peer, numel) for peer in range(3)) / 3
    assert vectors.relative_error(mean, 3) < 1e-6
    assert vectors.relative_error(mean * 1.01, 3) == pytest.approx(0.01, rel=1e-3)
    assert math.isnan(vectors.relative_error(torch.full((10,), math.nan), 3))


def test_names_of_contenders_are_unique():
    names = [contender.name for contender in contenders()]
    assert len(set(names)) == len(names)
