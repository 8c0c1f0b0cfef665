"""Runs that were founded separately, or have no known common ancestor: which of them gives way, and when."""

from __future__ import annotations

import pytest

from peers.core import effects, events
from peers.core.chain import MAX_OWN
from peers.protocol.certificates import Certificate
from peers.protocol.messages import Ask
from tests.unit.peers.core.driven import Driven, fetched_heads
from tests.unit.peers.core.made import chain_of, commit, digest, genesis, with_settings

GENESIS = genesis("abc")


def test_two_runs_that_were_founded_apart_become_one_and_do_not_change_places():
    mine, theirs = genesis("a"), genesis("b", epoch=1)
    a, b = Driven.at(mine, me="a"), Driven.at(theirs, me="b")
    a.announce(theirs, "b")
    b.announce(mine, "a")
    a.run(30)
    b.run(30)
    assert sorted([len(fetched_heads(a)) > 0, len(fetched_heads(b)) > 0]) == [False, True]


@pytest.mark.parametrize("founders", ["ab", "ba"])
@pytest.mark.parametrize("is_deserted", [False, True])
def test_of_two_founders_that_stand_alone_one_gives_way_whoever_follows_the_other(founders, is_deserted):
    """The hashes decide, but a founder with followers first waits for a commit with them. If the number of followers
    decided, two founders that each count a newcomer as the other's would change places. `is_deserted`: a second member
    has left the other run for this one."""
    left, right = founders
    mine, theirs = genesis(left), genesis(right + "c" * is_deserted, epoch=1)
    one, other = Driven.at(mine, me=left), Driven.at(theirs, "c" * is_deserted, me=right)
    one.announce(mine, "cx")
    one.announce(theirs, right)
    other.announce(mine, [left, "c", "x"])
    one.run(30)
    other.run(30)
    assert (fetched_heads(one), fetched_heads(other)) == ([], [mine.head] if mine.head < theirs.head else [])
    if theirs.head < mine.head:
        together = commit(mine, left + "cx")
        other.announce(together, left + "cx")
        other.run(30)
        assert fetched_heads(other) == [together.head]


@pytest.mark.parametrize("founders", ["ab", "ba"])
def test_a_founder_whose_followers_leave_its_genesis_gives_way_by_the_hash(founders):
    left, right = founders
    mine, theirs = genesis(left), genesis(right, epoch=1)
    one, other = Driven.at(mine, "x", me=left), Driven.at(theirs, "x", me=right)
    one.announce(theirs, right)
    other.announce(mine, left)
    one.run(30)
    other.run(30)
    assert fetched_heads(one) == fetched_heads(other) == []
    one.announce(commit(mine, left), "x")
    other.announce(commit(theirs, right), "x")
    one.mute = other.mute = {"x"}
    one.run(30)
    other.run(30)
    went = theirs.head in fetched_heads(one), mine.head in fetched_heads(other)
    assert went == (theirs.head < mine.head, mine.head < theirs.head)


@pytest.mark.parametrize(("founder", "others"), [("a", "bc"), ("b", "ac"), ("c", "ab"), ("d", "ab")])
def test_followers_of_a_founder_go_with_it_to_two_members_of_another_run(founder, others):
    mine, theirs = genesis(founder), genesis(others, epoch=1)
    x = Driven("x")
    x.announce(mine, founder)
    x.run(5)
    x.fetched()
    assert x.peer.head == mine.head
    x.announce(theirs, founder + others)
    x.run(30)
    assert fetched_heads(x) == [mine.head, theirs.head]


def test_a_newcomer_asks_where_its_run_came_from_once_it_sees_another_part_of_it():
    """It joined the part that one member had made alone, while two members go on with the other part."""
    pair = genesis("abc")
    alone = chain_of(pair, "c", 3)
    n = Driven("n")
    n.announce(alone[-1], "c")
    n.run(5)
    n.fetched()
    n.hush("c")
    together = chain_of(pair, "ab", 40)
    n.know([pair, *alone, *together])
    n.announce(together[-1], "abc")
    n.run(10)
    ask = next(s.message for s in n.of(effects.Send) if getattr(s.message, "head", "") == alone[1].head)
    assert isinstance(ask, Ask)
    assert n.of(effects.Fetch)[-1].path == tuple(together)


