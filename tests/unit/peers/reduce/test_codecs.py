"""Every codec on any values: what comes back, how large it can be, and how a hostile payload is refused."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.sim.cost.machine import machine_of
from peers.errors import ProtocolError
from peers.protocol.codecs import BITS_BY_CODEC, CODEC_NAMES
from peers.reduce.codecs import codec_named, result_codec_named
from peers.reduce.codecs_common import PseudoGradient
from peers.reduce.codecs_topk import BLOCK_NUMEL, CONTRIBUTION_KEPT, RESULT_KEPT, SECTION_NUMEL
from peers.reduce.frames import HEADER
from peers.reduce.plan import CHUNK_NUMEL
from tests.support.coding import coded, decode, encode
from tests.support.commands import ROOT
from tests.support.exhaustive import exhaustive_but

INTEGERS = {"int8": (127, 256), "int4": (7, 128)}
"""The largest integer of each, and the number of values in a block."""
CODECS = {name: codec_named(name) for name in CODEC_NAMES} | {"topk results": result_codec_named("topk")}
WITH_SCALES = [name for name in CODECS if name not in ("fp32", "fp16", "bf16")]
SIZES = [0, 1, 2, 3, 127, 128, 129, 255, 257, 4095, 4096, 4097, 3 * 4096 + 255, CHUNK_NUMEL - 1, CHUNK_NUMEL]

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
usable = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60)
codec_name = st.sampled_from(list(CODECS))
few = settings(max_examples=40, deadline=None)


@st.composite
def vectors(draw):
    """Vectors of up to a few blocks and of any magnitude: mostly noise, with zeros, outliers and denormals."""
    numel = draw(st.integers(0, 3 * BLOCK_NUMEL))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(numel, generator=generator) * 2.0 ** draw(st.integers(-149, 55))
    if draw(st.booleans()):
        values[torch.rand(numel, generator=generator) < draw(st.floats(0, 1))] = 0
    for value in draw(st.lists(usable, max_size=4)):
        if numel:
            values[draw(st.integers(0, numel - 1))] = value
    return values


def encoded(name, values):
    return encode(CODECS[name], values)


def round_trip(name, values):
    return coded(CODECS[name], values)


def norm(values):
    return float(values.double().norm())


# All codecs


@given(vectors(), codec_name)
@few
def test_encoding_leaves_the_values_alone_and_gives_the_same_bytes_each_time(values, name):
    before = values.clone()
    payload = encoded(name, values)
    other_threads = []
    thread = threading.Thread(target=lambda: other_threads.append(encoded(name, before)))
    thread.start()
    thread.join()
    assert torch.equal(values, before)
    assert torch.equal(payload, other_threads[0])


@given(vectors(), codec_name, st.booleans())
@few
def test_a_contribution_is_encoded_like_its_values(values, name, with_residual):
    codec, noise = CODECS[name], torch.randn(values.numel(), generator=torch.Generator().manual_seed(1))
    local, residual = values * noise, values.flip(0) * 0.1 if with_residual else None
    chunk = PseudoGradient(values.numpy(), local.numpy(), residual.numpy() if with_residual else None)
    difference = values - local if residual is None else (values - local) + residual
    buffer = np.empty(codec.encoded_bytes(values.numel()), np.uint8)
    payload = codec.encode_contribution(chunk, np.empty(values.numel(), np.float32), buffer)
    assert payload.tobytes() == encode(codec, difference).numpy().tobytes()


@given(vectors(), st.sampled_from(sorted(n for n, c in CODECS.items() if c.divisible)), st.integers(1, 99))
@few
def test_the_payloads_of_parts_one_after_the_other_are_that_of_the_whole(values, name, numel):
    codec = CODECS[name]
    parts = [encode(codec, part).numpy().tobytes() for part in values.split(numel)]
    assert b"".join(parts) == encode(codec, values).numpy().tobytes()


@given(vectors(), codec_name, st.booleans())
@few
def test_losses_are_the_values_less_what_comes_back(values, name, with_residual):
    codec, numel = CODECS[name], values.numel()
    local, residual = values.flip(0) * 0.5, values * 0.1 if with_residual else None
    difference = values - local if residual is None else (values - local) + residual
    expected = difference - round_trip(name, difference)
    out = residual if residual is not None else torch.empty(numel)
    chunk = PseudoGradient(values.numpy(), local.numpy(), out.numpy() if with_residual else None)
    buffer = np.empty(codec.encoded_bytes(numel), np.uint8)
    codec.losses(chunk, np.empty(numel, np.float32), buffer, out.numpy())
    assert torch.equal(out, expected)


@given(vectors(), codec_name, st.booleans())
@few
def test_accumulating_a_payload_is_decoding_weighing_and_adding_it(values, name, is_first):
    codec, weight, numel = CODECS[name], np.float32(0.3), values.numel()
    payload, decoded = encode(codec, values), round_trip(name, values)
    total = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    expected = decoded * float(weight) + (0 if is_first else total)
    energy = codec.accumulate(
        payload.numpy(), weight, total.numpy(), np.empty(numel, np.float32), is_first=is_first
    )
    assert torch.equal(total, expected)
    assert energy == pytest.approx(norm(decoded) ** 2, rel=1e-5, abs=2.0**-140)


@given(vectors(), codec_name)
@few
def test_decoded_energy_stays_within_the_bound_of_its_codec(values, name):
    decoded = round_trip(name, values)
    assert torch.isfinite(decoded).all()
    assert norm(decoded) ** 2 <= CODECS[name].energy_bound(norm(values), values.numel())


@given(st.lists(usable, min_size=1, max_size=70), codec_name)
@few
def test_energy_bounds_hold_for_any_few_values(values, name):
    original = torch.tensor(values)
    assert norm(round_trip(name, original)) ** 2 <= CODECS[name].energy_bound(
        norm(original), original.numel()
    )


@given(st.floats(-40, 60), st.floats(0.4, 0.6), codec_name)
@few
def test_energy_bounds_hold_where_every_value_is_rounded_up(exponent, fraction, name):
    # One large value sets the scale of each block; the others lie about half a step above zero.
    for top, block in INTEGERS.values():
        values = torch.full((4 * block,), fraction * 2.0**exponent / top)
        values[::block] = 2.0**exponent
        assert norm(round_trip(name, values)) ** 2 <= CODECS[name].energy_bound(norm(values), values.numel())


@given(vectors(), codec_name)
@few
def test_what_is_lost_is_smaller_than_what_was_there(values, name):
    # A residual that could grow by itself would never be sent.
    decoded = round_trip(name, values)
    tiny = math.sqrt(values.numel()) * (2.0**-25 if name == "fp16" else 2.0**-126)
    if name != "fp16" or float(values.abs().sum()) < 65504:
        assert norm(values.double() - decoded.double()) <= norm(values) * (1 + 1e-6) + tiny


@pytest.mark.parametrize("numel", exhaustive_but((0, 1, 129, 4095, 4097, CHUNK_NUMEL), SIZES))
@pytest.mark.parametrize("name", CODECS)
def test_chunks_of_every_size_make_the_round_trip(name, numel):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    decoded = round_trip(name, values)
    assert decoded.shape == values.shape
    if numel:
        largest = int(values.abs().argmax())
        # The larger magnitude of 2bit is the mean of a fifth of the values; that of 1bit is the mean of all values.
        rel = {"2bit": 0.75, "1bit": 0.85}.get(name, 0.5)
        assert float(decoded[largest]) == pytest.approx(float(values[largest]), rel=rel)


@pytest.mark.parametrize("numel", [0, 1, 129, 4097])
@pytest.mark.parametrize("name", CODECS)
def test_zeros_come_back_as_zeros(name, numel):
    assert torch.count_nonzero(round_trip(name, torch.zeros(numel))) == 0


@pytest.mark.parametrize("numel", [1, 200, 5000])
@pytest.mark.parametrize("name", CODECS)
def test_nan_is_not_hidden_by_any_codec(name, numel):
    for position in {0, numel // 2, numel - 1}:
        values = torch.ones(numel)
        values[position] = math.nan
        if name in WITH_SCALES:
            with pytest.raises(ProtocolError, match="not finite"):
                round_trip(name, values)
        else:
            assert torch.isnan(round_trip(name, values)[position])


@pytest.mark.parametrize("value", [math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("name", WITH_SCALES)
def test_values_too_large_for_a_scale_are_refused_by_the_decoder(name, value):
    values = torch.ones(300)
    values[7] = value
    with pytest.raises(ProtocolError, match="not finite, or beyond"):
        round_trip(name, values)


@given(st.binary(min_size=0, max_size=1500), st.integers(0, 9000), codec_name)
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_either_values_or_a_protocol_error(garbage, numel, name):
    codec = CODECS[name]
    pattern = torch.tensor(list(garbage) or [0], dtype=torch.uint8)
    size = codec.encoded_bytes(numel)
    payload = pattern.repeat(size // len(pattern) + 1)[:size].clone()
    try:
        decoded = decode(codec, payload, numel)
    except ProtocolError:
        return
    assert decoded.numel() == numel
    assert name not in WITH_SCALES or torch.isfinite(decoded).all()


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("numel", [CHUNK_NUMEL, 100_000, 4096])
def test_both_directions_together_take_the_bits_that_are_said(name, numel):
    sent = [
        codec.encoded_bytes(numel) + HEADER.size for codec in (codec_named(name), result_codec_named(name))
    ]
    assert 8 * sum(sent) / (2 * numel) == pytest.approx(BITS_BY_CODEC[name], rel=0.05)


def test_every_table_has_every_codec():
    assert tuple(codec_named(name).name for name in CODEC_NAMES) == CODEC_NAMES
    assert tuple(BITS_BY_CODEC) == CODEC_NAMES
    assert list(BITS_BY_CODEC.values()) == sorted(BITS_BY_CODEC.values(), reverse=True)
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name in CODEC_NAMES:
        assert machine_of(2.0, name).reduce > 0
        assert any(line.startswith("| `") and f"`{name}`" in line for line in page.splitlines())


def test_an_unknown_codec_is_named_with_those_there_are():
    for named in (codec_named, result_codec_named):
        with pytest.raises(
            ValueError,
            match=f"no codec is named 'int3'; there are {', '.join(CODEC_NAMES)}",
        ):
            named("int3")


# Floats


@given(st.lists(finite, max_size=70))
@few
def test_fp32_brings_back_every_bit(values):
    original = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(round_trip("fp32", original).view(torch.int32), original.view(torch.int32))


@given(st.lists(finite, max_size=70))
@few
def test_fp16_rounds_like_ieee_and_saturates(values):
    original = torch.tensor(values, dtype=torch.float32)
    decoded = round_trip("fp16", original)
    assert torch.isfinite(decoded).all()
    assert torch.equal(decoded, original.clamp(-65504, 65504).half().float())


@given(st.lists(finite, max_size=70))
@few
def test_bf16_rounds_to_nearest_even_and_saturates(values):
    original = torch.tensor(values, dtype=torch.float32)
    bits = original.view(torch.int32).long() & 0xFFFF_FFFF
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF_0000).to(torch.int32).view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    assert torch.equal(round_trip("bf16", original), nearest.clamp(-largest, largest))


def test_fp16_keeps_its_denormals_and_extremes():
    values = torch.tensor([2.0**-24, -(2.0**-24), 2.0**-26, 65504.0, 7e4, -3e38, 0.0])
    expected = [2.0**-24, -(2.0**-24), 0.0, 65504.0, 65504.0, -65504.0, 0.0]
    assert round_trip("fp16", values).tolist() == expected


def test_fp32_and_bf16_keep_denormals():
    values = torch.tensor([1e-45, -1e-40, 3.38e38])
    assert torch.equal(round_trip("fp32", values), values)
    assert round_trip("bf16", values)[1] == pytest.approx(-1e-40, rel=0.2)


# Integers


@given(vectors(), st.sampled_from(list(INTEGERS)))
@few
def test_an_integer_is_off_by_half_a_step_at_most(values, name):
    top, block = INTEGERS[name]
    decoded = round_trip(name, values)
    for part, there in zip(values.split(block), decoded.split(block), strict=True):
        step = max(1.01 * max(part.abs().tolist(), default=0.0) / top, 2.0**-126)
        assert all(error <= 0.501 * step for error in (part.double() - there.double()).abs().tolist())


@pytest.mark.parametrize("name", INTEGERS)
def test_an_outlier_costs_its_own_block_alone(name):
    _, block = INTEGERS[name]
    values = torch.randn(4 * block + 3, generator=torch.Generator().manual_seed(0))
    disturbed = values.clone()
    disturbed[block + 1] = 1e6
    same = torch.equal(round_trip(name, values)[2 * block :], round_trip(name, disturbed)[2 * block :])
    assert same
    assert torch.equal(round_trip(name, values)[:block], round_trip(name, disturbed)[:block])


@pytest.mark.parametrize("name", INTEGERS)
def test_denormals_are_zero_to_an_integer_codec_and_spoil_nothing(name):
    values = torch.tensor([1e-40, -3e-45, 0.0])
    assert round_trip(name, values).tolist() == [0, 0, 0]


def test_int4_takes_every_pair_apart():
    levels = torch.arange(-7, 8, dtype=torch.float32)
    values = torch.cat([levels.repeat_interleave(15), levels.repeat(15)])
    decoded = round_trip("int4", values)
    step = float(decoded.max()) / 7
    assert torch.equal((decoded / step).round(), values)


# Two bits


@given(vectors())
@few
def test_two_bits_give_each_value_its_sign_and_the_mean_of_its_bin(values):
    decoded = round_trip("2bit", values)
    for start in range(0, values.numel(), 512):
        part, there = values[start : start + 512], decoded[start : start + 512]
        magnitudes = part.double().abs()
        is_larger = there.abs() > there.abs().min()
        for bin_ in (is_larger, ~is_larger):
            if bin_.any():
                assert there.abs()[bin_].max().item() == pytest.approx(
                    magnitudes[bin_].mean().item(), rel=1e-5, abs=2.0**-140
                )
        assert torch.equal(there < 0, (part < 0) & (there != 0))


def test_two_bits_lose_of_normal_values_what_the_best_quantizer_of_two_bits_loses():
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3))
    # Max (1960): a mean squared error of 0.1175 for four levels.
    assert norm(values - round_trip("2bit", values)) ** 2 / norm(values) ** 2 == pytest.approx(
        0.1175, rel=0.01
    )


def test_values_of_two_magnitudes_come_back_as_they_are_wherever_they_lie_in_their_byte():
    pairs = torch.tensor([1.0, -1.0, 5.0, -5.0])
    values = torch.cat([pairs.repeat(150), pairs.repeat_interleave(150)])[:1021]
    assert torch.allclose(round_trip("2bit", values), values, rtol=1e-6)


# One bit


@given(vectors())
@few
def test_one_bit_gives_each_value_its_sign_and_the_mean_magnitude_of_its_block(values):
    decoded = round_trip("1bit", values)
    for start in range(0, values.numel(), 512):
        part, there = values[start : start + 512], decoded[start : start + 512]
        mean = part.double().abs().mean().item()
        assert there.abs().unique().numel() == 1
        assert float(there[0].abs()) == pytest.approx(mean, rel=1e-5, abs=2.0**-140)
        assert torch.equal(torch.signbit(there), torch.signbit(part))


def test_one_bit_loses_of_normal_values_what_the_best_quantizer_of_one_bit_loses():
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(3))
    # Max (1960): a mean squared error of 1 - 2 / pi for two levels.
    lost = norm(values - round_trip("1bit", values)) ** 2 / norm(values) ** 2
    assert lost == pytest.approx(1 - 2 / math.pi, rel=0.01)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 63, 64, 65, 511, 513, 1021])
def test_signs_of_one_magnitude_come_back_as_they_are_wherever_they_lie_in_their_byte(numel):
    generator = torch.Generator().manual_seed(numel)
    values = torch.randint(0, 2, (numel,), generator=generator).float() * 6 - 3
    assert torch.equal(round_trip("1bit", values), values)


def test_what_zeros_among_other_values_gain_is_taken_back_the_next_time():
    values = torch.tensor([4.0, 0.0, -4.0, 0.0])
    decoded = round_trip("1bit", values)
    assert decoded.tolist() == [2, 2, -2, 2]
    assert round_trip("1bit", values - decoded).tolist() == [2, -2, -2, -2]


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf, 2.0**65])
def test_hostile_scales_of_one_bit_are_refused(scale):
    payload = encoded("1bit", torch.ones(600))
    payload[4:8] = torch.tensor([scale]).view(torch.uint8)
    with pytest.raises(ProtocolError, match="not finite, or beyond"):
        decode(CODECS["1bit"], payload, 600)


# Top-k


def reference_top_k(values, kept):
    """The indices that are kept: those of the largest magnitudes in each block, and the first among equal ones."""
    chosen = set()
    for start in range(0, values.numel(), BLOCK_NUMEL):
        block = values[start : start + BLOCK_NUMEL].abs().tolist()
        wanted = math.ceil(len(block) * kept / BLOCK_NUMEL)
        order = sorted(range(len(block)), key=lambda index: (-block[index], index))
        chosen |= {start + index for index in order[:wanted]}
    return chosen


@given(vectors(), st.sampled_from([("topk", CONTRIBUTION_KEPT), ("topk results", RESULT_KEPT)]))
@settings(max_examples=25, deadline=None)
def test_the_largest_are_kept_with_their_signs_and_all_else_is_zero(values, case):
    name, kept = case
    decoded, chosen = round_trip(name, values), reference_top_k(values, kept)
    for index in chosen:
        assert float(decoded[index]) * float(values[index]) >= 0
    left = torch.ones(values.numel(), dtype=torch.bool)
    left[list(chosen)] = False
    assert torch.count_nonzero(decoded[left]) == 0


def test_of_equal_magnitudes_the_first_are_kept():
    decoded = round_trip("topk", torch.tensor([1.0, -1.0]).repeat(BLOCK_NUMEL))
    assert decoded.nonzero().flatten().tolist() == [
        start + index for start in (0, BLOCK_NUMEL) for index in range(CONTRIBUTION_KEPT)
    ]


def test_each_block_has_two_magnitudes_that_are_the_means_of_what_they_stand_for():
    values = torch.zeros(2 * BLOCK_NUMEL)
    values[10:42], values[100:132] = 3.0, -1.0
    values[BLOCK_NUMEL + 5 : BLOCK_NUMEL + 69] = -5.0
    assert torch.equal(round_trip("topk", values), values)


def test_all_values_kept_may_lie_in_one_section():
    values = torch.zeros(BLOCK_NUMEL)
    values[2 * SECTION_NUMEL + 3 : 2 * SECTION_NUMEL + 3 + RESULT_KEPT] = -2.0
    assert torch.equal(round_trip("topk results", values), values)


@pytest.mark.parametrize("value", [2.0**-149, 1e-40])
def test_denormals_are_kept_like_all_others(value):
    values = torch.zeros(BLOCK_NUMEL)
    values[:CONTRIBUTION_KEPT] = value
    assert torch.equal(round_trip("topk", values), values)


def tampered(at, change, numel=BLOCK_NUMEL + 1000):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    payload = encoded("topk", values)
    payload[at] = change(payload[at])
    return decode(CODECS["topk"], payload, numel)


LEVELS, SECTIONS = 16, 20


def test_hostile_top_k_payloads_are_refused():
    infinite = torch.tensor([math.inf]).view(torch.uint8)
    with pytest.raises(ProtocolError, match="not finite"):
        tampered(slice(4, 8), lambda _: infinite)
    with pytest.raises(ProtocolError, match="not finite"):
        tampered(slice(0, 4), lambda _: -torch.tensor([1.0]).view(torch.uint8))
    with pytest.raises(ProtocolError, match="too few or too many"):
        tampered(LEVELS, lambda count: count + 1)
    with pytest.raises(ProtocolError, match="do not ascend"):
        tampered(slice(LEVELS + SECTIONS, LEVELS + SECTIONS + 2), lambda lows: lows.flip(0))
    with pytest.raises(ProtocolError, match="do not ascend"):
        tampered(slice(LEVELS + SECTIONS, LEVELS + SECTIONS + 2), lambda lows: lows[0].expand(2))


def test_an_index_beyond_the_last_block_is_refused():
    with pytest.raises(ProtocolError, match="do not ascend"):
        # The only section has one value, so only index 0 is valid.
        values = torch.ones(1)
        payload = encoded("topk", values)
        payload[9] = 1
        decode(CODECS["topk"], payload, 1)
