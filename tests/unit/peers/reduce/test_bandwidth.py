import socket
import threading
import time

import pytest

from peers.reduce.bandwidth import WINDOW_S, Bandwidth, LinkMeter, PeakRate
from peers.reduce.shares import bounds_of


def peak(*stretches, step_s=0.05):
    """The estimate for stretches of (seconds, bytes/s), sampled as the reduction does it."""
    meter, now, total = PeakRate(), 100.0, 0.0
    meter.add(now, total)
    for seconds, rate in stretches:
        for _ in range(round(seconds / step_s)):
            now, total = now + step_s, total + rate * step_s
            meter.add(now, total)
    return meter.bytes_per_s()


def test_a_steady_link_is_measured_as_it_is():
    assert peak((3.0, 1e8)) == pytest.approx(1e8)


def test_waiting_for_a_slow_member_does_not_count_against_the_link():
    assert peak((0.3, 2e6), (1.0, 1.25e8), (8.0, 1e7)) == pytest.approx(1.25e8)


def test_a_burst_shorter_than_the_window_counts_for_its_share_of_it_only():
    assert peak((2.0, 1e7), (0.05, 1e9), (2.0, 1e7)) == pytest.approx(1e7 + 0.05 * 0.99e9 / WINDOW_S, rel=0.1)


def test_a_round_that_is_shorter_than_the_window_says_nothing():
    assert peak((WINDOW_S / 2, 3e8), (WINDOW_S / 4, 1e8)) == 0.0
    assert peak((1.2 * WINDOW_S, 3e8), (0.1, 1e8)) == pytest.approx(3e8)
    assert peak() == 0.0
    assert PeakRate().bytes_per_s() == 0.0


def test_samples_far_apart_are_taken_as_they_come():
    assert peak((6.0, 5e7), step_s=2.0) == pytest.approx(5e7)


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        return sender, listener.accept()[0]


def test_bytes_that_only_wait_in_a_buffer_are_not_taken_for_the_links():
    sender, receiver = tcp_pair()
    with sender, receiver:
        meter = LinkMeter([sender], [receiver])
        meter.sample(0.0, 0, 0)
        # The samples claim a gigabyte, but the kernel has counted one megabyte.
        reader = threading.Thread(target=lambda: receiver.recv(1 << 20, socket.MSG_WAITALL))
        reader.start()
        sender.sendall(bytes(1 << 20))
        reader.join()
        deadline = time.monotonic() + 5
        while True:
            meter.sample(1.0, 1 << 30, 1 << 30)
            rate = meter.bytes_per_s()
            if rate >= 1 << 20 or time.monotonic() > deadline:
                break
        assert (1 << 20) <= rate < 1.01 * (1 << 20)


def test_sockets_that_keep_no_count_are_measured_by_our_own():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        meter = LinkMeter([ours], [theirs])
        meter.sample(0.0, 0, 0)
        meter.sample(1.0, 5000, 3000)
        assert meter.bytes_per_s() == 3000


def test_what_a_link_carries_for_others_counts_both_ways():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        meter = LinkMeter([ours], [theirs])
        meter.sample(0.0, 0, 0, 7000)
        meter.sample(1.0, 5000, 3000, 11000)
        assert meter.bytes_per_s() == 3000 + 4000


def test_who_forwards_for_two_others_on_equal_links_comes_to_own_all_so_that_nothing_is_left_to_forward():
    # Half of what goes over the middle member's link is its own; the others wait for it, with their links half idle.
    own, forwarded, others = 1.0, 1.0, 1.0
    assert bounds_of([own + forwarded, others, others], 1 << 22) == (0, 1 << 22, 1 << 22, 1 << 22)


def test_a_round_that_leaves_the_link_idle_is_not_taken_for_its_limit():
    bandwidth = Bandwidth()
    assert bandwidth.bytes_per_s == 0
    for seen in (0.0, 1e9):
        bandwidth.saw(seen)
        assert bandwidth.bytes_per_s == 0, "the first reduction that takes its time says nothing"
    for seen, known in ((80.0, 80), (100.0, 100), (0.0, 100), (20.0, 80), (101.0, 100), (21.0, 100)):
        bandwidth.saw(seen)
        assert bandwidth.bytes_per_s == known


def test_one_round_that_measures_too_much_does_not_count():
    bandwidth = Bandwidth()
    for seen in (1.0, 100.0, 101.0, 400.0, 99.0):
        bandwidth.saw(seen)
    assert bandwidth.bytes_per_s == 101


def test_a_link_that_has_become_slower_is_believed_after_some_rounds():
    bandwidth = Bandwidth()
    for seen in (1.0, *[100.0] * 5, *[25.0] * 3):
        bandwidth.saw(seen)
    assert bandwidth.bytes_per_s == 100
    bandwidth.saw(25.0)
    assert bandwidth.bytes_per_s == 25
