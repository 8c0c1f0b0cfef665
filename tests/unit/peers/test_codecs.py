import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.codecs import codec_named, codec_names

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def round_trip(name, values):
    codec = codec_named(name)
    # Longer than needed: a codec takes the first bytes of what it is lent.
    payload = codec.encode(values, torch.empty(codec.encoded_bytes(values.numel()) + 8, dtype=torch.uint8))
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.encoded_bytes(values.numel())
    return codec.decode(payload.clone(), torch.empty_like(values))


@given(st.lists(finite, max_size=70))
@settings(max_examples=60, deadline=None)
def test_fp32_brings_back_every_bit(values):
    original = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(round_trip("fp32", original).view(torch.int32), original.view(torch.int32))


@given(st.lists(finite, max_size=70))
@settings(max_examples=60, deadline=None)
def test_fp16_rounds_like_ieee_and_saturates(values):
    original = torch.tensor(values, dtype=torch.float32)
    decoded = round_trip("fp16", original)
    assert torch.isfinite(decoded).all()
    assert torch.equal(decoded, original.clamp(-65504, 65504).half().float())


@given(st.lists(finite, min_size=1, max_size=70), st.sampled_from(codec_names()))
@settings(max_examples=60, deadline=None)
def test_decoded_energy_stays_within_the_bound_of_its_codec(values, name):
    original = torch.tensor(values, dtype=torch.float32).double()
    norm = math.sqrt(float(original.dot(original)))
    decoded = round_trip(name, original.float()).double()
    assert float(decoded.dot(decoded)) <= codec_named(name).energy_bound(norm, original.numel())


def test_fp16_keeps_its_denormals_and_extremes():
    values = torch.tensor([2.0**-24, -(2.0**-24), 2.0**-26, 65504.0, 7e4, -3e38, 0.0])
    assert round_trip("fp16", values).tolist() == [
        2.0**-24,
        -(2.0**-24),
        0.0,
        65504.0,
        65504.0,
        -65504.0,
        0.0,
    ]


def test_fp32_keeps_denormals():
    values = torch.tensor([1e-45, -1e-40, 3.4e38])
    assert torch.equal(round_trip("fp32", values), values)


@pytest.mark.parametrize("name", codec_names())
def test_nan_is_not_hidden_by_any_codec(name):
    assert torch.isnan(round_trip(name, torch.tensor([float("nan")]))).all()


def test_an_unknown_codec_is_named_with_those_there_are():
    with pytest.raises(ValueError, match="no codec is named 'int3'; there are fp32, fp16"):
        codec_named("int3")
