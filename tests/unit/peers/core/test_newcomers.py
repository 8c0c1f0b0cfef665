"""Which state a newcomer takes, or a member that has restarted."""

from __future__ import annotations

import pytest

from peers.core import effects, events
from peers.core.chain import MAX_OTHERS, Fork
from peers.core.newcomer import has_majority
from peers.protocol.certificates import Certificate
from tests.unit.peers.core.driven import Driven, fetched_heads
from tests.unit.peers.core.made import chain_of, commit, genesis, with_settings, work

GENESIS = genesis("abc")


@pytest.mark.parametrize(
    ("holders", "other"),
    [
        ("abc", commit(GENESIS, "x", epoch=1 << 40)),
        ("a", commit(genesis("x"), "x", epoch=1 << 40)),
    ],
    ids=["that most of those who answer show", "that three have signed and one shows"],
)
def test_a_newcomer_does_not_believe_one_signer_of_a_late_epoch_against_what(holders, other):
    n = Driven("n")
    newest = commit(GENESIS, "abc")
    n.announce(newest, holders)
    n.announce(other, "x")
    n.run(10)
    assert fetched_heads(n) == [newest.head]


def test_a_newcomer_waits_for_nobody_else_once_most_of_the_roster_have_shown_their_chain():
    n = Driven("n")
    newest = commit(GENESIS, "abc")
    n.announce(newest, "ab")
    n.run(0.2)
    assert fetched_heads(n) == [newest.head]


@pytest.mark.parametrize(("roster", "show"), [("abc", "a"), ("x", "x")])
def test_a_newcomer_to_whom_one_peer_has_spoken_gives_the_others_time_to(roster, show):
    n = Driven("n")
    newest = commit(genesis(roster), roster)
    n.announce(newest, show)
    n.run(0.2)
    assert fetched_heads(n) == []
    n.run(10)
    assert fetched_heads(n) == [newest.head]


def test_a_newcomer_does_not_take_the_first_answer_where_most_show_something_else():
    n = Driven("n")
    n.mute = {"a", "b", "c"}
    n.announce(genesis("x", epoch=99), "x")
    newest = commit(GENESIS, "abc")
    n.announce(newest, "abc")
    n.run(5)
    assert n.of(effects.Fetch) == []
    n.mute = set()
    n.run(10)
    assert fetched_heads(n) == [newest.head]


def test_a_newcomer_finishes_its_download_while_commits_go_on():
    n = Driven("n")
    n.announce(GENESIS, "abc")
    n.run(5)
    assert fetched_heads(n) == [GENESIS.head]
    for certificate in chain_of(GENESIS, "abc", 10):
        n.announce(certificate, "abc")
        n.run(1.5)
    assert fetched_heads(n) == [GENESIS.head]
    n.fetched()
    n.run(3)
    assert len(n.of(effects.Fetch)[-1].path) == 10


