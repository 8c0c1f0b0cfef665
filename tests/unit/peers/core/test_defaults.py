"""The published figures as printed, and the values between and beyond them."""

import pytest

from peers.core.defaults import lighter_compression, outer_lr_for, outer_momentum_for, residual_decay_for
from peers.protocol.codecs import CODEC_NAMES

DENSE = set(CODEC_NAMES) - {"topk"}


@pytest.mark.parametrize(("num_peers", "expected"), [(1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8)])
def test_the_outer_lr_is_the_scaling_laws_paper_at_its_own_cadence(num_peers, expected):
    assert outer_lr_for(num_peers, 30) == expected


def test_the_outer_lr_rises_with_peers_and_with_h_and_stays_within_the_published_range():
    by_peers = [outer_lr_for(n, 30) for n in range(1, 65)]
    by_h = [outer_lr_for(4, h) for h in (1, 5, 10, 30, 100, 500)]
    assert by_peers == sorted(by_peers) and by_peers[0] == 0.4 and by_peers[-1] == 0.8
    assert by_h == sorted(by_h) and by_h[0] < by_h[3] == by_h[-1] == 0.6
    assert min(outer_lr_for(1, 1), by_h[0]) >= 0.2


def test_five_to_seven_peers_lie_between_four_and_eight():
    assert outer_lr_for(4, 30) < outer_lr_for(5, 30) < outer_lr_for(7, 30) < outer_lr_for(8, 30)


def test_streaming_and_top_k_have_rates_of_their_own():
    assert outer_lr_for(4, 100, num_fragments=4) == 0.4
    assert outer_lr_for(4, 100, compression="topk") == 1.0
    assert outer_lr_for(4, 100, num_fragments=4, compression="topk") == 1.0


def test_muon_has_its_own_outer_rate_and_momentum_by_peers():
    peers = (1, 4, 16, 64)
    assert [outer_lr_for(n, 30, optimizer="muon") for n in peers] == [0.7, 0.85, 1.0, 1.0]
    assert [outer_momentum_for("int8", n, optimizer="muon") for n in peers] == [0.6, 0.75, 0.9, 0.9]
    assert outer_lr_for(4, 30, compression="topk", optimizer="muon") == 1.0
    assert outer_momentum_for("topk", 4, optimizer="muon") == 0.0


def test_only_top_k_goes_without_outer_momentum():
    assert outer_momentum_for("topk") == 0.0
    assert {outer_momentum_for(name) for name in DENSE} == {0.9}


def test_only_top_k_forgets_and_by_the_step_where_epochs_are_short():
    assert {residual_decay_for(name, 6) for name in DENSE} == {1.0}
    assert residual_decay_for("topk", 30) == residual_decay_for("topk", 500) == 0.95
    assert residual_decay_for("topk", 6) ** 5 == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("codec", "factor", "lighter"),
    [
        ("fp32", 0.6, "fp16"),
        ("fp32", 0.2, "int4"),
        ("fp32", 1e-3, "topk"),
        ("int8", 0.9, "int4"),
        ("topk", 0.5, None),
        ("unknown", 0.5, None),
    ],
)
def test_the_least_lossy_codec_that_is_small_enough_is_recommended(codec, factor, lighter):
    assert lighter_compression(codec, factor) == lighter


def test_nonsense_is_refused():
    for call in (
        lambda: outer_lr_for(0, 30),
        lambda: outer_lr_for(2, 0),
    ):
        with pytest.raises(ValueError):
            call()
