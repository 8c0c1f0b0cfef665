"""A training whose rewards give nothing to learn from is reported, once."""

from __future__ import annotations

import re

import pytest

from diloco.rl.signal_watch import SignalWatch, problems

WELL = {"cut_off": 0.1, "reward": 0.4, "same_reward": 0.5}
POOR = {"cut_off": 0.1, "reward": 0.0, "same_reward": 1.0}


@pytest.mark.parametrize(
    ("figures", "name", "flag"),
    [
        ({**WELL, "cut_off": 0.75}, "cut_off", "75% .*--grpo.max-completion-length"),
        (POOR, "no_reward", "all rewards are zero.*--dataset"),
        ({**WELL, "same_reward": 1.0}, "same_reward", "--grpo.num-generations"),
    ],
)
def test_each_problem_names_the_flag_that_mends_it(figures, name, flag):
    found = problems(figures)
    assert list(found) == [name]
    assert re.search(flag, found[name])


def test_steps_that_teach_something_and_figures_that_are_missing_are_no_problem():
    assert problems(WELL) == problems({}) == problems({**POOR, "same_reward": 0.9}) == {}


def test_a_problem_is_said_when_it_lasts_and_again_only_after_it_had_passed():
    watch = SignalWatch()
    said = [bool(watch.step(figures)) for figures in [POOR, POOR, WELL, *[POOR] * 5, WELL, *[POOR] * 3]]
    assert [step for step, one in enumerate(said) if one] == [5, 11]
