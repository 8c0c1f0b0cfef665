from __future__ import annotations

from peers.round.offences import FIRST_TERM, FORGOTTEN_AFTER, LONGEST_TERM, MAX_OFFENDERS, TOLERATED, Offences


def test_a_few_spoilt_rounds_are_tolerated_and_the_next_bars_a_peer_for_a_while():
    offences = Offences()
    for epoch in range(TOLERATED):
        assert offences.note(["bad"], epoch) == {}
    assert not offences.is_barred("bad", TOLERATED)
    assert offences.note(["bad"], 5) == {"bad": FIRST_TERM}
    assert all(offences.is_barred("bad", epoch) for epoch in range(6, 6 + FIRST_TERM))
    assert not offences.is_barred("bad", 6 + FIRST_TERM)
    assert not offences.is_barred("good", 6)


def test_who_begins_again_is_left_out_for_longer_each_time():
    offences, epoch, terms = Offences(), 0, []
    for _ in range(TOLERATED + 12):
        if term := offences.note(["bad"], epoch).get("bad"):
            terms.append(term)
            epoch += term
        epoch += 1
    assert terms[:3] == [FIRST_TERM, 2 * FIRST_TERM, 4 * FIRST_TERM]
    assert terms[-1] == LONGEST_TERM


def test_who_is_proven_to_lie_is_out_at_once_and_for_as_long_as_it_gets():
    offences = Offences()
    assert offences.note(["bad", "shaky"], 3, proven=["bad"]) == {"bad": LONGEST_TERM}
    assert offences.is_barred("bad", 3 + LONGEST_TERM) and not offences.is_barred("shaky", 4)


def test_what_lies_long_back_is_forgotten():
    offences = Offences()
    for epoch in range(TOLERATED):
        offences.note(["shaky"], epoch)
    assert offences.note(["shaky"], TOLERATED + FORGOTTEN_AFTER) == {}
    assert offences.note(["shaky"], TOLERATED + FORGOTTEN_AFTER + 1) == {}


def test_a_flood_of_offenders_takes_bounded_memory():
    offences = Offences()
    offences.note((f"peer {number}" for number in range(10 * MAX_OFFENDERS)), 0)
    assert len(offences._records) == MAX_OFFENDERS
