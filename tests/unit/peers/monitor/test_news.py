from __future__ import annotations

import pytest

from peers.monitor.news import LOST_AFTER_S, Watcher
from peers.protocol.records import MAX_AGE_S, Announcement
from peers.timing import RECORD_TTL_S, announce_interval_s
from tests.support.announcements import announced


def record(rank: int, time: float, **changes) -> Announcement:
    fields = {"world_rank": rank, "tokens_per_s": 100.0, "time": time}
    return announced(f"12D3KooW-{rank:06d}", **{**fields, **changes})


def seen(*records: Announcement) -> dict[str, Announcement]:
    return {record.peer_id: record for record in records}


def test_joining_leaving_and_epochs_are_told_once():
    watcher = Watcher()
    assert watcher.update(seen(record(0, 1), record(1, 1)), 1) == [
        "peer 0 (…000000) joined, 1 peer",
        "peer 1 (…000001) joined, 2 peers",
    ]
    assert watcher.update(seen(record(0, 2), record(1, 2)), 2) == []
    assert watcher.update(seen(record(0, 3, epoch=1), record(1, 2)), 3) == ["epoch 1: 2 peers, 200 tokens/s"]
    assert watcher.update(seen(record(0, 4, epoch=1), record(1, 4, epoch=1)), 4) == []
    assert watcher.update(seen(record(0, 5, epoch=1), record(1, 5, epoch=1, state="leaving")), 5) == [
        "peer 1 (…000001) left at epoch 1, 1 peer"
    ]
    assert watcher.update(seen(record(0, 6, epoch=1), record(1, 5, epoch=1, state="leaving")), 6) == []


def test_a_record_missing_for_a_moment_is_no_news():
    watcher = Watcher()
    watcher.update(seen(record(0, 1)), 1)
    assert watcher.update({}, 2) == []
    assert watcher.update(seen(record(0, 3)), 3) == []


def test_a_record_that_is_never_renewed_is_a_peer_lost():
    watcher = Watcher()
    watcher.update(seen(record(0, 1)), 1)
    assert watcher.update(seen(record(0, 1)), 1 + LOST_AFTER_S) == []
    assert watcher.update(seen(record(0, 1)), 2 + LOST_AFTER_S) == [
        f"peer 0 (…000000) is lost: silent for {LOST_AFTER_S + 1:.0f} s, 0 peers"
    ]


def test_a_lost_peers_old_record_does_not_bring_it_back_but_a_new_one_does():
    watcher = Watcher()
    watcher.update(seen(record(0, 1)), 1)
    watcher.update(seen(record(0, 1)), 2 + LOST_AFTER_S)
    assert watcher.update(seen(record(0, 1)), 3 + LOST_AFTER_S) == []
    assert watcher.update(seen(record(0, 9)), 4 + LOST_AFTER_S) == ["peer 0 (…000000) joined, 1 peer"]


def test_a_quick_restart_is_told():
    watcher = Watcher()
    watcher.update(seen(record(0, 1)), 1)
    assert watcher.update(seen(record(0, 2, incarnation=2)), 2) == ["peer 0 (…000000) came back, 1 peer"]


@pytest.mark.parametrize("look_s", [1, 5, 12])
def test_of_two_hundred_peers_that_renew_their_records_in_turn_all_are_counted_and_none_is_lost(look_s):
    watcher, lines = Watcher(), []
    # Stores take as long as they may, and so do look-ups, at times.
    dht_s = 3 / 8 * RECORD_TTL_S
    renewed_s = announce_interval_s(200, is_early=False) + dht_s
    for now in range(0, 240, look_s):
        at = now - dht_s * (now % 50 >= 25)
        since_s = [(at + rank) % renewed_s for rank in range(200)]
        records = [record(rank, at - since_s[rank], epoch=int(at // 60)) for rank in range(200)]
        lines += watcher.update(seen(*records), now)
    assert lines[200:] == [f"epoch {epoch}: 200 peers, 20,000 tokens/s" for epoch in (1, 2, 3)]


def test_a_peer_that_is_refused_while_joining_is_no_news():
    watcher = Watcher()
    assert watcher.update(seen(record(0, 1, state="joining")), 1) == []
    assert watcher.update(seen(record(0, 1, state="joining")), 2 + LOST_AFTER_S) == []


def test_whoever_took_part_for_so_short_that_only_its_end_was_seen_has_come_and_gone():
    watcher = Watcher()
    watcher.update(seen(record(0, 1)), 1)
    watcher.update(seen(record(0, 2), record(1, 2, state="joining")), 2)
    gone = record(1, 3, epoch=3, state="leaving")
    assert watcher.update(seen(record(0, 3), gone), 3) == [
        "peer 1 (…000001) joined, 2 peers",
        "peer 1 (…000001) left at epoch 3, 1 peer",
    ]
    # The same farewell, repeated.
    again = record(1, 4, epoch=3, state="leaving")
    assert watcher.update(seen(record(0, 4), again), 4) == []
    assert watcher.update(seen(record(2, 5, state="leaving")), 5) == []


def test_two_that_leave_between_two_looks_were_there_together():
    watcher = Watcher()
    watcher.update(seen(record(0, 1)), 1)
    both = seen(record(0, 2, epoch=3, state="leaving"), record(1, 2, epoch=3, state="leaving"))
    assert watcher.update(both, 2) == [
        "peer 1 (…000001) joined, 2 peers",
        "peer 0 (…000000) left at epoch 3, 1 peer",
        "peer 1 (…000001) left at epoch 3, 0 peers",
    ]


def test_the_epochs_of_a_later_run_are_told_from_the_first_on():
    watcher = Watcher()
    watcher.update(seen(record(0, 1)), 1)
    watcher.update(seen(record(0, 2, epoch=40)), 2)
    watcher.update(seen(record(0, 3, epoch=40, state="leaving")), 3)
    assert watcher.update(seen(record(1, 4)), 4) == ["peer 1 (…000001) joined, 1 peer"]
    assert watcher.update(seen(record(1, 5, epoch=1)), 5) == ["epoch 1: 1 peer, 100 tokens/s"]


def test_the_epochs_of_a_run_are_told_that_the_same_peers_begin_anew():
    watcher = Watcher()
    watcher.update(seen(record(0, 1, epoch=40), record(1, 1, epoch=40)), 1)
    # Both were killed and started again before either counted as lost.
    watcher.update(seen(record(0, 2, incarnation=2), record(1, 2, incarnation=2)), 2)
    again = seen(record(0, 3, incarnation=2, epoch=1), record(1, 3, incarnation=2))
    assert watcher.update(again, 3) == ["epoch 1: 2 peers, 200 tokens/s"]


def test_an_epoch_is_told_once_also_where_all_who_reached_it_are_replaced():
    watcher = Watcher()
    watcher.update(seen(record(0, 1, epoch=40)), 1)
    watcher.update(seen(record(0, 2, epoch=40), record(1, 2, epoch=40)), 2)
    last = seen(record(0, 3, epoch=40, state="leaving"), record(1, 3, epoch=40))
    assert watcher.update(last, 3) == ["peer 0 (…000000) left at epoch 40, 1 peer"]


def test_peers_whose_records_have_long_expired_are_forgotten():
    watcher = Watcher()
    for rank in range(20):
        now = rank * MAX_AGE_S
        watcher.update(seen(record(rank, now, epoch=3)), now)
        watcher.update(seen(record(rank, now + 1, epoch=3, state="leaving")), now + 1)
    assert len(watcher._newest) == len(watcher._gone) == 2
