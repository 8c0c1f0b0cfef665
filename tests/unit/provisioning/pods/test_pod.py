"""A provider's answer is checked when an Offer or a Pod is made from it."""

from __future__ import annotations

import math

import pytest

from provisioning.pods.pod import Offer, Pod, id_in

NO_PRICES = [math.nan, math.inf, -math.inf, -0.01]


@pytest.mark.parametrize("price", NO_PRICES)
def test_an_offer_without_a_real_price_is_none_and_such_a_price_of_a_pod_is_unknown(price):
    with pytest.raises(ValueError, match="price_per_hour cannot be"):
        Offer(id="1", provider="p", gpu_type="A100", gpu_count=1, price_per_hour=price)
    assert Pod(id="1", label="", is_ready=True, price_per_hour=price).price_per_hour is None
    assert Pod(id="1", label="", is_ready=True, price_per_hour=0.5).price_per_hour == 0.5


def test_without_an_id_there_is_no_pod():
    with pytest.raises(ValueError, match="no id"):
        Pod(id="", label="diloco-x", is_ready=True)
    assert [id_in("a"), id_in(17)] == ["a", "17"]
    for nothing in (None, "", True, ["a"], {}):
        with pytest.raises(ValueError, match="no id"):
            id_in(nothing)
