"""Which state a peer takes: only one signed by a majority of those it can hear, and always one in the end."""

from __future__ import annotations

import tracemalloc

import pytest
from msgspec.structs import replace

from peers.core import catch_up, effects, events, health
from peers.core.catch_up import LEAST_ASKED, MAX_ASKED, MAX_DONORS, CatchUp
from peers.core.chain import MAX_OWN, Chain
from peers.core.timing import FETCH_S, Timing
from peers.core.turn import Turn
from peers.protocol.certificates import Certificate
from peers.protocol.messages import Ask, Certificates, decode_message
from peers.protocol.wire import encode
from tests.unit.peers.core.driven import Driven, fetched_heads
from tests.unit.peers.core.made import (
    SETTINGS,
    chain_of,
    commit,
    digest,
    genesis,
    status,
    with_settings,
    work,
)

GENESIS = genesis("abc")


def test_a_peer_takes_over_the_commit_that_a_majority_has_signed():
    a = Driven.at(GENESIS, "bc")
    newer = commit(GENESIS, "bc")
    a.announce(newer, "bc")
    a.run(2)
    (fetch,) = a.of(effects.Fetch)
    assert fetch.path == (newer,)
    assert fetch.donors and set(fetch.donors) <= {"b", "c"}
    assert fetch.timeout_s == pytest.approx(FETCH_S)
    assert a.peer.phase == "fetching"
    (adopt,) = a.of(effects.Adopt, a.fetched())
    assert adopt.certificate == a.peer.certificate == newer
    assert a.peer.epoch == 1


def test_it_asks_back_to_where_it_stands_and_fetches_by_the_whole_way():
    a = Driven.at(GENESIS, "bc")
    way = chain_of(GENESIS, "bc", 70)
    a.know(way)
    a.announce(way[-1], "bc")
    a.run(8)
    assert {ask.have for ask in a.of(Ask)} == {GENESIS.head}
    (fetch,) = a.of(effects.Fetch)
    assert fetch.path == tuple(way)


def test_nothing_is_adopted_before_its_certificates_are_here():
    a = Driven.at(GENESIS, "bc")
    a.mute = {"b", "c"}
    a.announce(commit(GENESIS, "bc"), "bc")
    a.run(10)
    assert a.of(effects.Fetch) == []
    # It keeps asking, but gives them time to answer between two requests.
    assert 8 <= len(a.of(Ask)) <= 24


def test_of_many_holders_a_few_are_asked_at_a_time_and_the_others_if_those_are_silent(monkeypatch):
    monkeypatch.setattr(catch_up, "ANSWERS_BYTES", 10_000)
    others = "bcdefghijklm"
    everybody = genesis("a" + others)
    newer = commit(everybody, others)
    a = Driven.at(everybody, others)
    a.mute = set(others) - {"k"}
    a.announce(newer, others)
    asked = [send.peer_id for send in a.of(effects.Send) if isinstance(send.message, Ask)]
    assert len(asked) == len(set(asked)) == LEAST_ASKED
    a.run(10)
    asked = [send.peer_id for send in a.of(effects.Send) if isinstance(send.message, Ask)]
    assert "k" in asked and len(asked) <= 2 * len(others)
    (fetch,) = a.of(effects.Fetch)
    assert fetch.path == (newer,)


def test_each_newcomer_downloads_from_a_few_fast_members_of_its_own():
    names = [f"p{n:03}" for n in range(200)]
    fast = set(names[150:])
    measured = {p: replace(work(), bandwidth=125e6 if p in fast else 2.5e6) for p in names}
    everybody = genesis(names)
    newest = commit(everybody, names, works=measured)
    measured_again = {p: replace(one, bandwidth=1.1 * one.bandwidth) for p, one in measured.items()}
    later = commit(newest, names, works=measured_again)
    drawn = []
    for me in "uvwxyz":
        timing = Timing.of(SETTINGS)
        swarm = health.Swarm(timing)
        for name in names:
            swarm.heard(name, status(newest), 0.0)
        turn, catch_up = Turn(0.0), CatchUp(me, SETTINGS, Chain(), swarm, timing)
        catch_up.fetch(turn, (newest,))
        for name in names:
            swarm.heard(name, status(later, sequence=2), 0.0)
        catch_up.fetch(turn, (later,))
        first, second = (effect.donors for effect in turn.effects if isinstance(effect, effects.Fetch))
        assert set(first) == set(second), "only those that it has fetched from have kept the commits since"
        drawn.append(frozenset(first))
    assert all(len(donors) == MAX_DONORS and len(donors & fast) > MAX_DONORS / 2 for donors in drawn)
    assert len(frozenset.union(*drawn)) > 3 * MAX_DONORS


