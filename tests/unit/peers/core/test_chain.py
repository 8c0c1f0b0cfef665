"""Which of two chains counts, and what a peer keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from peers.core.chain import MAX_OWN, RECENT_COMMITS, Chain, Fork, adoptable_prefix
from peers.core.chain import prefers_theirs as fork_rule
from tests.unit.peers.core.made import chain_of, commit, genesis, members, work

GENESIS = genesis("abcde")


def chain(*certificates) -> Chain:
    made = Chain()
    for certificate in certificates:
        made.move_to([certificate])
    return made


def fork(ours, theirs, ancestor=GENESIS) -> Fork:
    return Fork(ancestor, tuple(ours), tuple(theirs))


def prefers_theirs(fork: Fork, live="abcdefgxyz") -> bool:
    return fork_rule(fork, live.__contains__)


def smaller_first(*certificates):
    return sorted(certificates, key=lambda certificate: certificate.head)


def test_the_side_that_more_of_the_shared_roster_have_signed_wins():
    ours, theirs = [commit(GENESIS, "ab")], [commit(GENESIS, "cde")]
    assert prefers_theirs(fork(ours, theirs))
    assert not prefers_theirs(fork(theirs, ours))


def test_a_long_chain_of_few_loses_against_a_short_one_of_many():
    long, short = chain_of(GENESIS, "ab", 50), [commit(GENESIS, "cde")]
    assert prefers_theirs(fork(long, short))
    assert not prefers_theirs(fork(short, long))


def test_a_long_chain_whose_roster_is_full_of_sybils_loses():
    sybils = [f"s{n}" for n in range(20)]
    first = commit(GENESIS, "a", roster=members(["a", *sybils]))
    lying = [first, *chain_of(first, ["a", *sybils], 30)]
    assert prefers_theirs(fork(lying, [commit(GENESIS, "bc")]))
    assert not prefers_theirs(fork([commit(GENESIS, "bc")], lying))


def test_a_member_counts_for_the_side_on_which_it_signed_last():
    # All five signed attempt 0, but its leader withheld the certificate; the other four committed at attempt 1.
    withheld, gone_on = commit(GENESIS, "abcde"), commit(GENESIS, "bcde", attempt=1)
    assert prefers_theirs(fork([withheld], [gone_on]))
    assert not prefers_theirs(fork([gone_on], [withheld]))
    # If the leader that withheld it goes on alone, it is the only one that counts for that side.
    alone = [withheld, *chain_of(withheld, "a", 9)]
    assert prefers_theirs(fork(alone, [gone_on]))
    assert not prefers_theirs(fork([gone_on], alone))


def test_later_is_what_a_member_signed_after_more_moves_whatever_the_epoch_and_the_attempt():
    # `abc` went on for 20 epochs, then gave that up for what `de` had made, and signed there at earlier epochs.
    given_up, kept = chain_of(GENESIS, "abc", 20), [commit(GENESIS, "de")]
    kept.append(commit(kept[-1], "abcde", works={name: work(based_on=1, moves=21) for name in "abc"}))
    assert prefers_theirs(fork(given_up, kept))
    assert not prefers_theirs(fork(kept, given_up))
    # Nor does it help whoever comes back to what they gave up that it signs more there, alone.
    more = [*given_up, *chain_of(given_up[-1], "a", 9)]
    assert not prefers_theirs(fork(kept, more))
    assert prefers_theirs(fork([commit(GENESIS, "abc", attempt=9)], chain_of(GENESIS, "abc", 2)))


def test_members_that_are_not_here_do_not_count_whoever_signs_for_them():
    ghosts = ["g1", "g2", "g3"]
    alone = genesis(["f", *ghosts])
    first = commit(alone, "fbcd", off=ghosts)
    ours, theirs = [first, *chain_of(first, "fbcd", 5)], chain_of(alone, ["f", *ghosts], 30)
    assert not prefers_theirs(fork(ours, theirs, alone))
    assert prefers_theirs(fork(theirs, ours, alone))
    # If they run, they are as good as others: identities are not people.
    assert prefers_theirs(fork(ours, theirs, alone), live=["f", "b", "c", "d", *ghosts])
    # Nor are those a majority that were never heard, if members object.
    taken_in = commit(alone, ["f", *ghosts], roster=members(["f", *ghosts, "b", "c"]))
    assert (
        part_of(fork([], [commit(taken_in, ["f", *ghosts])], taken_in), me="b", stands="c", unheard=ghosts)
        == 0
    )
    assert part_of(fork([], [commit(taken_in, ["f", *ghosts])], taken_in), me="b", stands="c") == 1


def test_who_has_signed_two_certificates_of_one_head_and_attempt_counts_for_none():
    # `a` signed both sides, so it counts for neither: `b` is left on ours, `c` and `d` on theirs.
    ours, theirs = commit(GENESIS, "ab", salt=1), commit(GENESIS, "acd", salt=2)
    assert prefers_theirs(fork([ours], [theirs]))
    both = smaller_first(commit(GENESIS, "ab", salt=1), commit(GENESIS, "ac", salt=2))
    assert not prefers_theirs(fork([both[0]], [both[1]]))
    assert prefers_theirs(fork([both[1]], [both[0]]))


@pytest.mark.parametrize("salt", range(8))
def test_strangers_that_have_signed_do_not_count(salt):
    ours, theirs = [commit(GENESIS, "ab")], [commit(GENESIS, ["c", "x", "y", "z"], salt=salt)]
    assert not prefers_theirs(fork(ours, theirs))
    assert prefers_theirs(fork(theirs, ours))


@pytest.mark.parametrize("at_once", [True, False])
def test_a_peer_that_once_was_alone_cannot_rewrite_what_came_after_it_took_others_in(at_once):
    alone = genesis("a")
    before = [] if at_once else chain_of(alone, "a", 3, salt="alone")
    first = commit((before or [alone])[-1], "abc")
    ours = [*before, first, *chain_of(first, "abc", 2)]
    theirs = chain_of(alone, "a", 30, salt="anew")
    assert not prefers_theirs(fork(ours, theirs, alone))
    assert prefers_theirs(fork(theirs, ours, alone))
    # Nor with the signatures of peers that nobody hears.
    sybils = [f"s{n}" for n in range(20)]
    taken_in = commit(alone, ["a", *sybils], salt="anew")
    theirs = [taken_in, *chain_of(taken_in, ["a", *sybils], 30)]
    assert not prefers_theirs(fork(ours, theirs, alone))
    assert prefers_theirs(fork(theirs, ours, alone))


def test_nor_one_that_committed_alone_after_its_partner_had_died():
    first = commit(genesis("fa"), "fa")
    solo = [*chain_of(first, "f", 3)]
    solo.append(commit(solo[-1], "f", off="a"))
    grown = commit(solo[-1], "fbcde")
    ours = [*solo, grown, *chain_of(grown, "fbcde", 4)]
    theirs = chain_of(first, "f", 30, salt="anew")
    assert not prefers_theirs(fork(ours, theirs, first), live="bcdef")
    assert prefers_theirs(fork(theirs, ours, first), live="bcdef")
    # Nor where the partner went on alone, and took the others in.
    first = commit(genesis("f"), "fb")
    solo = [first, *chain_of(first, "b", 3)]
    grown = commit(solo[-1], "bcdeg", off="f")
    ours = [*solo, grown, *chain_of(grown, "cdeg", 4)]
    theirs = chain_of(genesis("f"), "f", 30, salt="anew")
    assert not prefers_theirs(fork(ours, theirs, genesis("f")), live="cdefg")
    assert prefers_theirs(fork(theirs, ours, genesis("f")), live="cdefg")
    # Nor where those others began from the state of a roster that was gone.
    solo.append(commit(solo[-1], "b", off="f"))
    grown = commit(solo[-1], "cdeg", off="b")
    ours = [*solo, grown, *chain_of(grown, "cdeg", 4)]
    assert not prefers_theirs(fork(ours, theirs, genesis("f")), live="cdefg")
    # But those that a minority took in do not count where the others of the roster went on.
    first = commit(genesis("abc"), "abc")
    grown = commit(first, "axyz")
    ours = [grown, *chain_of(grown, "axyz", 4)]
    assert prefers_theirs(fork(ours, chain_of(first, "bc", 2), first))


def test_members_that_are_gone_count_only_on_a_tie_of_those_that_are_here():
    """Those that come together later have not all heard them: they would decide differently, and stay apart."""
    first = genesis("abcd")
    ours, theirs = chain_of(first, "bc", 2), chain_of(first, "a", 30)
    assert prefers_theirs(fork(ours, theirs, first), live="a")
    assert not prefers_theirs(fork(ours, theirs, first), live="abc")
    # Two are left of the three: what two of them have signed is not undone by the third.
    assert not prefers_theirs(fork(ours, theirs, first), live="ab")
    assert prefers_theirs(fork(theirs, ours, first), live="ab")
    # Who was taken in since, and is gone, does not count on a tie either.
    alone = genesis("a")
    taken_in = commit(alone, "abc")
    ours, theirs = [taken_in, *chain_of(taken_in, "bc", 2)], chain_of(alone, "a", 30, salt="anew")
    assert prefers_theirs(fork(ours, theirs, alone), live="a")
    assert prefers_theirs(fork(ours, theirs, alone), live="ab")


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_tie_goes_to_the_smaller_hash_after_the_split_and_stays_so_as_the_chains_grow(length):
    small, large = smaller_first(commit(GENESIS, "ab"), commit(GENESIS, "cd"))
    names = {certificate.head: certificate.plan.signers for certificate in (small, large)}
    for grow_small, grow_large in itertools.product([0, length], repeat=2):
        one = [small, *chain_of(small, names[small.head], grow_small)]
        other = [large, *chain_of(large, names[large.head], grow_large)]
        assert prefers_theirs(fork(other, one))
        assert not prefers_theirs(fork(one, other))


@pytest.mark.parametrize("seed", range(40))
def test_of_two_sides_exactly_one_is_preferred_by_both(seed):
    """Otherwise each side would go over to the other, or both would stay."""
    rosters = ["".join(sorted(set("abcde"[(seed * k + k) % 5] for k in range(1, 4)))), "abcde"[seed % 5 :]]
    one = chain_of(GENESIS, rosters[0], 1 + seed % 3, attempt=seed % 2)
    other = chain_of(GENESIS, rosters[1], 1 + seed % 2, attempt=seed % 3, salt="other")
    assert prefers_theirs(fork(one, other)) is not prefers_theirs(fork(other, one))


@pytest.mark.parametrize("salt", range(8))
@pytest.mark.parametrize("lengths", [*itertools.product([1, 2], repeat=3)])
def test_of_three_sides_the_rule_names_one_that_no_other_beats(lengths, salt):
    sides = [
        chain_of(GENESIS, names, n, salt=salt) for names, n in zip(("ab", "cd", "e"), lengths, strict=True)
    ]
    unbeaten = [
        side
        for side in sides
        if not any(prefers_theirs(fork(side, other)) for other in sides if other is not side)
    ]
    assert len(unbeaten) == 1
    assert unbeaten[0] is not sides[2]


def test_a_peer_that_has_not_moved_since_the_split_prefers_whatever_somebody_has_signed():
    assert prefers_theirs(fork([], [commit(GENESIS, "ab")]))


def test_a_chain_keeps_its_newest_certificates_and_forgets_what_came_before():
    certificates = [GENESIS, *chain_of(GENESIS, "abc", MAX_OWN + 5)]
    kept = chain(*certificates)
    assert kept.head == kept.newest.head == certificates[-1].head
    assert kept.is_on_own_chain(certificates[-MAX_OWN].head)
    assert not kept.is_on_own_chain(certificates[-MAX_OWN - 1].head)
    assert kept.get(certificates[0].head) is None


def test_a_way_that_parts_from_a_forgotten_certificate_has_no_known_past_in_common():
    certificates = [GENESIS, *chain_of(GENESIS, "abc", MAX_OWN + 5)]
    kept = chain(*certificates)
    old, recent = commit(certificates[2], "de"), commit(certificates[-3], "de")
    kept.add(old)
    kept.add(recent)
    assert kept.fork_to(old.head) is None
    found = kept.fork_to(recent.head)
    assert found is not None
    assert found.ancestor == certificates[-3]
    assert found.ours == tuple(certificates[-2:])
    assert found.theirs == (recent,)


def test_where_a_piece_of_the_way_is_missing_the_fork_is_not_known():
    way = chain_of(GENESIS, "abc", 3)
    kept = chain(GENESIS)
    kept.add(way[0])
    kept.add(way[2])
    assert kept.fork_to(way[2].head) is None
    assert kept.path_back(way[2].head) == [way[2]]
    kept.add(way[1])
    found = kept.fork_to(way[2].head)
    assert found is not None
    assert (found.ours, found.theirs) == ((), tuple(way))


def test_who_goes_over_to_another_side_still_knows_the_one_that_it_came_from():
    ours, theirs = chain_of(GENESIS, "ab", 3), chain_of(GENESIS, "cde", 2)
    kept = chain(GENESIS, *ours)
    kept.move_to(theirs)
    assert kept.head == theirs[-1].head
    assert not kept.is_on_own_chain(ours[0].head)
    back = kept.fork_to(ours[-1].head)
    assert back is not None
    assert (back.ours, back.theirs) == (tuple(theirs), tuple(ours))
    kept.move_to(ours)
    assert kept.head == ours[-1].head


def test_an_answer_leads_from_what_the_other_has_to_what_it_wants():
    way = [GENESIS, *chain_of(GENESIS, "abc", 40)]
    kept = chain(*way)
    assert kept.leading_to(way[5].head, way[2].head, 32) == way[3:6]
    assert kept.leading_to(way[40].head, "", 32) == way[9:41]
    assert kept.leading_to(way[3].head, "", 32) == way[:4]
    assert kept.leading_to("0" * 64, "", 32) == []


def test_commits_that_a_member_is_not_in_are_counted_back_to_its_last():
    way = [GENESIS, *chain_of(GENESIS, "abcde", 2)]
    way += chain_of(way[-1], "abc", 3)
    kept = chain(*way)
    assert {name: kept.num_absent(name) for name in "abde"} == {"a": 0, "b": 0, "d": 3, "e": 3}


def test_a_commit_without_a_member_or_at_a_later_attempt_is_a_fault_until_it_is_long_ago():
    well = [GENESIS, *chain_of(GENESIS, "abcde", 3)]
    assert chain(GENESIS).is_faultless and chain(*well).is_faultless
    # A peer that joined later cannot know that there was no fault before.
    assert not chain(*well[1:]).is_faultless
    for faulty in (commit(well[-1], "abcd"), commit(well[-1], "abcde", attempt=1)):
        after = chain_of(faulty, "abcde", RECENT_COMMITS)
        assert not chain(*well, faulty, *after[:-1]).is_faultless
        assert chain(*well, faulty, *after).is_faultless


def test_what_is_added_twice_is_kept_once_and_what_others_send_is_bounded():
    kept = chain(GENESIS)
    kept.add(GENESIS)
    many = [commit(GENESIS, "x", salt=n, roster=members("x")) for n in range(1100)]
    for certificate in many:
        kept.add(certificate)
    assert sum(kept.get(certificate.head) is not None for certificate in many) <= 1024
    assert kept.newest == GENESIS


def test_what_strangers_send_takes_a_few_tens_of_megabytes_at_most():
    huge = members(f"{n:0128d}" for n in range(4000))
    kept = chain(GENESIS)
    sent = [commit(GENESIS, "x", salt=n, roster=huge) for n in range(90)]
    for certificate in sent:
        kept.add(certificate)
    held = [certificate for certificate in sent if kept.get(certificate.head) is not None]
    assert sum(len(certificate.body.signed_bytes) for certificate in held) < 50e6


def part_of(
    way: Fork,
    *,
    me: str,
    gone: str = "",
    stands: str = "",
    left_lately: str = "",
    unheard: Sequence[str] = (),
    has_worker: bool = True,
) -> int:
    """How many certificates of `way.theirs` the peer `me` may adopt. `stands`: the peers that may still object."""
    part = adoptable_prefix(
        way,
        me=me,
        has_worker=has_worker,
        was_heard=lambda peer_id: peer_id not in unheard,
        may_object=lambda peer_id, certificate: peer_id in stands,
        is_off_head=lambda peer_id, head: peer_id not in left_lately,
        is_gone=gone.__contains__,
        is_sound=lambda certificate, before: True,
    )
    return len(part)


def test_of_two_that_went_on_apart_without_any_of_the_roster_one_gives_way_though_the_roster_is_back():
    alone = commit(GENESIS, "ab", off="bcde")
    ours, theirs = (chain_of(alone, name, 3) for name in "xy")
    assert part_of(fork([], theirs, alone), me="x", gone="a") == 3
    assert part_of(fork([], theirs, alone), me="x") == 0
    # Now that `a` is back, it may object while it stands at the common ancestor, and no longer once it has left.
    assert part_of(fork(ours, theirs, alone), me="x", stands="a") == 0
    assert part_of(fork(ours, theirs, alone), me="x") == 3


def test_an_earlier_head_of_the_own_chain_is_a_fork_without_another_side():
    way = [GENESIS, *chain_of(GENESIS, "abc", 3)]
    kept = chain(*way)
    back = kept.fork_to(way[1].head)
    assert back is not None
    assert (back.ancestor, back.ours, back.theirs) == (way[1], tuple(way[2:]), ())
    kept.move_to((way[1],))
    assert kept.head == way[1].head and not kept.is_on_own_chain(way[2].head)
    again = kept.fork_to(way[3].head)
    assert again is not None and again.theirs == tuple(way[2:])
    kept.move_to((way[0],))
    assert kept.head == GENESIS.head


def test_where_newcomers_went_on_that_is_adopted_once_the_roster_has_signed_what_followed():
    pair = genesis("ab")
    ours = chain_of(pair, "b", 3)
    alone = commit(pair, "a", off="b")
    # `a`, the only member, is gone for a while, and the newcomer `n` goes on from its state.
    succession = commit(alone, "n")
    assert part_of(fork(ours, [alone, succession], pair), me="b") == 1
    joined = commit(succession, "an")
    assert part_of(fork(ours, [alone, succession, joined], pair), me="b") == 3


@pytest.mark.parametrize("salt", range(4))
def test_of_two_sides_one_gives_way_where_a_member_had_left_and_went_on_from_the_state_of_the_other_that_was_gone(
    salt,
):
    pair = genesis("ab")
    there = [last := commit(pair, "a", off="a", salt=salt), *chain_of(last, "a", 3)]
    alone = chain_of(pair, "b", 3)
    assert prefers_theirs(fork(alone, there, pair)) is not prefers_theirs(fork(there, alone, pair))
    assert part_of(fork(alone, there, pair), me="b") == len(there)
    assert part_of(fork(there, alone, pair), me="a") == len(alone)
    assert part_of(fork(alone, [last, *chain_of(last, "n", 3)], pair), me="b") == 1


@pytest.mark.parametrize("salt", range(4))
def test_of_two_sides_one_gives_way_where_newcomers_began_the_other_and_one_of_the_two_members_is_on_each(
    salt,
):
    """Whichever side the fork rule prefers, the other side may adopt it."""
    pair = genesis("ab")
    alone = chain_of(pair, "b", 3)
    succession = commit(pair, "n", salt=salt)
    joined = [succession, *chain_of(succession, "an", 3)]
    there, back = fork(alone, joined, pair), fork(joined, alone, pair)
    assert prefers_theirs(there) is not prefers_theirs(back)
    assert (part_of(there, me="b"), part_of(back, me="a"), part_of(back, me="n")) == (4, 3, 3)
    # What no member has signed is not adopted, nor is what `a` has signed while it may still object.
    assert part_of(fork(alone, [succession], pair), me="b") == 0
    assert part_of(there, me="b", stands="a") == 0


def test_a_member_is_not_followed_at_once_where_it_lets_a_newcomer_sign_first():
    pair = genesis("ab")
    succession = commit(pair, "n")
    way = fork([], [succession, commit(succession, "an")], pair)
    assert part_of(way, me="b") == 0
    assert part_of(way, me="b", has_worker=False, left_lately="a") == 0
    assert part_of(way, me="b", has_worker=False) == 2
