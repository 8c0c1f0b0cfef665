from __future__ import annotations

from dataclasses import replace

import pytest

from provisioning.errors import ProviderError, UserError
from provisioning.pods.pod import Offer, PodSpec, Row, State
from provisioning.renting.plan import plan

OFFERS = [
    Offer(id=f"o{number}", provider="lium", gpu_type="A100", gpu_count=8, price_per_hour=number + 1.0)
    for number in range(4)
]
SPECS = [PodSpec(provider="lium", name=f"pod-{index}", ttl_hours=2) for index in range(3)]


def row(spec: PodSpec, state: State = State.RUNNING, price: float = 5.0) -> Row:
    return Row(
        name=spec.name,
        label=f"diloco-x-{spec.name}",
        state=state,
        provider_id="id",
        spec=spec,
        offer=replace(OFFERS[0], price_per_hour=price),
        asked_at=0.0,
        ends_at=None,
    )


def test_from_nothing_all_pods_are_created_at_the_lowest_price():
    found = plan(SPECS, [], OFFERS)
    assert [creation.offer.id for creation in found.create] == ["o0", "o1", "o2"]
    assert (found.keep, found.destroy) == ((), ())
    assert found.new_dollars_per_hour == found.dollars_per_hour == 6.0
    assert found.dollars_until_end(now=0.0) == 12.0


def test_the_same_wish_again_changes_nothing():
    found = plan(SPECS, [row(spec) for spec in SPECS], [])
    assert not found.create and not found.destroy and len(found.keep) == 3
    assert (found.new_dollars_per_hour, found.dollars_per_hour) == (0.0, 15.0)


def test_a_pod_that_is_not_wanted_any_more_goes():
    found = plan(SPECS[:1], [row(spec) for spec in SPECS[:2]], [])
    assert [removal.row.name for removal in found.destroy] == ["pod-1"]


def test_another_machine_takes_the_place_of_one_that_no_longer_fits():
    found = plan([replace(SPECS[0], country="NL")], [row(SPECS[0])], [replace(OFFERS[0], country="NL")])
    assert len(found.create) == len(found.destroy) == 1


def test_longer_life_or_another_price_limit_is_the_same_machine():
    found = plan([replace(SPECS[0], ttl_hours=9, max_price=1)], [row(SPECS[0])], [])
    assert not found.create and not found.destroy


def test_what_is_half_given_back_goes_before_it_is_rented_anew():
    found = plan(SPECS[:1], [row(SPECS[0], State.DELETING)], OFFERS)
    assert len(found.create) == len(found.destroy) == 1


def test_an_order_in_doubt_stands_in_nobodys_way():
    in_doubt = replace(row(SPECS[0], State.DELETING), provider_id=None)
    found = plan(SPECS[:1], [in_doubt], OFFERS)
    assert (len(found.create), found.destroy) == (1, ())


def test_what_was_only_planned_is_chosen_anew():
    found = plan(SPECS[:1], [row(SPECS[0], State.PLANNED)], OFFERS)
    assert (len(found.create), found.keep, found.destroy) == (1, (), ())


def test_a_pod_that_cannot_be_had_leaves_the_plan_of_the_others_but_incomplete():
    found = plan([PodSpec(provider="lium", name="pod-3", gpu_type="H100"), *SPECS], [], OFFERS)
    assert [creation.spec for creation in found.create] == SPECS and found.lacking.keys() == {"pod-3"}
    with pytest.raises(UserError, match="pod-3"):
        found.complete()


def test_a_pod_that_must_not_be_ordered_now_is_kept_unless_its_order_is_in_doubt():
    in_doubt = replace(row(SPECS[0], State.CREATING), provider_id=None)
    barred = {spec.name: ProviderError("502") for spec in SPECS}
    found = plan(SPECS[:3], [in_doubt, row(SPECS[1])], OFFERS, barred)
    assert (found.create, found.destroy) == ((), ())
    assert [one.name for one in found.keep] == [SPECS[1].name]
    assert found.lacking.keys() == {SPECS[0].name, SPECS[2].name}