def test_a_newcomer_finishes_its_download_though_a_stranger_pushes_all_other_certificates_out():
    n, honest = Driven("n"), commit(GENESIS, "abc")
    n.know([GENESIS])
    n.announce(honest, "abc")
    n.run(10)
    assert fetched_heads(n) == [honest.head]
    for k in range(1 + MAX_OTHERS // 32):
        way = [genesis(["s"], tokens=k)]
        way += chain_of(way[0], "s", 31)
        n.know(way)
        n.announce(way[-1], "s")
    n.run(2)
    n.fetched()
    assert n.peer.head == honest.head


def test_donors_that_never_deliver_do_not_keep_a_newcomer_out():
    n = Driven("n")
    sybils = [f"s{k}" for k in range(12)]
    n.announce(GENESIS, sybils)
    n.announce(GENESIS, "abc")
    n.run(3)
    asked = set()
    for _ in range(12):
        if n.peer.catch_up.target is None:
            n.run(3)
            continue
        donors = n.of(effects.Fetch)[-1].donors
        asked |= set(donors)
        n.feed(events.FetchFailed(GENESIS.head, "nothing came", frozenset(donors) & set(sybils)))
        n.run(3)
    assert asked & set("abc")


def test_a_newcomer_is_led_to_no_old_head_by_one_that_stays_there():
    way = chain_of(GENESIS, "bc", 25)
    newest = way[-1]
    # All heads of one chain have the same support, so the smallest hash is the liar's best choice.
    old = min(way[:-1], key=lambda certificate: certificate.head)
    a = Driven("a")
    a.know(way)
    a.announce(old, "z")
    a.announce(newest, "bc")
    a.run(5)
    assert fetched_heads(a) == [newest.head]


def made_up(before: Certificate, *, last: bool = False, salt: object = "") -> Certificate:
    """A commit that `z` has signed together with eight keys of its own making."""
    names = ["z", *(f"y{number}" for number in range(8))]
    works = {name: work(based_on=before.plan.epoch, last=True) for name in names[1:]} if last else {}
    return commit(before, names, works=works, off="abc", salt=salt)


@pytest.mark.parametrize("strangers", ["", "vwxy"], ids=["alone", "with strangers that show the same"])
def test_a_member_that_restarts_does_not_believe_one_member_that_has_gone_on_with_keys_of_its_own(strangers):
    three = genesis("abz")
    head = commit(three, "abz")
    a = Driven("a", settings=with_settings(galaxy_size=3))
    a.know([three])
    a.announce(head, "b")
    a.announce(made_up(head), "z" + strangers)
    a.run(5)
    assert fetched_heads(a) == [head.head]


@pytest.mark.parametrize("salt", range(4))
def test_nor_where_its_commit_is_beside_one_that_most_have_signed(salt):
    """Whichever of the two has the smaller hash, and even if the liar names a later attempt."""
    three = genesis("abz")
    one = commit(three, "abz")
    head = commit(one, "bz")
    a = Driven("a", settings=with_settings(galaxy_size=3))
    a.know([three, one])
    a.announce(head, "b")
    a.announce(commit(one, ["z", "y"], attempt=9, salt=salt), "vwxyz")
    a.run(5)
    assert fetched_heads(a) == [head.head]


def test_no_majority_has_signed_a_side_that_most_of_it_have_left():
    eight = genesis("abcdefgh")
    given_up = [commit(eight, "abcde")]
    later = {name: work(based_on=0, moves=9) for name in "cde"}
    for leavers, counts in (("", True), ("de", True), ("cde", False)):
        kept = [commit(eight, [*leavers, "f"], works=later)]
        assert has_majority(Fork(eight, tuple(given_up), tuple(kept)), "abcdefgh") is counts
    assert not has_majority(Fork(eight, tuple(kept), tuple(given_up)), "abcdefgh")


def test_nor_while_the_others_are_one_commit_apart():
    four = genesis("abcz")
    head = commit(four, "abcz")
    next_head = commit(head, "bcz")
    a = Driven("a", settings=with_settings(galaxy_size=3))
    a.know([four, head])
    a.announce(head, "b")
    a.announce(next_head, "c")
    a.announce(made_up(next_head, last=True), "z")
    a.run(5)
    assert fetched_heads(a)[0] in (head.head, next_head.head)


def test_where_most_are_one_commit_further_a_newcomer_begins_there():
    three = genesis("abc")
    head = commit(three, "abc")
    newest = commit(head, "abc")
    n = Driven("n")
    n.know([three, head])
    n.announce(head, "a")
    n.announce(newest, "bc")
    n.run(5)
    assert fetched_heads(n) == [newest.head]


@pytest.mark.parametrize(("founders", "dead"), [("ab", "b"), ("abcd", "cd")])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_stranger_at_an_old_head_holds_no_newcomer_back_from_a_chain_with_a_minoritys_commit(
    founders, dead, is_late
):
    left = founders.replace(dead, "")
    first = genesis(founders)
    path = [commit(first, founders)]
    path += chain_of(path[-1], left, 2)
    path.append(commit(path[-1], left + "uvw", off=dead))
    path += chain_of(path[-1], left + "uvw", 4)
    n = Driven("n", settings=with_settings(galaxy_size=3))
    n.know([first, *path])
    if not is_late:
        n.announce(path[0], "z")
    n.announce(path[-1], left + "uvw")
    n.run(3)
    if is_late:
        n.announce(path[0], "z")
        n.run(3)
    assert fetched_heads(n) == [path[-1].head]


@pytest.mark.parametrize(("founders", "dead"), [("az", ""), ("abz", "b")])
@pytest.mark.parametrize("newcomer", ["n", "u"])
def test_one_member_at_an_old_head_holds_nobody_back_from_what_another_has_gone_on_with(
    founders, dead, newcomer
):
    first = genesis(founders)
    path = [commit(first, founders)]
    path += chain_of(path[-1], "a", 3)
    path.append(commit(path[-1], "auvw", off=dead))
    path += chain_of(path[-1], "auvw", 4)
    n = Driven(newcomer, settings=with_settings(galaxy_size=3))
    n.know([first, *path])
    n.announce(path[0], "z", "waiting")
    n.announce(path[-1], set("auvw") - {newcomer})
    n.run(5)
    assert fetched_heads(n) == [path[-1].head]


def test_a_stranger_at_the_last_head_of_a_roster_that_is_gone_holds_nobody_back():
    first = genesis("a")
    old = commit(first, "a")
    path = [old, *chain_of(old, "cde", 5)]
    n = Driven("n", settings=with_settings(galaxy_size=3))
    n.know([first, *path])
    n.announce(old, "z")
    n.announce(path[-1], "cde")
    n.run(5)
    assert fetched_heads(n) == [path[-1].head]
