from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.protocol.aggregation import DEFAULT_TRIM, num_trimmed
from peers.reduce.robust_sums import combine, norm_bound

HONEST = np.random.default_rng(0).normal(1.0, 0.1, (4, 1000)).astype(np.float32)


def combined(rule, rows, weights=None, trim=DEFAULT_TRIM):
    rows = np.asarray(rows, np.float32)
    weights = np.asarray(weights or [1 / len(rows)] * len(rows), np.float32)
    total = np.full(rows.shape[1], np.nan, np.float32)
    combine(rule, trim, rows, weights, total)
    return total


@pytest.mark.parametrize("rule", ["trimmed-mean", "centered-clip"])
@pytest.mark.parametrize(
    "attack", ["flipped", "a thousand times as long", "the same large value", "far off in one"]
)
def test_one_hostile_member_of_five_hardly_moves_a_robust_rule(rule, attack):
    hostile = {
        "flipped": -HONEST[0],
        "a thousand times as long": 1000 * HONEST[0],
        "the same large value": np.full(1000, 50.0, np.float32),
        "far off in one": np.where(np.arange(1000) == 7, 1e6, HONEST[0]),
    }[attack]
    honest = HONEST.mean(axis=0)
    found = combined(rule, [*HONEST, hostile])
    assert np.linalg.norm(found - honest) < 0.15 * np.linalg.norm(honest)
    assert np.linalg.norm(np.mean([*HONEST, hostile], axis=0) - honest) > np.linalg.norm(found - honest)


@pytest.mark.parametrize("rule", ["trimmed-mean", "centered-clip"])
@pytest.mark.parametrize("num_members", [3, 4, 5, 10, 11])
@pytest.mark.parametrize("trim", [DEFAULT_TRIM, 0.5])
def test_what_a_robust_rule_makes_is_no_longer_than_a_bound_in_which_liars_have_no_say(
    rule, num_members, trim
):
    random = np.random.default_rng(num_members)
    most = (num_members - 1) // 2
    if rule == "trimmed-mean" and trim == DEFAULT_TRIM:
        most = max(1, num_members // 5)
    for liars in range(most + 1):
        rows = random.standard_normal((num_members, 64)).astype(np.float32)
        rows[:liars] *= random.choice([1e3, -1e6])
        norms = [float(np.linalg.norm(row.astype(np.float64))) for row in rows]
        bound = norm_bound(rule, trim, norms)
        found = combined(rule, rows, list(random.random(num_members)), trim)
        assert np.linalg.norm(found) <= bound * (1 + 1e-3)
        assert bound == norm_bound(rule, trim, [np.inf] * liars + norms[liars:])


def test_trimming_takes_as_many_as_asked_and_never_all():
    assert [num_trimmed(0.2, count) for count in (3, 4, 5, 9, 10, 11)] == [1, 1, 1, 1, 2, 2]
    assert [num_trimmed(0.5, count) for count in (3, 4, 5, 9, 10, 11)] == [1, 1, 2, 4, 4, 5]


@pytest.mark.parametrize("num_members", [3, 5, 8, 11])
def test_a_trimmed_mean_lies_among_the_honest_whatever_as_many_liars_as_are_trimmed_bring(num_members):
    random, liars = np.random.default_rng(num_members), num_trimmed(0.5, num_members)
    rows = random.standard_normal((num_members, 500)).astype(np.float32)
    honest = rows[liars:]
    for attack in (1e6, -1e6, rows[liars:].max(axis=0) + 0.1, -5 * honest.mean(axis=0)):
        rows[:liars] = attack
        found = combined("trimmed-mean", rows, trim=0.5)
        assert (honest.min(axis=0) - 1e-5 <= found).all() and (found <= honest.max(axis=0) + 1e-5).all()


@pytest.mark.parametrize("rule", ["trimmed-mean", "centered-clip"])
def test_a_robust_rule_gives_what_numpy_would(rule):
    rows = np.random.default_rng(1).normal(size=(7, 300)).astype(np.float32)
    weights = np.random.default_rng(2).uniform(0.5, 1.5, 7).astype(np.float32)
    if rule == "trimmed-mean":
        order = np.argsort(rows, axis=0)[1:-1]
        kept, share = np.take_along_axis(rows, order, 0), weights[order]
        expected = (kept * share).sum(0) / share.sum(0)
    else:
        expected = np.median(rows, axis=0)
        for _ in range(3):
            away = rows - expected
            far = np.linalg.norm(away, axis=1)
            pull = weights / weights.sum() * np.minimum(1, np.median(far) / far)
            expected = expected + (away * pull[:, None]).sum(0)
    np.testing.assert_allclose(combined(rule, rows, list(weights)), expected, rtol=1e-5, atol=1e-6)


@settings(max_examples=50)
@given(
    st.sampled_from(["trimmed-mean", "centered-clip"]),
    st.integers(3, 12),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
)
def test_robust_values_lie_among_those_of_the_members_and_take_any_weights(rule, members, numel, seed):
    random = np.random.default_rng(seed)
    rows = (random.normal(size=(members, numel)) * 10.0 ** random.integers(-20, 18)).astype(np.float32)
    weights = random.choice([0.0, 1e-9, 1.0, 1e6], members)
    found = combined(rule, rows, list(weights))
    low, high = rows.min(axis=0), rows.max(axis=0)
    slack = 1e-5 * np.abs(rows).max()
    assert np.isfinite(found).all()
    assert (found >= low - slack).all() and (found <= high + slack).all()
