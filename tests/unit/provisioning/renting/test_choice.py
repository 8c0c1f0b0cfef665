from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provisioning.errors import UserError
from provisioning.pods.pod import Offer, PodSpec
from provisioning.renting.plan import assign, candidates, is_gpu, objections, plan

GPUS = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]


def offer(name: str = "o", **values) -> Offer:
    common = {"provider": "lium", "gpu_type": GPUS[0], "gpu_count": 8, "price_per_hour": 9.6}
    return Offer(id=name, **{**common, **values})


offers = st.lists(
    st.builds(
        offer,
        name=st.uuids().map(str),
        gpu_type=st.sampled_from(GPUS),
        gpu_count=st.sampled_from([1, 2, 8]),
        price_per_hour=st.floats(0.1, 30),
        country=st.sampled_from([None, "NL", "US"]),
        upload_mbps=st.none() | st.floats(1, 2000),
        num_available=st.integers(1, 2),
    ),
    max_size=6,
)
specs = st.lists(
    st.fixed_dictionaries(
        {
            "gpu_type": st.sampled_from([None, "A100", "H100", "4090"]),
            "gpu_count": st.sampled_from([None, 1, 8]),
            "country": st.sampled_from([None, "nl"]),
            "max_price": st.none() | st.floats(0.1, 30),
            "min_upload_mbps": st.none() | st.floats(1, 2000),
        }
    ),
    max_size=4,
).map(
    lambda found: [
        PodSpec(provider="lium", name=f"pod-{index}", **values) for index, values in enumerate(found)
    ]
)


@pytest.mark.parametrize(
    ("wanted", "offered", "answer"),
    [
        ("A100", GPUS[0], True),
        ("a100-80gb", GPUS[0], True),
        ("4090", GPUS[2], True),
        ("RTX4090", "rtx4090", True),
        ("A10", GPUS[0], False),
        ("H100", GPUS[0], False),
        ("A100", "gpu_8x_a100_80gb_sxm4", True),
        ("A100", "NVIDIA RTX A1000", False),
        ("T400", "NVIDIA T4000", False),
        ("H100", "H100NVL", True),
    ],
)
def test_a_gpu_goes_by_its_usual_name(wanted, offered, answer):
    assert is_gpu(wanted, offered) is answer


def test_asked_for_one_gpu_eight_are_no_answer():
    spec = PodSpec(provider="lium", name="pod-0", gpu_count=1)
    assert objections(spec, offer()) == ["8 GPUs, not 1"]
    with pytest.raises(UserError, match=r"8 GPUs, not 1.*Nothing was rented"):
        plan([spec], [], [offer()]).complete()


def test_over_the_price_limit_there_is_nothing():
    with pytest.raises(UserError, match=r"dearer than 5 \$/h"):
        plan([PodSpec(provider="lium", name="pod-0", max_price=5)], [], [offer()]).complete()


def test_an_unknown_bandwidth_is_not_enough():
    assert objections(PodSpec(provider="lium", name="p", min_upload_mbps=500), offer()) == ["upload unknown"]


def test_who_is_less_choosy_leaves_the_only_fitting_offer_to_the_other():
    cheap, dear = offer("cheap", country="NL", price_per_hour=1), offer("dear", price_per_hour=2)
    found = assign(
        [PodSpec(provider="lium", name="any"), PodSpec(provider="lium", name="dutch", country="NL")],
        [cheap, dear],
    )
    assert {name: offer.id for name, offer in found.items()} == {"any": "dear", "dutch": "cheap"}


@given(specs, offers)
def test_every_pod_gets_an_offer_that_fits_if_that_is_possible(specs, offers):
    choices = [candidates(spec, offers) for spec in specs]
    possible = any(
        all([found.id for found in chosen].count(one.id) <= one.num_available for one in chosen)
        for chosen in itertools.product(*choices)
    )
    found = assign(specs, offers)
    assert possible == (found.keys() == {spec.name for spec in specs})
    assert all(objections(spec, found[spec.name]) == [] for spec in specs if spec.name in found)
    given_out = [one.id for one in found.values()]
    assert all(given_out.count(one.id) <= one.num_available for one in offers)