PAIR, FOUR = genesis("ab"), genesis("abcd")

STRANGERS = [f"s{n}" for n in range(9)]


@pytest.mark.parametrize(
    ("roster", "certificate", "holders", "seconds"),
    [
        (GENESIS, commit(GENESIS, "bc", manifest=digest("another")), STRANGERS, 20),
        (GENESIS, commit(GENESIS, "z"), STRANGERS, 20),
        (GENESIS, commit(GENESIS, "xyz"), STRANGERS, 20),
        (GENESIS, commit(GENESIS, "xyz", epoch=1 << 40), STRANGERS, 20),
        (GENESIS, commit(genesis(["s1"]), ["s1"], parent=digest("nowhere"), epoch=10**6), STRANGERS, 20),
        (GENESIS, genesis(["s1"], epoch=10**6), STRANGERS, 20),
        (GENESIS, commit(GENESIS, "b"), "b", 30),
        (PAIR, commit(PAIR, "b", salt="evil"), "b", 5),
        (FOUR, commit(FOUR, "cd"), "cd", 5),
    ],
    ids=[
        *("another manifest", "a stranger", "strangers", "strangers of a late epoch"),
        *("strangers that come from nowhere", "a genesis of strangers"),
        *("one of three, the third being there", "one of two that are there", "two of four that are there"),
    ],
)
def test_what_no_majority_has_signed_is_not_taken(roster, certificate, holders, seconds):
    a = Driven.at(roster, "bcd"[: len(roster.plan.roster) - 1])
    a.run(3)
    a.announce(certificate, holders)
    a.run(seconds)
    assert a.of(effects.Fetch) == []
    assert a.peer.head == roster.head


def test_a_certificate_with_a_forged_signature_is_not_taken():
    a = Driven.at(GENESIS, "bc")
    honest = commit(GENESIS, "bc")
    forged = type(honest)(body=honest.body, signatures=honest.signatures[::-1])
    a.mute = {"b", "c"}
    a.announce(honest, "bc")
    a.known[honest.head], a.mute = forged, set()
    a.run(10)
    assert a.of(effects.Fetch) == []


def test_one_of_two_is_followed_by_the_other_that_was_away():
    pair = genesis("ab")
    a = Driven.at(pair, "b")
    a.hush("b")
    a.run(30)
    newer = commit(pair, "b")
    a.announce(newer, "b")
    a.run(5)
    assert fetched_heads(a) == [newer.head]


def test_one_of_three_is_followed_once_the_third_is_gone():
    a = Driven.at(GENESIS, "bc")
    a.hush("bc")
    a.run(30)
    newer = commit(GENESIS, "b")
    a.announce(newer, "b")
    a.run(20)
    assert fetched_heads(a) == [newer.head]


def test_one_that_was_away_is_not_followed_against_those_who_have_gone_on_together():
    four = genesis("abcd")
    a = Driven.at(four, "bcd")
    a.feed(events.WorkerGone())
    a.hush("b")
    a.run(30)
    together = commit(four, "cd")
    a.announce(commit(four, "b", salt="alone"), "b")
    a.announce(together, "cd")
    a.run(30)
    assert fetched_heads(a) == [together.head]


def test_a_minority_is_not_followed_because_the_third_has_just_lost_its_connection():
    a = Driven.at(GENESIS, "bc")
    a.hush("b")
    a.run(20)
    a.announce(commit(GENESIS, "b"), "b")
    a.run(1)
    a.feed(events.Disconnected("c"))
    a.hush("c")
    a.run(0.5)
    assert a.of(effects.Fetch) == []


