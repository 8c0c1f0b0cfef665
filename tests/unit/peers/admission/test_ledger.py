from __future__ import annotations

import sqlite3

import pytest

from peers.admission import ledger as admission_ledger
from peers.admission.ledger import RankLedger
from peers.errors import UserError
from peers.protocol.admission import Taken

PEERS = [f"peer-{index}" for index in range(5)]


@pytest.fixture
def ledger(tmp_path):
    ledger = RankLedger(tmp_path / "ranks.sqlite")
    yield ledger
    ledger.close()


def test_ranks_are_given_from_zero_and_the_same_identity_gets_its_own_again(ledger):
    assert [ledger.assign(peer, present=PEERS) for peer in PEERS[:3]] == [0, 1, 2]
    assert ledger.assign(PEERS[1]) == 1


def test_a_wanted_rank_of_another_identity_is_taken_until_it_is_evicted(ledger):
    for _ in range(2):
        assert ledger.assign("holder", 7) == 7
    assert ledger.assign("claimant", 7) == Taken(holder="holder")
    assert ledger.assign("claimant", 7, evict="somebody else") == Taken(holder="holder")
    assert ledger.assign("claimant", 7, evict="holder") == 7
    assert ledger.assign("holder", 7) == Taken(holder="claimant")


def test_an_identity_that_asks_for_another_rank_gives_up_its_own(ledger):
    ledger.assign("a", 0)
    assert ledger.assign("a", 5) == 5
    assert ledger.holder(0) is None
    assert ledger.assign("b") == 0


def test_ranks_in_use_elsewhere_are_avoided_unless_asked_for(ledger):
    assert ledger.assign("a", avoid={0, 1}) == 2
    assert ledger.assign("a", avoid={2}) == 0
    assert ledger.assign("b", 1, avoid={1}) == 1


def test_of_ever_new_identities_those_with_the_lowest_ranks_are_remembered(ledger, monkeypatch):
    monkeypatch.setattr(admission_ledger, "MAX_HOLDERS", 4)
    assert [ledger.assign(peer, present=PEERS) for peer in PEERS[:3]] == [0, 1, 2]
    for number in range(20):
        rank = ledger.assign(f"stranger {number}", 100 + number if number % 2 else None, present=PEERS)
        assert ledger.holder(rank) == f"stranger {number}"
        assert rank in (3, 4, 100 + number)
    assert [ledger.assign(peer, present=PEERS) for peer in PEERS[:3]] == [0, 1, 2]
    assert ledger._db.execute("SELECT count(*) FROM holders").fetchone() == (4,)


def test_over_weeks_of_replacements_ranks_grow_to_twice_the_peers_that_are_present(ledger):
    here: list[str] = []
    for number in range(100):
        peer_id = f"pod {number}"
        here = here[-3:]
        answer = ledger.assign(peer_id, present=here)
        if isinstance(answer, Taken):
            assert answer.holder not in here
            answer = ledger.assign(peer_id, present=here, evict=answer.holder)
        assert answer < 8
        assert all(ledger.assign(other) < 8 for other in here)
        here.append(peer_id)
    # The one whose rank is given again has been away the longest.
    assert ledger.assign("another", present=here[-3:]) == Taken(holder="pod 92")


def test_a_newcomer_takes_nobodys_rank_when_all_come_back_one_after_another(ledger):
    ranks = {peer: ledger.assign(peer, present=PEERS[:number]) for number, peer in enumerate(PEERS)}
    assert ledger.assign("newcomer") == len(PEERS)
    assert {peer: ledger.assign(peer) for peer in PEERS} == ranks


def test_who_asks_again_costs_no_write(ledger):
    for _ in range(3):
        assert ledger.assign("a") == ledger.assign("a", 0) == 0
    assert ledger._db.total_changes == 2


def test_a_file_that_is_no_ledger_is_named(tmp_path):
    path = tmp_path / "ranks.sqlite"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(UserError, match=r"ranks\.sqlite"):
        RankLedger(path)


def test_a_second_process_may_look_while_the_ledger_is_open(tmp_path, ledger):
    ledger.assign("a")
    with sqlite3.connect(tmp_path / "ranks.sqlite") as other:
        assert other.execute("SELECT world_rank, peer_id FROM holders").fetchall() == [(0, "a")]
    other.close()
