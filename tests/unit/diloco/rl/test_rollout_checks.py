"""What a learner finds out about rollout peers, from a few of their completions."""

from __future__ import annotations

import random

import pytest

from diloco.rl import rollout_checks
from diloco.rl.rollout_checks import RolloutChecks


@pytest.fixture
def checks():
    return RolloutChecks()


def differ(checks, peer_id, *values):
    for value in values:
        checks.generated(peer_id, value)


def test_other_weights_are_found_and_other_kernels_are_not(checks):
    rng = random.Random(0)
    differ(checks, "other weights", *(rng.uniform(1.0, 3.0) for _ in range(8)))
    differ(checks, "bf16", *(rng.uniform(0.0, 0.05) for _ in range(64)))
    assert list(checks.cheats()) == ["other weights"]
    assert "nats per token" in checks.cheats()["other weights"]


def test_nobody_is_left_out_for_old_policies_where_weights_change_fast(checks):
    for peer_id, difference in (("a", 0.5), ("b", 0.6), ("c", 0.9)):
        differ(checks, peer_id, *[difference] * 8)
    assert not checks.cheats()
    differ(checks, "d", *[3.0] * 8)
    assert list(checks.cheats()) == ["d"]


def test_a_few_odd_completions_prove_nothing(checks):
    differ(checks, "x", *[5.0] * 7)
    assert not checks.cheats()
    # Nor do they excuse anybody else.
    differ(checks, "y", *[3.0] * 8)
    assert list(checks.cheats()) == ["y"]


@pytest.mark.parametrize("forged", [(0.0, 0.0), (1.0, 1.0)], ids=["the first score", "the second"])
@pytest.mark.parametrize(("num_false", "is_cheat"), [(0, False), (2, False), (4, True), (10, True)])
def test_forged_rewards_are_found_where_they_are_more_than_some(checks, num_false, is_cheat, forged):
    for number in range(10):
        checks.judged_again("x", [1.0, 0.0], forged if number < num_false else [1.0, 0.0])
    assert bool(checks.cheats()) is is_cheat


def test_copies_are_found_but_not_where_an_answer_is_likely(checks):
    likely = ([1, 2, 3], [-0.1, -0.1, -0.1])
    unlikely = ([4, 5, 6], [-12.0, -12.0, -12.0])
    for _ in range(10):
        checks.came("short answers", *likely)
    checks.came("author", *unlikely)
    assert not checks.cheats()
    for _ in range(2):
        checks.came("copies", *unlikely)
    assert list(checks.cheats()) == ["copies"]


def test_who_was_left_out_is_judged_anew(checks):
    differ(checks, "x", *[3.0] * 8)
    assert checks.cheats()
    checks.forget("x")
    assert not checks.cheats()


def test_a_completion_that_keeps_coming_is_not_forgotten_for_those_that_came_since(checks):
    logprobs = [-40.0]
    for first in (0, rollout_checks._LEAST_REMEMBERED, 2 * rollout_checks._LEAST_REMEMBERED):
        checks.came("copies", [0], logprobs)
        for token in range(1, rollout_checks._LEAST_REMEMBERED * 2 // 3):
            checks.came("author", [first + token], logprobs)
    assert list(checks.cheats()) == ["copies"]
