from __future__ import annotations

from peers.net.refusals import MAX_PER_MINUTE, MAX_REMEMBERED, Refusals


def test_a_peer_that_knocks_again_and_again_is_told_of_once_for_each_reason():
    refusals = Refusals()
    told = [refusals.is_news("a", why, now) for now in range(100) for why in ("no token", "banned")]
    assert told == [True, True] + [False] * 198


def test_strangers_with_ever_new_keys_fill_neither_the_log_nor_the_memory():
    refusals = Refusals()
    told = sum(refusals.is_news(f"stranger {number}", "no token", number / 100) for number in range(12_000))
    assert told == 2 * MAX_PER_MINUTE
    assert refusals.take_untold() == 12_000 - told
    assert refusals.take_untold() == 0
    assert len(refusals._told) == MAX_REMEMBERED
