from __future__ import annotations

from peers.net.rate_limit import RateLimit, RateLimits


def test_a_steady_taker_within_the_rate_never_meets_the_limit():
    limit = RateLimit(100.0, 10.0)
    assert all(limit.take(message * 0.0101) for message in range(5000))


def test_a_burst_passes_and_a_flood_does_not_until_time_has_passed():
    limit = RateLimit(1.0, 8.0)
    assert [limit.take(100.0) for _ in range(10)] == [True] * 8 + [False] * 2
    assert not limit.take(100.9)
    assert limit.take(101.0)
    assert not limit.take(101.0)


def test_who_asks_in_vain_is_heard_as_soon_as_who_does_not():
    limit = RateLimit(1 / 15, 8.0)
    for _ in range(1000):
        limit.take(0.0)
    assert limit.take(15.0)


def test_larger_amounts_weigh_more_and_nothing_is_saved_beyond_a_burst():
    limit = RateLimit(200.0, 1000.0)
    assert [limit.take(50.0, 400.0) for _ in range(3)] == [True, True, False]
    assert not limit.take(1e6, 1001.0)


def test_each_key_has_a_limit_of_its_own_and_many_take_little_memory():
    limits = RateLimits(1.0, 2.0, max_keys=10)
    assert [limits.take("a", 0.0) for _ in range(3)] == [True, True, False]
    for number in range(1000):
        assert limits.take(f"stranger {number}", 0.0)
    assert len(limits._limits) == 10
