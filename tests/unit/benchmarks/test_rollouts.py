"""How the comparison of rollout peers reads rewards."""

from __future__ import annotations

import pytest

from benchmarks.record import Result
from benchmarks.rollouts.__main__ import merged
from benchmarks.rollouts.comparison import Judged, curve_of, judged_of


def judged(time: float, reward: float, num_completions: int = 10) -> Judged:
    return Judged(time=time, began=time - 1, num_completions=num_completions, reward=reward)


def test_rewards_of_all_learners_are_averaged_over_the_last_completions():
    first = [judged(101, 0.0), judged(103, 0.5), judged(105, 1.0)]
    second = [judged(102, 0.5), judged(104, 1.0)]
    curve = curve_of([first, second], window=20)
    assert curve.first_s == 1 and curve.num_completions == 50
    assert curve.points == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert curve.seconds_to(0.6) == 3 and curve.seconds_to(1.1) is None


def test_larger_steps_weigh_more_and_too_few_completions_make_no_point():
    assert curve_of([[judged(101, 0.0, 5)]], window=20).points == []
    curve = curve_of([[judged(101, 0.0, 5), judged(102, 1.0, 15)]], window=20)
    assert curve.points == [(1, pytest.approx(0.75))]


def test_what_a_learner_left_out_counts_with_its_reward():
    record = {"time": 10.0, "step_s": 2.0, "reward": 0.5}
    assert judged_of(record, batch=64) == Judged(8.0 + 2, 8.0, 64, 0.5)
    left_out = {**record, "uniform_groups": 3, "reward_of_all": 0.25}
    assert judged_of(left_out, batch=64) == Judged(10.0, 8.0, 88, 0.25)


def test_repetitions_become_one_row_of_each_metric_that_all_of_them_have():
    once = [Result.of("case", "until", "s", [3.0]), Result.of("case", "staleness", "steps", [1.0])]
    [row] = merged([once, [Result.of("case", "until", "s", [5.0])]])
    assert (row.metric, row.min, row.max, row.runs) == ("until", 3.0, 5.0, 2)