def test_a_founder_that_stands_alone_goes_to_two_members_of_another_run_whoever_follows_it():
    """The two members would not come to the founder."""
    mine, theirs = genesis("a"), genesis("bc", epoch=1)
    a, b = Driven.at(mine, me="a"), Driven.at(theirs, "c", me="b")
    a.announce(mine, "xyz")
    a.announce(theirs, "bc")
    b.announce(mine, "axyz")
    a.run(30)
    b.run(30)
    assert (fetched_heads(a), fetched_heads(b)) == ([theirs.head], [])


def test_one_that_founded_a_run_anew_from_the_checkpoint_of_another_becomes_one_with_it():
    two = genesis("ab")
    shared = commit(two, "ab")
    anew = genesis("b", epoch=1, parent=shared.head)
    a, b = Driven.at(two, "b", me="a"), Driven.at(anew, me="b")
    a.come_to([shared], "b")
    a.announce(anew, "b")
    b.know([two])
    b.announce(shared, "a")
    a.run(60)
    b.run(60)
    assert sorted([anew.head in fetched_heads(a), shared.head in fetched_heads(b)]) == [False, True]


def test_two_parts_of_one_run_become_one_though_one_of_them_knows_no_common_past():
    pair = genesis("ab")
    mine = commit(commit(pair, "b", off="a"), "bc")
    c = Driven("c")
    c.announce(mine, "b")
    c.run(5)
    c.fetched()
    assert c.peer.head == mine.head
    # `b`, which it had joined, has gone over to the other part, so that only `c` is left on this one.
    theirs = chain_of(pair, "ab", 20)
    c.know([pair, *theirs])
    for newest in theirs:
        c.announce(newest, "ab")
        c.run(8)
    assert fetched_heads(c)[1] == next(one.head for one in theirs[1:] if one.head < mine.head)


@pytest.mark.parametrize("own", [None, genesis("n")])
def test_of_two_runs_that_go_on_one_after_the_other_the_one_that_is_fetched_first_is_fetched(own):
    """`n` is a newcomer, or a founder that nobody followed; the two runs overtake each other in turn."""
    n = Driven("n") if own is None else Driven.at(own, me="n")
    runs = {names: [genesis(names)] for names in ("ab", "cd")}
    for names, way in runs.items():
        way += chain_of(way[0], names, 20)
        n.announce(way[1], names)
    n.run(20)
    first = fetched_heads(n)
    assert len(first) == 1
    for epoch in range(2, 12):
        for names, way in runs.items():
            # The two members announce the commit one after the other, and its certificate arrives a moment later.
            for name in names:
                n.mute = {name}
                n.announce(way[epoch], name)
                n.run(0.3)
            n.mute = set()
            n.run(2)
    assert fetched_heads(n) == first


@pytest.mark.parametrize("holders", ["z", "yz"])
@pytest.mark.parametrize("founders", ["a", "ab"])
def test_commits_are_not_given_up_to_strangers_though_nobody_else_is_left(founders, holders):
    pair = genesis(founders)
    a = Driven.at(pair, founders[1:])
    a.run(1)
    a.come_to([commit(pair, founders)], founders[1:] or "n")
    a.hush([*founders[1:], "n"])
    for name in [*founders[1:], "n"]:
        a.feed(events.Disconnected(name))
    a.run(30)
    head = a.peer.head
    unknown = commit(genesis(holders), holders, parent=digest("unknown"))
    lies = [unknown, *(commit(genesis(holders, tokens=salt), holders) for salt in range(3))]
    a.know([genesis(holders, tokens=salt) for salt in range(3)])
    for lie in lies:
        a.announce(lie, holders)
        a.run(60)
    assert a.peer.head == head
    assert not {lie.head for lie in lies} & set(fetched_heads(a))