def test_what_one_peer_does_not_know_may_be_known_to_another():
    a = Driven.at(GENESIS, "bc")
    way = chain_of(GENESIS, "bc", 70)
    a.others["z"] = {"certificate": None, "phase": "waiting"}
    for certificate in way:
        a.say("z", Certificates(head=certificate.head, certificates=()))
    a.know(way)
    a.announce(way[-1], "bc")
    a.run(10)
    assert fetched_heads(a) == [way[-1].head]


@pytest.mark.parametrize("num_made_up", [0, 2000])
def test_who_is_behind_by_more_than_others_keep_takes_what_its_roster_shows(num_made_up):
    """Also where a stranger has answered for many made-up heads that it has no certificates of them."""
    a = Driven.at(GENESIS, "bc")
    for n in range(num_made_up):
        a.say("z", Certificates(head=digest("made up", n), certificates=()))
    way = chain_of(GENESIS, "bc", MAX_OWN + 50)
    a.know(way[-MAX_OWN:])
    a.announce(way[-1], "bc")
    a.run(30)
    assert fetched_heads(a) == [way[-1].head]


def test_both_sides_of_a_broken_link_agree_whose_state_counts():
    four = genesis("abcd")
    one, other = commit(four, "ab"), commit(four, "cd")
    a, c = Driven.at(four, "bcd", me="a"), Driven.at(four, "abd", me="c")
    for driven, lost, own, mate in ((a, "cd", one, "b"), (c, "ab", other, "d")):
        driven.hush(lost)
        driven.run(20)
        driven.come_to([own], mate)
    a.announce(other, "cd")
    c.announce(one, "ab")
    a.run(20)
    c.run(20)
    winner = min(one, other, key=lambda certificate: certificate.head)
    assert [a.peer.catch_up.target, c.peer.catch_up.target] == (
        [None, winner] if winner is one else [winner, None]
    )


def test_both_sides_of_a_broken_link_do_not_change_places_where_one_of_them_is_just_making_a_commit():
    four = genesis("abcd")
    small, large = sorted((commit(four, "ab"), commit(four, "cd")), key=lambda first: first.head)
    mine, yours = small.plan.signers, large.plan.signers
    one, tried = [small, commit(small, mine)], [commit(large, yours, salt=n) for n in range(32)]
    other = [large, min(tried, key=lambda newest: newest.head)]
    # `newest` follows `one`, whose peer `me` has not adopted it yet.
    newest = commit(one[-1], mine)
    me, you = (
        went_on_with(four, *stands)
        for stands in ((mine[0], mine[1], yours, one), (yours[0], yours[1], mine, other))
    )
    me.know(other)
    me.announce(other[-1], yours)
    you.know([*one, newest])
    you.announce(newest, mine[1])
    me.run(5)
    you.run(5)
    assert not (me.peer.catch_up.target and you.peer.catch_up.target)


def went_on_with(start: Certificate, me: str, mate: str, lost: str, way: list[Certificate]) -> Driven:
    """The peer `me`, which has lost the peers in `lost` and has made the commits in `way` with `mate`."""
    driven = Driven.at(start, [mate, *lost], me=me)
    driven.hush(lost)
    driven.run(20)
    driven.come_to(way, mate)
    return driven


@pytest.mark.parametrize("came_from", [GENESIS, genesis("a")])
def test_who_comes_to_a_head_that_the_others_have_just_left_does_not_commit_on_it_alone(came_from):
    """Whether it was behind or comes from another run: the others left its old head long ago, but not the new one."""
    a, way = Driven.at(came_from, me="a"), chain_of(GENESIS, "bc", 2)
    a.know([GENESIS])
    a.mute = {"b", "c"}
    a.announce(way[0], "bc")
    a.run(20)
    a.mute = set()
    a.run(20)
    assert fetched_heads(a) == [way[0].head]
    a.ready()
    a.ready()
    # The others commit during the fetch, and their certificate arrives only after it.
    a.mute = {"b", "c"}
    a.announce(way[1], "bc")
    a.fetched()
    assert a.peer.head == way[0].head and a.peer.phase == "ready"
    a.run(5)
    assert a.of(effects.Reduce) == []


