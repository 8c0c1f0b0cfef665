"""The arithmetic of the network benchmarks, and a swarm of the product's commands on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.light_loop import Loop
from benchmarks.overlap import slowest
from benchmarks.swarm_harness import Job, Seat, Swarm
from benchmarks.wan.cases import Case, cases, link, optimum_s
from diloco.sim.cost.links import TCP_PAYLOAD


def test_equal_links_need_the_time_of_a_reduce_scatter_and_an_all_gather() -> None:
    case = cases(["fp32"], quick=False)["gigabit"]
    sent_bytes = 2 * 3 / 4 * case.tensor_bytes
    assert optimum_s(case) == pytest.approx(sent_bytes / (TCP_PAYLOAD * 125e6))


def test_a_very_slow_peer_owns_nothing_and_still_has_to_send_and_get_the_whole() -> None:
    case = cases(["fp32"], quick=False)["uneven"]
    assert optimum_s(case) == pytest.approx(case.tensor_bytes / (TCP_PAYLOAD * 50e6 / 8))


def test_a_slightly_slower_peer_owns_less_so_that_all_end_together() -> None:
    links = (link(80, 10), link(100, 10), link(100, 10))
    case = Case(name="", links=links, megabytes=1, codecs=())
    level = optimum_s(case)
    rates = [TCP_PAYLOAD * item.up_bytes_per_s for item in links]
    owned = [level * rate / case.tensor_bytes - 1 for rate in rates]
    assert sum(owned) == pytest.approx(1) and min(owned) > 0


def test_a_stretch_of_steps_lasts_until_the_slowest_peer_is_done() -> None:
    assert slowest([[0, 1, 3], [0, 2, 3]]) == [2, 2]


@pytest.mark.exhaustive
def test_a_swarm_of_commands_averages_and_leaves_no_process(tmp_path: Path) -> None:
    job = Job(loop=Loop(numel=1000, max_epochs=2), local_steps=2)
    with Swarm(job, tmp_path, [Seat()] * 2) as swarm:
        for epoch in (1, 2):
            records = swarm.run_epoch(epoch)
            assert {len(record["contributors"]) for record in records} == {2}
        swarm.wait_for_end()
    assert all(peer.process.poll() is not None for peer in swarm.peers)
