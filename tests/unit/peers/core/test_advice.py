"""What a peer says of rounds that take too much of the time, and that it says it once."""

from __future__ import annotations

import pytest

from peers.core.advice import Advice, Usual, advice_on, num_layers_of
from peers.core.schedule import Schedule

SCHEDULE = Schedule(local_steps=100)
MEGABIT = 1e6 / 8


def usual(epoch_s: float, round_s: float, mbps: float = 1000.0) -> Usual:
    return Usual(epoch_s=epoch_s, round_s=round_s, bytes_per_s=mbps * MEGABIT, num_peers=4)


def told(what: Usual, schedule: Schedule = SCHEDULE, *, codec: str = "fp32", num_layers: int = 12) -> str:
    return advice_on(what, schedule, codec=codec, sizes=[15_000_000], num_layers=num_layers)


@pytest.mark.parametrize("schedule", [SCHEDULE, Schedule(local_steps=100, num_fragments=2)])
def test_rounds_that_take_little_get_no_advice(schedule):
    assert told(usual(100, 5), schedule) == ""


def test_rounds_that_training_hides_get_none():
    assert told(usual(100, 50), Schedule(local_steps=100, overlap_steps=5)) == ""


def test_short_rounds_are_hidden_by_as_few_steps_as_is_known_to_be_harmless():
    assert told(usual(54, 4), Schedule(local_steps=50)).startswith(
        "rounds take 7% of the time: --hv.overlap-steps 4 hides them"
    )
    assert "--hv.overlap-steps" not in told(usual(60, 10), Schedule(local_steps=50))
    assert "--hv.overlap-steps" not in told(usual(3, 1), Schedule(local_steps=1))


def test_a_slow_link_is_told_the_least_lossy_codec_that_would_do():
    # 15M values, four peers: 720 Mbit in fp32 in each direction, 360 in fp16, 182 in int8.
    assert "--hv.compression fp16" in told(usual(100, 8, mbps=90))
    assert "--hv.compression int8" in told(usual(100, 16, mbps=45))
    assert "--hv.compression 1bit" in told(usual(100, 80, mbps=9))
    assert "--hv.compression topk" in told(usual(100, 80, mbps=4))
    assert "--hv.compression" not in told(usual(100, 16, mbps=45), codec="int8")
    assert "--hv.compression" not in told(usual(100, 8, mbps=0))


def test_fragments_divide_the_steps_and_a_model_without_layers_gets_none():
    assert "--hv.num-fragments 3 " in told(usual(100, 50), Schedule(local_steps=99))
    assert "--hv.num-fragments" not in told(usual(100, 50), Schedule(local_steps=97))
    assert "--hv.num-fragments" not in told(usual(100, 50), num_layers=0)
    assert "--hv.num-fragments" not in told(usual(100, 50), Schedule(local_steps=100, num_fragments=2))


def test_it_is_said_once_and_the_first_epoch_does_not_count():
    advice, found = Advice(), []
    for now in (0.0, 100.0, 110.0, 120.0, 130.0, 140.0, 150.0, 160.0, 170.0):
        found.append(advice.epoch_ended(now, round_s=2.0, bytes_per_s=1e6, num_peers=3))
    (seen,) = [each for each in found if each is not None]
    assert seen == Usual(epoch_s=10.0, round_s=2.0, bytes_per_s=1e6, num_peers=3)


def test_epochs_that_this_peer_had_no_part_in_do_not_count():
    advice, found = Advice(), []
    for now, num_peers in enumerate((3, 3, 0, 3, 1, 3, 3)):
        found.append(advice.epoch_ended(20.0 * now, round_s=2.0, bytes_per_s=1e6, num_peers=num_peers))
    assert [usual is not None for usual in found] == [False] * 6 + [True]
    assert found[-1].num_peers == 3


def test_layers_are_counted_by_the_numbers_in_names():
    names = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1, 10) for part in ("mlp", "norm")]
    assert num_layers_of([*names, "model.embed_tokens.weight"]) == 3
    assert num_layers_of(["weight", "bias"]) == 0


def test_a_run_of_less_than_a_minute_is_given_none():
    advice = Advice()
    found = [advice.epoch_ended(5.0 * now, round_s=2.0, bytes_per_s=1e6, num_peers=2) for now in range(20)]
    assert [usual is not None for usual in found].index(True) == 12
