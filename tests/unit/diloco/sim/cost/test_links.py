"""How links are shared: against rates worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from diloco.sim.clock import Clock
from diloco.sim.cost.links import Link, fair_rates
from diloco.sim.cost.traffic import Activity, Traffic

INFINITY = float("inf")


def test_a_link_carries_the_payload_of_its_packets_and_no_more():
    link = Link(up_bits_per_s=8e6, down_bits_per_s=16e6, delay_s=0.0)
    assert link.up_bytes_per_s == pytest.approx(1e6 * 0.98 * 1448 / 1500)
    assert link.down_bytes_per_s == pytest.approx(2 * link.up_bytes_per_s)
    assert Link(up_bits_per_s=8e6, down_bits_per_s=8e6, delay_s=0.0, fill=1.0).up_bytes_per_s == 1e6


def test_two_flows_over_one_link_get_half_of_it_each():
    usages = [{(0, "up"): 1.0, (1, "down"): 1.0}, {(0, "up"): 1.0, (2, "down"): 1.0}]
    capacity = {(0, "up"): 10.0, (1, "down"): 100.0, (2, "down"): 100.0}
    assert fair_rates(usages, capacity, [INFINITY] * 2) == pytest.approx([5.0, 5.0])


def test_what_one_flow_cannot_use_goes_to_the_other():
    usages = [{(0, "up"): 1.0, (1, "down"): 1.0}, {(0, "up"): 1.0, (2, "down"): 1.0}]
    capacity = {(0, "up"): 10.0, (1, "down"): 2.0, (2, "down"): 100.0}
    assert fair_rates(usages, capacity, [INFINITY] * 2) == pytest.approx([2.0, 8.0])
    capacity[1, "down"] = 100.0
    assert fair_rates(usages, capacity, [3.0, INFINITY]) == pytest.approx([3.0, 7.0])


def test_three_links_in_a_chain_are_shared_max_min():
    # The textbook case: a long flow over both links, a short one on each, of 10 and 6.
    usages = [{(0, "up"): 1.0, (1, "up"): 1.0}, {(0, "up"): 1.0}, {(1, "up"): 1.0}]
    capacity = {(0, "up"): 10.0, (1, "up"): 6.0}
    assert fair_rates(usages, capacity, [INFINITY] * 3) == pytest.approx([3.0, 7.0, 3.0])


def test_an_activity_of_several_streams_gets_the_share_of_as_many_flows():
    # Three streams of one reduction and one download over the same uplink of 8: 2 for each stream.
    usages = [{(0, "up"): 3.0, (0, "down"): 3.0}, {(0, "up"): 1.0}]
    capacity = {(0, "up"): 8.0, (0, "down"): 100.0}
    assert fair_rates(usages, capacity, [INFINITY] * 2) == pytest.approx([2.0, 2.0])


def test_activities_share_a_link_only_while_both_are_under_way():
    clock, done = Clock(), {}
    traffic = Traffic(clock, {(0, "up"): 10.0})
    for name, size, begins_at in (("long", 100.0, 0.0), ("short", 20.0, 2.0)):
        activity = Activity({(0, "up"): 1.0}, size, lambda name=name: done.setdefault(name, clock.now))
        clock.at(begins_at, lambda activity=activity: traffic.start(activity))
    assert clock.run(lambda: len(done) == 2, until=1000.0)
    # 20 units alone, then 5 each per second: the short one takes 4 s; 60 are left then for 10 per second.
    assert done == pytest.approx({"short": 6.0, "long": 12.0})


def test_what_is_broken_off_never_ends_and_leaves_the_link_to_the_others():
    clock, done = Clock(), {}
    traffic = Traffic(clock, {(0, "up"): 10.0})
    kept, stopped = (
        Activity({(0, "up"): 1.0}, 100.0, lambda name=name: done.setdefault(name, clock.now))
        for name in ("kept", "stopped")
    )
    traffic.start(kept)
    traffic.start(stopped)
    clock.at(4.0, lambda: traffic.stop(stopped))
    assert not clock.run(lambda: len(done) == 2, until=1000.0)
    assert done == pytest.approx({"kept": 12.0})


def test_what_is_left_for_less_time_than_the_clock_can_tell_is_done():
    """After some simulated months a clock of seconds knows no nanoseconds any more."""
    clock, done, looks = Clock(), [], itertools.count()
    traffic = Traffic(clock, {(0, "up"): 10.0})
    for number in range(20):
        activity = Activity(
            {(0, "up"): 1.0}, 0.04 * (1 + number / 7), lambda number=number: done.append(number)
        )
        clock.at(1e7 + number, lambda activity=activity: traffic.start(activity))
    assert clock.run(lambda: len(done) == 20 or next(looks) > 1000, until=1e8)
    assert done == list(range(20))


def test_a_window_holds_back_a_stream_on_an_idle_link():
    clock, done = Clock(), {}
    traffic = Traffic(clock, {(0, "up"): 10.0})
    traffic.start(Activity({(0, "up"): 1.0}, 10.0, lambda: done.setdefault("it", clock.now), most=2.0))
    assert clock.run(lambda: bool(done), until=1000.0)
    assert done == pytest.approx({"it": 5.0})


def test_events_of_one_moment_come_in_the_order_they_were_made_and_cancelled_ones_never():
    clock, seen = Clock(), []
    for name in "abc":
        timer = clock.at(1.0, lambda name=name: seen.append(name))
        if name == "b":
            timer.cancel()
    clock.at(0.5, lambda: seen.append("first"))
    assert not clock.run(lambda: False, until=2.0)
    assert seen == ["first", "a", "c"]
