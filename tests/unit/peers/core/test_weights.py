"""What each contribution weighs."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.core.weights import CLIP_FACTOR, RULES, Aggregation
from peers.protocol.limits import MAX_COUNT, MAX_NORM, MAX_TOKENS
from tests.unit.peers.core.made import commit, genesis, work

ROBUST = ("trimmed-mean", "centered-clip")


def weights(
    rule: str,
    tokens,
    norms=None,
    *,
    based_on=None,
    epoch: int = 1,
    num_fragments: int = 1,
    lengths_before=None,
    **others,
):
    norms, based_on = norms or [1.0] * len(tokens), based_on or [0] * len(tokens)
    works = [
        work(count, norm=norm, based_on=since)
        for count, norm, since in zip(tokens, norms, based_on, strict=True)
    ]
    return Aggregation(rule=rule, **others).weights_of(
        works, epoch, num_fragments, lengths_before=lengths_before
    )


@pytest.mark.parametrize("rule", ROBUST)
def test_all_weigh_alike_under_a_robust_rule_whatever_they_claim(rule):
    assert weights(rule, [1, 100, MAX_TOKENS], [0.0, 1.0, MAX_NORM], based_on=[0, 5, 9], epoch=10) == (
        pytest.approx((1 / 3, 1 / 3, 1 / 3))
    )
    assert weights(rule, [0, 5, 7, 2, 1]) == pytest.approx((0.2,) * 5)


def test_a_robust_rule_needs_three_members_and_the_others_one():
    assert {rule: Aggregation(rule=rule).least_group for rule in RULES} == {
        "mean": 1,
        "clip": 1,
        "trimmed-mean": 3,
        "centered-clip": 3,
    }


def test_mean_goes_by_the_tokens_as_claimed():
    assert weights("mean", [100, 300]) == pytest.approx((0.25, 0.75))
    assert weights("mean", [1, MAX_TOKENS])[1] > 0.999999
    # `mean` ignores the norms and the manifest's bound.
    assert weights("mean", [100, 300], [1.0, 1e9], max_tokens_per_epoch=1) == pytest.approx((0.25, 0.75))


@pytest.mark.parametrize(
    ("num_members", "most"),
    [(2, 2 / 3), (3, 2 / 4), (4, 2 / 5), (5, 2 / 6)],
)
def test_one_that_claims_any_number_of_tokens_counts_for_twice_the_median_at_most(num_members, most):
    found = weights("clip", [100] * (num_members - 1) + [MAX_TOKENS])
    assert found[-1] == pytest.approx(most)
    assert found[:-1] == pytest.approx(((1 - most) / (num_members - 1),) * (num_members - 1))


def test_two_of_four_that_claim_any_number_count_for_twice_the_others_each():
    assert weights("clip", [100, 100, MAX_TOKENS, MAX_TOKENS]) == pytest.approx((1 / 6, 1 / 6, 1 / 3, 1 / 3))


def test_a_claim_of_hardly_any_tokens_does_not_raise_the_weight_of_the_one_that_makes_it():
    assert weights("clip", [1, 1000])[0] == pytest.approx(1 / 3)
    assert weights("clip", [1, 1000, 1000])[0] == pytest.approx(1 / 2001)


def test_nobody_counts_for_more_than_the_manifest_lets_it_train_since_its_work_was_last_in():
    # The second may count for one epoch of tokens, the third for three.
    found = weights(
        "clip",
        [100, 10_000, 10_000],
        based_on=[9, 9, 7],
        epoch=10,
        max_tokens_per_epoch=100,
        max_weight=100.0,
    )
    assert found == pytest.approx((0.2, 0.2, 0.6))


def test_a_multiple_of_the_median_that_was_asked_for_is_used():
    assert weights("clip", [100, 100, 100, MAX_TOKENS], max_weight=4.0)[3] == pytest.approx(4 / 7)


def test_a_long_pseudo_gradient_is_scaled_down_to_a_few_times_the_median_of_three_or_more():
    assert weights("clip", [1, 1, 1], [1.0, 1.0, 1000.0])[2] == pytest.approx(CLIP_FACTOR / 1000 / 3)
    assert weights("clip", [1, 1, 1], [1.0, 1.0, CLIP_FACTOR])[2] == pytest.approx(1 / 3)
    assert weights("clip", [1, 1], [1.0, 1000.0]) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("before", [0.0, 1.0, CLIP_FACTOR, 20.0])
def test_two_of_a_larger_roster_are_compared_with_each_other_and_with_their_last_contributions(before):
    found = weights("clip", [1, 1], [1.0, 1000.0], lengths_before=[1.0, before])
    assert found == pytest.approx((0.5, max(before, CLIP_FACTOR) / 1000 / 2))


def test_one_of_two_that_exaggerates_each_time_gains_nothing_by_it():
    works, last = {"a": work(norm=1.0), "b": work(10**6, norm=1e20)}, commit(genesis("abc"), "abc")
    for _ in range(6):
        last = commit(last, "ab", works=works)
        a, b = last.plan.contributors
        assert b.weight * b.work.norm / a.weight == pytest.approx(2 * CLIP_FACTOR)


def test_one_of_two_that_announces_no_norm_does_not_erase_the_other_s_work():
    works, last = {"a": work(norm=1.0), "b": work(norm=0.0)}, commit(genesis("abc"), "abc")
    for _ in range(5):
        last = commit(last, "ab", works=works)
        assert [contributor.weight for contributor in last.plan.contributors] == pytest.approx((0.5, 0.5))
    # Norms grow while the learning rate warms up.
    assert weights("clip", [1, 1], [9.0, 9.0], lengths_before=[1.0, 1.0]) == pytest.approx((0.5, 0.5))


def test_peers_of_different_speed_keep_their_weights_in_pairs():
    works, last = {"a": work(10, norm=0.1), "b": work(80, norm=1.0)}, commit(genesis("abc"), "abc")
    for _ in range(5):
        last = commit(last, "ab", works=works)
        assert last.plan.contributors[1].weight == pytest.approx(2 / 3)


def test_a_plan_compares_the_norms_of_two_where_the_roster_has_three():
    works = {"a": work(norm=1.0), "b": work(norm=1000.0)}
    for names, shares in (("ab", (0.5, 0.5)), ("abc", (0.5, CLIP_FACTOR / 1000 / 2))):
        plan = commit(genesis(names), "ab", works=works).plan
        assert [contributor.weight for contributor in plan.contributors] == pytest.approx(shares)


def test_every_commit_that_a_contribution_has_missed_discounts_it():
    kwargs = {"based_on": [9, 9, 6], "epoch": 10, "staleness_discount": 0.5}
    assert weights("mean", [100, 100, 100], **kwargs) == pytest.approx((8 / 17, 8 / 17, 1 / 17))
    assert weights("clip", [100, 100, 100], **kwargs) == pytest.approx((8 / 17, 8 / 17, 1 / 17))
    # With four fragments each is averaged every fourth epoch.
    assert weights(
        "mean", [100, 100], based_on=[6, 5], epoch=10, num_fragments=4, staleness_discount=0.5
    ) == (pytest.approx((2 / 3, 1 / 3)))
    # Work based on a very old epoch has weight zero and raises no error.
    assert weights(
        "mean", [100, 100], based_on=[MAX_COUNT - 1, 0], epoch=MAX_COUNT, staleness_discount=0.5
    ) == (pytest.approx((1.0, 0.0)))


def test_weights_have_the_same_bits_under_every_python_and_on_every_system():
    # Added left to right with rounding at each step, as sum() did before Python 3.12, these end one bit lower.
    claims = [100.0, *[100 * (0.8 * 0.8)] * 3]
    total = float(sum(map(Fraction, claims)))
    assert ((claims[0] + claims[1]) + claims[2]) + claims[3] < total
    found = weights("mean", [100] * 4, based_on=[9, 7, 7, 7], epoch=10, staleness_discount=0.8)
    assert found == tuple(claim / total for claim in claims)
    # Here pow() would round to a different last bit than repeated multiplication.
    fourth = (0.7 * 0.7) * (0.7 * 0.7)
    found = weights("mean", [1, 1], based_on=[9, 5], epoch=10, staleness_discount=0.7)
    assert found == (1 / (1 + fourth), fourth / (1 + fourth))


@pytest.mark.parametrize("rule", RULES)
def test_members_that_have_trained_nothing_weigh_alike(rule):
    assert weights(rule, [0, 0, 0]) == pytest.approx((1 / 3,) * 3)


@settings(max_examples=40)
@given(
    st.sampled_from(RULES),
    st.lists(
        st.tuples(
            st.integers(0, MAX_TOKENS), st.floats(0, MAX_NORM, allow_nan=False), st.integers(0, MAX_COUNT)
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, MAX_COUNT),
    st.sampled_from([0, 1, 10**6]),
    st.sampled_from([1.0, 0.5, 1e-9]),
)
def test_weights_are_shares_that_never_sum_to_more_than_one(rule, claims, epoch, bound, discount):
    tokens, norms, based_on = map(list, zip(*claims, strict=True))
    found = weights(
        rule,
        tokens,
        norms,
        based_on=based_on,
        epoch=epoch,
        max_tokens_per_epoch=bound,
        staleness_discount=discount,
    )
    assert all(0 <= share <= 1 for share in found)
    assert sum(found) <= 1 + 1e-9
    if rule != "clip":
        assert sum(found) == pytest.approx(1.0)