def alone(me: str, others: str, commits: int, path: list[Certificate]) -> Driven:
    """A peer that joined at the end of `path` and made `commits` commits alone after the others were cut off."""
    driven = Driven(me, settings=with_settings(galaxy_size=3))
    driven.know(path)
    driven.announce(path[-1], others)
    driven.run(4)
    driven.fetched()
    driven.run(2)
    driven.hush(others)
    for other in others:
        driven.feed(events.Disconnected(other))
    driven.run(40)
    end = driven.peer.epoch + commits
    while driven.peer.epoch < end:
        driven.ready()
        driven.run(0.5)
        (reduce,) = driven.of(effects.Reduce)
        driven.effects.clear()
        driven.feed(events.Reduced(reduce.plan.digest, digest("a", me, end), digest("m", me, end)))
        driven.run(0.5)
    driven.known.clear()
    return driven


def test_strangers_take_no_commits_over_by_one_of_their_own_on_top_of_an_old_one():
    path = [genesis("abc"), *chain_of(genesis("abc"), "abc", 60)]
    a = alone("a", "bc", 5, path)
    assert not a.peer.chain.genesis
    lie = commit(path[5], "yz", off="abc")
    a.know([path[5], lie])
    a.announce(lie, "yz")
    a.run(60)
    assert fetched_heads(a) == []


@pytest.mark.parametrize("members", ["b", "bcd"])
def test_who_was_away_for_longer_than_certificates_are_kept_goes_back_to_its_members(members):
    path = [genesis("abcd"), commit(genesis("abcd"), "abcd")]
    a = alone("a", "bcd", MAX_OWN + 10, path)
    theirs = [path[-1]]
    for number in range(MAX_OWN + 10):
        off = set("abcd") - set(members) if number == 3 else ()
        theirs.append(commit(theirs[-1], members, off=off))
    a.know(theirs[-MAX_OWN:])
    a.announce(theirs[-1], members)
    a.run(30)
    went = fetched_heads(a) == [theirs[-1].head]
    # If only one peer is on the other side, it may come to this one instead.
    assert went or (members == "b" and a.peer.head < theirs[-1].head)


@pytest.mark.parametrize("salt", range(4))
def test_of_two_runs_the_one_without_commits_gives_way(salt):
    mine, theirs = genesis("a", tokens=salt), genesis("b", tokens=100 + salt)
    commits = chain_of(theirs, "b", 5)
    a = Driven.at(mine)
    a.know([theirs, *commits])
    a.announce(commits[-1], "b")
    a.run(30)
    assert commits[-1].head in fetched_heads(a)
    b = Driven.at(theirs, me="b")
    b.come_to(commits, "n")
    b.hush("n")
    b.feed(events.Disconnected("n"))
    b.run(30)
    b.effects.clear()
    b.announce(mine, "a")
    b.run(30)
    assert fetched_heads(b) == []


def test_a_former_member_at_an_old_head_opens_no_door_for_strangers_on_top_of_it():
    path = [genesis("ab"), *chain_of(genesis("ab"), "ab", 60)]
    a = alone("a", "b", 5, path)
    old = path[5]
    lie = commit(old, "yz", off="ab")
    a.know([old, lie])
    a.announce(old, "b")
    a.announce(lie, "yz")
    a.run(60)
    assert lie.head not in fetched_heads(a)


@pytest.mark.parametrize("strangers", ["", "vxy"])
def test_a_peer_goes_to_the_run_of_its_partner_though_strangers_have_a_larger_one(strangers):
    """The hashes decide which of the two goes to the other; a larger run of strangers changes nothing."""
    went = 0
    for salt in range(8):
        shared = genesis("ab", tokens=salt)
        anew = genesis("b", epoch=1, parent=shared.head, tokens=salt)
        a = Driven.at(shared, "b", me="a")
        a.know([shared, anew])
        if strangers:
            other = genesis(strangers, tokens=7)
            a.know([other])
            a.announce(other, strangers)
            a.run(5)
        a.announce(anew, "b")
        a.run(180)
        went += anew.head in fetched_heads(a)
    assert 0 < went < 8
