"""Broken links: each side goes on if it may, and all are on one chain again once the links are repaired."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from diloco.sim.schedules import lost_pieces
from diloco.sim.truth import split_between
from peers.protocol.messages import Message, Propose, Status
from tests.unit.peers.core.swarm import Swarm, founded


def come_together(swarm: Swarm, seconds: float = 60.0) -> bool:
    epoch = max(swarm.epochs())
    is_one = swarm.run_until(lambda: len(swarm.heads()) == 1 and min(swarm.epochs()) > epoch, seconds)
    return is_one and lost_pieces(swarm) == ""


def gave_up(swarm: Swarm, names: str) -> int:
    return sum(len(swarm[name].forks) for name in names)


def test_the_side_without_a_majority_waits_and_takes_over_what_the_others_have_done():
    swarm = founded("abcde")
    swarm.partition("abc", "de")
    epoch = max(swarm.epochs())
    swarm.run(5)
    assert {swarm[name].machine.epoch for name in "de"} <= {epoch, epoch + 1}
    swarm.heal_partition("abc", "de")
    assert come_together(swarm)
    assert gave_up(swarm, "abc") == 0


SIDES = [("abc", "de"), ("ab", "cd"), ("a", "b"), ("a", "bc"), ("ab", "cd", "e"), ("a", "b", "c")]


# The split of five for 12 s is in the next test.
@pytest.mark.parametrize(
    ("sides", "seconds"), [*((sides, 12) for sides in SIDES[1:]), *((sides, 40) for sides in SIDES)]
)
def test_two_sides_or_more_become_one_chain(sides, seconds):
    swarm = founded("".join(sides))
    swarm.partition(*sides)
    swarm.run(seconds)
    assert seconds < 40 or min(swarm.epochs()) > 2
    swarm.heal_partition(*sides)
    assert come_together(swarm)


# After 33 and 38 s both sides have made equally many commits, after the other times not.
@pytest.mark.parametrize(
    ("sides", "seconds"),
    [(("abc", "de"), 12), (("abc", "de"), 33), (("abc", "de"), 36), (("bc", "a"), 36), (("bc", "a"), 38)],
)
def test_who_was_more_keeps_its_chain(sides, seconds):
    swarm = founded("".join(sorted("".join(sides))))
    swarm.partition(*sorted(sides))
    swarm.run(seconds)
    swarm.heal_partition(*sorted(sides))
    assert come_together(swarm)
    assert gave_up(swarm, sides[0]) == 0


def test_two_sides_become_one_chain_though_one_peer_has_gone_on_with_neither():
    swarm = founded("abcde")
    swarm.partition("ab", "cd", "e")
    swarm["e"].hang()
    swarm.run(40)
    swarm.heal_partition("ab", "cd", "e")
    assert come_together(swarm)


def test_a_link_that_breaks_again_and_again_leaves_one_chain():
    swarm = founded("abcd")
    for _ in range(6):
        swarm.partition("ab", "cd")
        swarm.run(9)
        swarm.heal_partition("ab", "cd")
        swarm.run(6)
    assert come_together(swarm)


@pytest.mark.parametrize(("names", "cut"), [("abc", "ab"), ("abc", "bc"), ("abc", "ac"), ("abcd", "ab")])
def test_one_broken_link_stops_nobody(names, cut):
    swarm = founded(names)
    swarm.cut(*cut)
    epoch = max(swarm.epochs())
    swarm.run(60)
    assert min(swarm.epochs()) >= epoch + 2
    swarm.heal(*cut)
    assert come_together(swarm)


def test_who_comes_back_alone_follows_the_peers_that_went_on_from_its_dead_partners_state():
    swarm = founded("ab")
    for name in "bklm":
        swarm.cut("a", name)
    swarm.run(40)
    # k, l and m get b's state, and it dies before a commit has taken them in.
    swarm.tamper = lambda sender, to, message: None if isinstance(message, Propose) else message
    for name in "klm":
        swarm.start(name)
    assert swarm.run_until(lambda: all(swarm[name].machine.head for name in "klm"), 20)
    swarm.kill("b")
    swarm.tamper = lambda sender, to, message: message
    swarm.run(60)
    for name in "klm":
        assert swarm[name].machine.epoch > swarm["a"].machine.epoch / 2
        swarm.heal("a", name)
    assert come_together(swarm)


def test_who_gave_up_a_longer_chain_stays_where_it_went_though_somebody_brings_that_chain_back():
    swarm = founded("abcghi")
    swarm.partition("abc", "ghi")
    swarm.run(30)
    split = split_between(swarm["a"].state, swarm["g"].state)
    winners, losers = ("abc", "ghi") if split.ours[0].head < split.theirs[0].head else ("ghi", "abc")
    for name in losers:
        swarm[name].train_in(1.0)
    # x joins the longer side, and is away when the others come together.
    for name in winners:
        swarm.cut("x", name)
    swarm.start("x")
    swarm.run(60)
    for name in losers:
        swarm.cut("x", name)
    swarm.heal_partition("abc", "ghi")
    swarm.run(20)
    assert [gave_up(swarm, side) for side in (losers, winners)] == [3, 0]
    assert swarm["x"].machine.epoch > swarm["a"].machine.epoch
    for name in "abcghi":
        swarm.heal("x", name)
    assert swarm.run_until(lambda: len(swarm.heads()) == 1, 30)
    assert [gave_up(swarm, side) for side in (losers, winners, "x")] == [3, 0, 1]


@pytest.mark.parametrize(
    ("says", "fetch_s"),
    [
        ("now this, now that", 1.0),
        ("now this, now that", 5.0),
        ("each the other", 2.0),
        ("each its own", 2.0),
    ],
)
def test_a_liar_that_says_it_is_on_this_side_and_on_that_does_not_keep_two_sides_apart(says, fetch_s):
    swarm = founded("abcdefz")
    swarm.liars = swarm.invariants._liars = frozenset("z")
    swarm.partition("abcz", "def")
    swarm.run(40)
    swarm.downloads.fetch_s = (fetch_s, fetch_s)

    def tamper(sender: str, to: str, message: Message) -> Message:
        is_one = swarm["a"].machine.head == swarm["d"].machine.head
        if sender != "z" or is_one or not isinstance(message, Status):
            return message
        own, other = ("a", "d") if to in "abc" else ("d", "a")
        by_time = "ad"[int(swarm.now / 2) % 2]
        there = {"each its own": own, "each the other": other}.get(says, by_time)
        peer = swarm[there].machine
        return replace(message, head=peer.head, epoch=peer.epoch, work=None, phase="training")

    swarm.tamper = tamper
    swarm.heal_partition("abcz", "def")
    swarm.run(60)
    before = {name: swarm[name].machine.epoch for name in "abcdef"}
    swarm.run(30)
    assert min(swarm[name].machine.epoch - before[name] for name in "abcdef") >= 3
    assert len({swarm[name].machine.head for name in "abcdef"}) == 1
