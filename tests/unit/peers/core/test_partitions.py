"""Broken links: each side goes on as it may, and all are on one chain after the links are well."""

from __future__ import annotations

import pytest

from peers.core import effects
from tests.unit.peers.core.pump import Pump
from tests.unit.peers.core.test_rounds import founded


def split(pump: Pump, *sides: str) -> None:
    pump.disconnect(
        *(
            one + other
            for n, side in enumerate(sides)
            for rest in sides[n + 1 :]
            for one in side
            for other in rest
        )
    )


def come_together(pump: Pump, seconds: float = 60.0) -> bool:
    epoch = max(pump.epochs())
    return pump.run(seconds, lambda: len(pump.heads()) == 1 and min(pump.epochs()) > epoch)


def gave_up(pump: Pump, names: str) -> int:
    return sum(tell.kind == "fork" for name in names for tell in pump[name].effects(effects.Tell))


def test_the_side_without_a_majority_waits_and_takes_over_what_the_others_have_done():
    pump = founded("abcde")
    split(pump, "abc", "de")
    epoch = max(pump.epochs())
    pump.run(5)
    assert {pump[name].peer.epoch for name in "de"} <= {epoch, epoch + 1}
    pump.mend()
    assert come_together(pump)
    assert gave_up(pump, "abc") == 0
    assert pump.signed_twice() == {}


@pytest.mark.parametrize("sides", [("abc", "de"), ("ab", "cd"), ("a", "b"), ("a", "bc")])
@pytest.mark.parametrize("seconds", [12, 40])
def test_two_sides_become_one_chain(sides, seconds):
    pump = founded("".join(sides))
    split(pump, *sides)
    pump.run(seconds)
    pump.mend()
    assert come_together(pump)
    assert pump.signed_twice() == {}
    # Who was more keeps its chain.
    if len(sides[0]) > len(sides[1]):
        assert gave_up(pump, sides[0]) == 0


@pytest.mark.parametrize("sides", [("ab", "cd", "e"), ("a", "b", "c")])
@pytest.mark.parametrize("seconds", [12, 40])
def test_three_or_more_sides_become_one_chain(sides, seconds):
    pump = founded("".join(sides))
    split(pump, *sides)
    pump.run(seconds)
    pump.mend()
    assert come_together(pump)
    assert pump.signed_twice() == {}


def test_two_sides_become_one_chain_though_one_peer_has_gone_on_with_neither():
    pump = founded("abcde")
    split(pump, "ab", "cd", "e")
    pump["e"].trains = False
    pump.run(40)
    pump.mend()
    assert come_together(pump)


def test_a_link_that_breaks_again_and_again_leaves_one_chain():
    pump = founded("abcd")
    for _ in range(6):
        split(pump, "ab", "cd")
        pump.run(9)
        pump.mend()
        pump.run(6)
    assert come_together(pump)
    assert pump.signed_twice() == {}


@pytest.mark.parametrize("cut", ["ab", "bc", "ac"])
def test_one_broken_link_of_three_peers_stops_nobody(cut):
    pump = founded("abc")
    pump.disconnect(cut)
    epoch = max(pump.epochs())
    pump.run(60)
    assert min(pump.epochs()) >= epoch + 2
    pump.mend()
    assert come_together(pump)


def test_two_runs_that_were_founded_apart_become_one():
    pump = Pump("", settings=founded("a").settings)
    pump.start("a")
    pump.run(12)
    pump.start("b")
    assert come_together(pump)