@pytest.mark.parametrize("answers", [True, False])
def test_nor_does_one_of_two_that_comes_to_what_the_other_made_alone_while_that_is_at_a_head_it_does_not_know(
    answers,
):
    start = genesis("ab")
    a, way = Driven.at(start), chain_of(start, "b", 2)
    a.announce(way[0], "b")
    a.run(20)
    assert fetched_heads(a) == [way[0].head]
    a.ready()
    a.ready()
    a.mute = {"b"}
    a.announce(way[1], "b")
    a.fetched()
    assert a.peer.head == way[0].head and a.peer.phase == "ready"
    a.run(5)
    assert a.of(effects.Reduce) == []
    if answers:
        a.mute = set()
        a.run(5)
        assert fetched_heads(a)[-1] == way[1].head
    else:
        a.hush("b")
        a.run(30)
        assert a.of(effects.Reduce)


def test_members_at_a_head_that_is_not_known_yet_object_to_what_another_has_made_up_alone():
    start = genesis("abcd")
    a, way = Driven.at(start, "bcd"), chain_of(start, "bcd", 2)
    a.announce(way[0], "bcd")
    a.run(20)
    a.mute = {"b", "c"}
    a.announce(way[1], "bc")
    alone = commit(way[0], "d", attempt=3)
    a.announce(alone, "d")
    a.fetched()
    assert a.peer.head == way[0].head
    a.run(10)
    assert fetched_heads(a) == [way[0].head]
    a.mute = set()
    a.run(5)
    assert fetched_heads(a)[-1] == way[1].head


def test_nobody_leaves_what_most_have_signed_for_what_one_member_has_made_up_alone():
    five = genesis("abcde")
    most = chain_of(five, "abcd", 2)
    a = Driven.at(five, "bcde")
    a.come_to(most, "bcd")
    first = commit(five, "e", off="abcd")
    tried = [commit(first, "e", salt=n) for n in range(64)]
    lie = min(tried, key=lambda certificate: certificate.head)
    assert lie.head < most[-1].head
    a.know([first])
    a.announce(lie, "e")
    a.run(10)
    assert lie.head not in fetched_heads(a)


def test_a_peer_that_is_behind_finishes_its_download_while_commits_go_on():
    a = Driven.at(GENESIS, "bc")
    way = chain_of(GENESIS, "bc", 10)
    for certificate in way:
        a.announce(certificate, "bc")
        a.run(1.5)
    assert fetched_heads(a) == [way[0].head]
    a.fetched()
    a.run(3)
    assert a.of(effects.Fetch)[-1].path == tuple(way[1:])


def test_a_fetch_that_failed_is_tried_again_after_a_moment():
    a = Driven.at(GENESIS, "bc")
    newer = commit(GENESIS, "bc")
    a.announce(newer, "bc")
    a.run(2)
    made = a.feed(events.FetchFailed(newer.head, "cut", frozenset("b")))
    assert a.of(effects.Fetch, made) == []
    assert a.peer.phase == "training"
    (again,) = a.of(effects.Fetch, a.run(3))
    assert again.path == (newer,)


def test_donors_that_have_gone_on_are_asked_for_the_next_head_at_once():
    a = Driven.at(GENESIS, "bc")
    newer, newest = way = chain_of(GENESIS, "bc", 2)
    a.announce(newer, "bc")
    a.run(2)
    assert a.of(effects.Fetch, a.feed(events.FetchFailed(newer.head, "it holds another", frozenset()))) == []
    failed_at, a.effects = a.now, []
    a.come_to(way, "bc")
    assert a.now == failed_at
    assert [fetch.path[-1] for fetch in a.of(effects.Fetch)] == [newest]


