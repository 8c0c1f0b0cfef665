import threading

import pytest

from diloco.data.batches import Prefetched


def test_items_arrive_in_order_and_once():
    with Prefetched(iter(range(100)), depth=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []


def test_an_error_is_raised_where_its_item_would_have_been():
    def failing():
        yield 1
        raise OSError("disk gone")

    with Prefetched(failing()) as items:
        reader = iter(items)
        assert next(reader) == 1
        with pytest.raises(OSError, match="disk gone"):
            next(reader)
        with pytest.raises(OSError, match="disk gone"):
            next(iter(items))


def test_leaving_early_ends_the_thread():
    before = set(threading.enumerate())
    with Prefetched(iter(int, 1)) as items:
        assert next(iter(items)) == 0
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before


def test_reading_goes_on_while_nobody_asks():
    read = threading.Semaphore(0)

    def counted():
        for number in range(10):
            read.release()
            yield number

    with Prefetched(counted(), depth=2) as items:
        # Two that wait and one in hand.
        for _ in range(3):
            assert read.acquire(timeout=10)
        assert list(items) == list(range(10))
