"""What the simulator is checked by: how figures are taken from records, and published ones that it comes close to."""

from __future__ import annotations

import pytest

from benchmarks.simulation import lab, published
from benchmarks.wan.cases import link
from diloco.simulation.machine import IDEAL

ONE_POINT = 1.01 * published.GRID[1] / published.GRID[0]
"""Of the grid of bandwidths."""


def test_epochs_end_with_the_last_peer_and_parts_are_the_longest():
    fast = [{"time": 1.0, "round_s": 0.5}, {"time": 3.0, "round_s": 0.2}, {"time": 6.0, "round_s": 0.1}]
    slow = [{"time": 2.0, "round_s": 0.1}, {"time": 3.5, "round_s": 0.4}, {"time": 5.0, "round_s": 0.3}]
    measured = lab.Measured([fast, slow])
    assert measured.epoch_s == [1.5, 2.5]
    assert measured.longest("round_s") == [0.5, 0.4, 0.3]


def test_a_lab_is_predicted_by_its_links_and_the_schedule():
    setting, schedule = lab.Setting(), lab.SCHEDULES["blocking"]
    figures = lab.predict(setting, schedule, link(100, 20), IDEAL, 0.1)
    assert figures.parts.reduce_s == pytest.approx(1.5 * (32 << 20) / (12.5e6 * 0.98 * 1448 / 1500), rel=0.01)
    assert figures.train_s == pytest.approx(2.0)


@pytest.mark.parametrize("method", published.METHODS)
def test_the_bandwidths_of_streaming_diloco_are_met_to_a_point_of_its_grid(method):
    for target, printed in zip(published.TARGETS, published.STREAMING_DILOCO["10B", method], strict=True):
        ours = published.bandwidth_for(target, published.MODELS["10B"], method)
        theirs = min(published.GRID, key=lambda point: abs(point - printed))
        assert 1 / ONE_POINT < ours / theirs < ONE_POINT


def test_two_of_intellect_1s_times_follow_from_the_third():
    ratios = {row.case: row.median for row in published.intellect_1() if row.metric == "one pace / published"}
    assert set(ratios) == {"INTELLECT-1 USA and Europe", "INTELLECT-1 global"}
    for ratio in ratios.values():
        assert 0.75 < ratio < 1.25
