from __future__ import annotations

import itertools

from peers.net.dht.contacts import MAX_AT_ONCE, MAX_CONTACTS, Contacts

HOME, AWAY = ("/ip4/10.0.0.1/tcp/1",), ("/ip4/10.0.0.2/tcp/1",)


def test_only_contacts_that_are_not_reached_are_tried():
    contacts = Contacts({"a": HOME, "b": AWAY})
    assert contacts.lost({"a"}, now=0.0) == [("b", AWAY)]


def test_who_does_not_answer_is_asked_less_and_less_often_and_never_given_up():
    contacts, asked = Contacts({"a": HOME}), []
    for now in range(600):
        if lost := contacts.lost(set(), now):
            asked.append(now)
            contacts.tried([(peer_id, False) for peer_id, _ in lost], now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses[:5] == [5, 10, 20, 40, 60]
    assert set(pauses[4:]) == {60}


def test_who_has_answered_is_asked_soon_when_lost_again():
    contacts = Contacts({"a": HOME})
    contacts.tried([("a", False), ("a", False), ("a", True)], now=0.0)
    assert contacts.lost(set(), now=6.0)


def test_the_users_addresses_outlive_any_number_of_others_and_stay_as_they_were_given():
    contacts = Contacts({"given": HOME})
    for number in range(3 * MAX_CONTACTS):
        contacts.remember(f"peer {number}", AWAY)
    contacts.remember("given", AWAY)
    known = set()
    for now in range(MAX_CONTACTS):
        lost = contacts.lost(known, now=float(now))
        assert len(lost) <= MAX_AT_ONCE
        assert dict(lost).get("given", HOME) == HOME
        known |= {peer_id for peer_id, _ in lost}
    assert known == {"given", *(f"peer {number}" for number in range(2 * MAX_CONTACTS, 3 * MAX_CONTACTS))}