def test_an_outcome_of_another_fetch_says_nothing():
    a = Driven.at(GENESIS, "bc")
    newer = commit(GENESIS, "bc")
    a.announce(newer, "bc")
    a.run(2)
    a.feed(events.Fetched(digest("another")))
    a.feed(events.FetchFailed(digest("another"), "cut"))
    assert a.peer.phase == "fetching"
    assert a.peer.head == GENESIS.head


def test_certificates_are_handed_to_whoever_asks_for_them():
    a = Driven.at(GENESIS, "bc")
    way = chain_of(GENESIS, "bc", 3)
    a.come_to(way, "bc")
    (answer,) = a.of(Certificates, a.say("z", Ask(head=way[2].head, have=GENESIS.head)))
    assert answer.certificates == tuple(way)
    (answer,) = a.of(Certificates, a.say("z", Ask(head=digest("nowhere"))))
    assert (answer.head, answer.certificates) == (digest("nowhere"), ())


def test_an_answer_always_fits_into_a_message():
    names = [f"12D3KooW{n:044d}" for n in range(150)]
    large = genesis(["a", *names])
    a = Driven.at(large, names[:3])
    way = chain_of(large, names, 24)
    for certificate in way:
        a.come_to([certificate], names[:3])
    (answer,) = a.of(Certificates, a.say("z", Ask(head=way[-1].head, have=large.head)))
    assert answer.certificates[-1] == way[-1]
    assert 1 <= len(answer.certificates) <= 24
    assert decode_message(encode(answer)) == answer


def test_a_certificate_must_follow_its_parent():
    """Even if its signers are a majority: a peer that adopts it must be able to go on from it."""
    for wrong in ({"epoch": 7}, {"epoch": 0}, {"fragment": 3}, {"data_base": 0}):
        parent = genesis("abc", data_base=5)
        a = Driven.at(parent, "bc")
        a.announce(commit(parent, "bc", **wrong), "bc")
        a.run(5)
    assert a.of(effects.Fetch) == [], wrong


def test_heads_that_a_stranger_makes_up_do_not_keep_it_from_asking_for_others():
    a = Driven.at(GENESIS, "bc")
    for n in range(MAX_ASKED + 10):
        a.say("z", status(None, head=digest("made up", n), sequence=n + 2))
    newer = commit(GENESIS, "bc")
    a.announce(newer, "bc")
    a.run(5)
    assert fetched_heads(a) == [newer.head]


