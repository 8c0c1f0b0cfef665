"""Checks of the simulator: how it takes figures from records, and how close it comes to published figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.simulation import lab, published, thousand
from benchmarks.table import RESULTS
from benchmarks.wan.cases import link
from diloco.sim.cost.machine import IDEAL
from diloco.sim.cost.swarm import simulate

ONE_POINT = 1.01 * published.GRID[1] / published.GRID[0]
"""The ratio of two neighbouring points on the grid of bandwidths, with 1 % to spare."""


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


def test_what_is_committed_agrees_with_the_laboratory_within_a_tenth():
    rows = json.loads((RESULTS / "simulation-cpu-2cores.json").read_text())["results"]
    ratios = {(row["case"], row["metric"]): row["median"] for row in rows if row["unit"] == "ratio"}
    lab_ratios = {key: ratio for key, ratio in ratios.items() if key[0].startswith("lab ")}
    # For each of three bandwidths, blocking and overlapped: one ratio of epochs, one of rounds.
    assert len(lab_ratios) == 3 * 2 * 2
    assert all(0.9 < ratio < 1.1 for ratio in lab_ratios.values()), lab_ratios
    assert len([case for case, _ in ratios if case.startswith("Streaming DiLoCo")]) == 12
    assert ("INTELLECT-1 global", "one pace / published") in ratios


def test_two_of_intellect_1s_times_follow_from_the_third():
    ratios = {row.case: row.median for row in published.intellect_1() if row.metric == "one pace / published"}
    assert set(ratios) == {"INTELLECT-1 USA and Europe", "INTELLECT-1 global"}
    for ratio in ratios.values():
        assert 0.75 < ratio < 1.25


def test_unlike_peers_that_fail_train_most_of_the_time_and_never_wait_for_the_slowest():
    """The scenario of a thousand peers with 40 of them, which fail 25 times as often, so that as many are lost."""
    few = replace(thousand.scenario(40, num_epochs=6), mtbf_s=24 * 3600.0 / 25)
    assert {round(peer.step_s) for peer in few.peers} <= set(range(8, 33))
    figures = simulate(few)
    assert figures.losses.peers_lost > 0
    assert 0.6 < figures.utilisation < 1.0
    metrics = {result.metric for result in thousand.results(figures, 1.0)}
    assert {"utilisation", "processor time", "peers lost"} <= metrics
