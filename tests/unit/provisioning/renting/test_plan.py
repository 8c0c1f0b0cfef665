from __future__ import annotations

from dataclasses import replace

import pytest

from provisioning.errors import UserError
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


def test_if_one_pod_cannot_be_had_there_is_no_plan_at_all():
    with pytest.raises(UserError, match="pod-3"):
        plan([*SPECS, PodSpec(provider="lium", name="pod-3", gpu_type="H100")], [], OFFERS)