def test_a_long_chain_that_somebody_has_made_up_costs_little():
    three = genesis("abc")
    a = Driven.at(three, "bc")
    before = three
    for number in range(200):
        names = [f"{number}-{other}" for other in range(60)]
        before = commit(before, names, off=before.plan.roster_set)
        a.peer.chain.add(before)
    a.announce(before, "z")
    assert a.peer.chain.fork_to(before.head) is not None
    tracemalloc.start()
    a.announce(before, "z", attempt=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_certificates_that_do_not_lead_to_what_was_asked_for_are_not_kept():
    three = genesis("abc")
    a = Driven.at(three, "bc")
    a.mute.add("z")
    asked = digest("asked")
    a.announce(None, "z", head=asked)
    a.run(2)
    assert any(ask.head == asked for ask in a.of(Ask))
    junk = tuple(commit(genesis(f"q{number}"), [f"q{number}"]) for number in range(3))
    a.say("z", Certificates(head=asked, certificates=junk))
    assert [a.peer.chain.get(one.head) for one in junk] == [None, None, None]
    assert a.peer.swarm.strikes("z") == 1


def test_short_answers_of_one_peer_do_not_keep_the_longer_ones_of_others_out():
    first = genesis("abcz")
    path = chain_of(first, "bcz", 100)
    known = {one.head: one for one in [first, *path]}
    a = Driven.at(first, "bcz")
    a.mute |= set("bcz")
    a.announce(path[-1], "bcz")
    num_rounds, seen = 0, 0
    while not a.of(effects.Fetch):
        num_rounds += 1
        asks = [e for e in a.effects[seen:] if isinstance(e, effects.Send) and isinstance(e.message, Ask)]
        seen = len(a.effects)
        a.now += 0.05
        for ask in sorted(asks, key=lambda ask: ask.peer_id != "z"):
            answer, head = [], ask.message.head
            while len(answer) < (1 if ask.peer_id == "z" else 32) and head != ask.message.have:
                answer.append(known[head])
                head = known[head].plan.parent
            a.say(ask.peer_id, Certificates(head=ask.message.head, certificates=tuple(answer[::-1])))
        assert num_rounds < 10


def test_a_former_member_that_returns_holds_nobody_back_from_what_others_made_after_the_roster_was_gone():
    first = genesis("az")
    path = [commit(first, "az"), commit(commit(first, "az"), "a", off="z")]
    path += chain_of(path[-1], "uvw", 4)
    n = Driven("n", settings=with_settings(galaxy_size=3))
    n.know([first, *path])
    n.announce(path[0], "z")
    n.announce(path[-1], "uvw")
    n.run(5)
    assert fetched_heads(n) == [path[-1].head]


def test_nobody_follows_a_former_lone_member_that_signs_for_members_whom_nobody_has_heard():
    ghosts = ["ghost one", "ghost two", "ghost three"]
    alone = genesis(["f", *ghosts])
    first = commit(alone, "bcdf", off=ghosts)
    b = Driven("b")
    b.come_to([alone, first, *chain_of(first, "bcdf", 2)], "cdf")
    made_up = chain_of(alone, ["f", *ghosts], 20, salt="made up")
    b.know([alone, first, *made_up])
    b.announce(made_up[-1], "f")
    for _ in range(20):
        b.run(1)
    assert made_up[-1].head not in fetched_heads(b)


def test_whoever_is_heard_first_after_an_outage_cannot_undo_what_a_majority_has_signed():
    first = genesis("abcdf")
    ours = chain_of(first, "abcdf", 4)
    forged = next(
        made for salt in range(99) if (made := chain_of(first, "f", 20, salt=salt))[0].head < ours[0].head
    )
    a = Driven.at(first, "bcdf")
    a.come_to(ours, "bcdf")
    a.know(forged)
    others = dict(a.others)
    a.hush("bcdf")
    for _ in range(20):
        a.run(1)
    assert all(a.peer.swarm.is_gone(name) for name in "bcdf")
    a.announce(forged[-1], "f")
    a.run(3)
    others.pop("f")
    a.others |= others
    for _ in range(20):
        a.run(1)
    assert {forge.head for forge in forged}.isdisjoint(fetched_heads(a))


def test_members_that_begin_anew_count_in_a_fork_though_they_have_no_head():
    """Else one liar could take their place: `d` is all that is left of abcd, and `z` forks off an earlier head."""
    first = genesis("abcdz")
    way = [first, *chain_of(first, "abcd", 9)]
    forgeries = (commit(way[3], "z", attempt=7, salt=salt) for salt in range(1000))
    forged = next(forged for forged in forgeries if forged.head < way[4].head)
    d = Driven.at(first, "abcz", me="d")
    d.come_to(way[1:], "abc")
    d.announce(None, "abc", phase="waiting")
    d.announce(forged, "z")
    d.run(120)
    assert forged.head not in fetched_heads(d)


def test_a_peer_for_which_there_is_no_room_may_announce_a_known_head(monkeypatch):
    monkeypatch.setattr(health, "MAX_PEERS_HEARD", 2)
    a = Driven.at(GENESIS, "bc")
    a.say("x", status(GENESIS))
    assert not a.peer.swarm.was_heard("x")


def test_who_has_signed_a_commit_objects_to_a_minoritys_next_one_though_its_status_has_yet_to_come():
    start = genesis("abcd")
    last = commit(start, "bcd")
    others = commit(last, "d")
    a = Driven.at(start, "bcd")
    a.know([last, others])
    # The last that was heard of `b` and `c` is that they were here.
    a.announce(others, "d")
    a.run(3)
    assert fetched_heads(a) == []
    a.hush("bc")
    a.run(60)
    assert fetched_heads(a) == [others.head]
