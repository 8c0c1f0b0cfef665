import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.protocol.certificates import Contributor, Plan, Work
from peers.reduce.commit_log import parts_of
from peers.reduce.shares import ALIGNMENT, GRID_FROM, MAX_ADVANTAGE, Arrangement, bounds_of, reduce_plan_of
from tests.support.optimal_shares import optimal_seconds, round_seconds

NUMEL = 1 << 26
speeds = st.floats(min_value=1e4, max_value=1e10)


def sizes(bounds):
    return [stop - start for start, stop in itertools.pairwise(bounds)]


@given(
    st.lists(st.one_of(st.just(0.0), st.just(math.inf), st.just(math.nan), speeds), min_size=1, max_size=40),
    st.sampled_from([0, 1, 5, 1000, ALIGNMENT * 300 + 17, NUMEL]),
)
@settings(max_examples=150, deadline=None)
def test_bounds_cover_the_vector_whatever_the_members_say(bandwidths, numel):
    bounds = bounds_of(bandwidths, numel)
    assert len(bounds) == len(bandwidths) + 1
    assert bounds[0] == 0
    assert bounds[-1] == numel
    assert list(bounds) == sorted(bounds)


def test_equal_links_get_equal_shares_and_scatter_moves_nothing():
    equal = bounds_of([1e8] * 4, NUMEL)
    assert sizes(equal) == [NUMEL // 4] * 4
    assert bounds_of([1.08e8, 0.93e8, 1e8, 1.0e8], NUMEL) == equal
    assert bounds_of([0.0] * 4, NUMEL) == equal


def test_a_member_too_slow_to_own_anything_owns_nothing_and_the_round_takes_what_its_own_bytes_take():
    bandwidths = [1e8, 1e8, 0.25e8, 1e8]
    bounds = bounds_of(bandwidths, NUMEL)
    assert sizes(bounds)[2] == 0
    assert round_seconds(bandwidths, bounds) == pytest.approx(4 * NUMEL / 0.25e8)
    assert optimal_seconds(bandwidths, 4 * NUMEL) == pytest.approx(4 * NUMEL / 0.25e8)


def test_with_links_that_all_own_something_everybody_is_done_at_the_water_level():
    # Their ratios are powers of the rounding step, so that rounding does not change them.
    bandwidths = [1e8, 1e8, 2**0.25 * 1e8, 2**-0.25 * 1e8, 2**-0.25 * 1e8, 1e8]
    bounds = bounds_of(bandwidths, NUMEL)
    size = 4.0 * NUMEL
    done = [
        (size + 4 * 4 * share) / bandwidth for share, bandwidth in zip(sizes(bounds), bandwidths, strict=True)
    ]
    assert max(done) / min(done) < 1.001
    assert max(done) == pytest.approx(optimal_seconds(bandwidths, size), rel=1e-3)
    assert max(done) == pytest.approx(size * (4 + 6) / sum(bandwidths), rel=1e-3)


@given(st.lists(st.floats(min_value=0.3, max_value=2.0), min_size=3, max_size=12))
@settings(max_examples=100, deadline=None)
def test_shares_come_close_to_the_optimum_where_no_cap_applies(factors):
    bandwidths = [factor * 1e8 for factor in factors]
    bounds = bounds_of(bandwidths, NUMEL)
    if max(sizes(bounds)) < (MAX_ADVANTAGE / len(factors) - 0.001) * NUMEL:
        # Rounding changes each side of a ratio by up to half a step.
        assert round_seconds(bandwidths, bounds) <= 1.2 * optimal_seconds(bandwidths, 4 * NUMEL)


@given(st.lists(st.floats(min_value=0.25, max_value=4.0), min_size=3, max_size=10))
@settings(max_examples=100, deadline=None)
def test_no_round_is_faster_than_the_optimum(factors):
    bandwidths = [factor * 1e8 for factor in factors]
    for bounds in (bounds_of(bandwidths, NUMEL), bounds_of([1.0] * len(factors), NUMEL)):
        assert round_seconds(bandwidths, bounds) >= 0.999 * optimal_seconds(bandwidths, 4 * NUMEL)


@pytest.mark.parametrize("num_members", [3, 4, 8, 30])
def test_a_boast_at_most_doubles_the_time_of_a_round(num_members):
    truth = [1e8] * num_members
    boasted = bounds_of([1e30, *truth[1:]], NUMEL)
    honest = bounds_of(truth, NUMEL)
    assert sizes(boasted)[0] <= MAX_ADVANTAGE / num_members * NUMEL + ALIGNMENT
    assert round_seconds(truth, boasted) <= 2.0 * round_seconds(truth, honest)


def test_who_is_not_known_counts_as_the_median_of_the_known():
    assert bounds_of([1e8, 0.0, 4e8, 1e8, math.nan], NUMEL) == bounds_of([1e8, 1e8, 4e8, 1e8, 1e8], NUMEL)


def test_bounds_are_aligned_in_long_vectors_only():
    bandwidths = [1e8, 2e8, 3e8, 1e8]
    assert all(bound % ALIGNMENT == 0 for bound in bounds_of(bandwidths, NUMEL + 5)[:-1])
    assert 0 < sizes(bounds_of(bandwidths, 1000))[1] < 1000


# In a grid


def plan_of(bandwidths):
    work = [Work(tokens=1, norm=1.0, step=1, based_on=0, bandwidth=bandwidth) for bandwidth in bandwidths]
    contributors = [
        Contributor(peer_id=f"peer{rank:03}", world_rank=rank, work=part, weight=1 / len(work))
        for rank, part in enumerate(work)
    ]
    return Plan(
        manifest="m" * 64,
        parent="a" * 64,
        epoch=1,
        fragment=0,
        attempt=0,
        contributors=tuple(contributors),
        roster=(),
        data_base=0,
        tokens=0,
    )


@given(
    st.lists(st.one_of(st.just(0.0), st.just(math.nan), speeds), min_size=GRID_FROM, max_size=60),
    st.sampled_from([0, 1, 5, 1000, ALIGNMENT * 300 + 17, NUMEL]),
)
@settings(max_examples=60, deadline=None)
def test_a_grid_holds_everybody_once_and_covers_the_vector(bandwidths, numel):
    arrangement = Arrangement.of(plan_of(bandwidths), numel, "clip")
    assert sorted(c.world_rank for c in arrangement.contributors) == list(range(len(bandwidths)))
    bounds = arrangement.bounds
    assert (bounds[0], bounds[-1], len(bounds)) == (0, numel, len(bandwidths) + 1)
    assert list(bounds) == sorted(bounds)


def test_every_member_of_a_large_group_makes_the_same_plan_of_a_grid():
    plan = plan_of([1e8] * 12 + [2e7] * 6)
    plans = [reduce_plan_of(plan, f"peer{rank:03}", NUMEL, "int8", "clip", 0.2) for rank in range(18)]
    assert len({(made.members, made.bounds, made.num_columns) for made in plans}) == 1
    assert [made.members[made.me] for made in plans] == list(range(18))
    assert plans[0].num_columns == 3


@pytest.mark.parametrize(("num_members", "rule"), [(GRID_FROM - 1, "clip"), (GRID_FROM, "trimmed-mean")])
def test_all_exchange_with_all_in_small_groups_and_where_single_values_are_needed(num_members, rule):
    plan = plan_of([1e8] * num_members)
    assert reduce_plan_of(plan, "peer000", NUMEL, "fp32", rule, 0.2).num_columns == num_members


def test_slow_members_share_the_columns_with_the_smallest_pieces():
    speed = [2.5e7 if rank % 4 == 0 else 1e8 for rank in range(16)]
    arrangement = Arrangement.of(plan_of(speed), NUMEL, "clip")
    owned = dict(
        zip((c.world_rank for c in arrangement.contributors), sizes(arrangement.bounds), strict=True)
    )
    assert {owned[rank] for rank in range(0, 16, 4)} == {0}
    assert min(owned[rank] for rank in range(16) if rank % 4) > NUMEL / 14


def test_noise_in_measured_bandwidths_moves_nobody_and_no_bound():
    plans = [plan_of([1e8 * (1 + noise * (-1) ** rank) for rank in range(20)]) for noise in (0.0, 0.05)]
    assert len({reduce_plan_of(p, "peer000", NUMEL, "int8", "clip", 0.2).members for p in plans}) == 1
    assert len({reduce_plan_of(p, "peer000", NUMEL, "int8", "clip", 0.2).bounds for p in plans}) == 1


def test_the_recorded_parts_of_a_commit_of_a_grid_are_those_that_went_over_the_wire():
    plan = plan_of([1e8, 2e7] * 10)
    made = reduce_plan_of(plan, "peer000", NUMEL + 17, "int8", "clip", 0.2)
    wanted = [made.place(chunk) for chunk in sorted(made.chunks(range(20)))]
    assert [part for part, _ in parts_of(plan, NUMEL + 17, "int8", "clip")] == wanted
