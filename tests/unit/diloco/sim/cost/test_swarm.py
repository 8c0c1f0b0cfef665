"""A simulated swarm against what can be worked out with a pencil."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from diloco.sim.cost.links import Link
from diloco.sim.cost.machine import IDEAL, Machine
from diloco.sim.cost.scenario import Scenario, SimulatedPeer, step_seconds
from diloco.sim.cost.swarm import CostSwarm, simulate
from peers.core.schedule import AS_LONG_AS_THE_ROUND, Schedule
from peers.net.live_peer import silence_s
from peers.protocol.codecs import BITS_BY_CODEC
from peers.reduce.codecs import codec_named
from tests.support.optimal_shares import optimal_seconds

NUMEL = 1 << 22
ONE_WAY_S = 0.02
BYTES_PER_MEMBER = 700
"""Of a proposal and a certificate together, about."""
HUNDRED = Schedule(local_steps=100)


def link(mbps: float, delay_s: float = ONE_WAY_S / 2) -> Link:
    return Link(up_bits_per_s=1e6 * mbps, down_bits_per_s=1e6 * mbps, delay_s=delay_s, fill=1.0)


def scenario(
    num_peers: int = 4,
    mbps: float = 80.0,
    step_s: float = 0.1,
    machine: Machine = IDEAL,
    schedule: Schedule = HUNDRED,
    **values: object,
) -> Scenario:
    peer = SimulatedPeer(link=link(mbps), machine=machine, step_s=step_s, price_per_hour=2.0)
    named = {"num_params": NUMEL, "codec": "fp32", "num_epochs": 4, "tokens_per_step": 10}
    return Scenario(peers=(peer,) * num_peers, schedule=schedule, **{**named, **values})  # type: ignore[arg-type]


def reduce_s(num_peers: int, num_bytes: float, bytes_per_s: float) -> float:
    return 2 * (num_peers - 1) / num_peers * num_bytes / bytes_per_s


@pytest.mark.parametrize("num_peers", [2, 4, 14])
def test_a_blocking_round_takes_what_its_bytes_take_and_the_ways_of_its_messages(num_peers):
    figures = simulate(scenario(num_peers))
    least_s = reduce_s(num_peers, 4 * NUMEL, 10e6)
    # Shares are whole blocks, so not quite equal. The last contributions come before the last sums.
    assert figures.parts.reduce_s == pytest.approx(least_s + 2 * ONE_WAY_S, rel=6e-3)
    # Status, proposal, the attempt's name, then the reduction, vote, certificate: one way each. Proposals and
    # certificates name all members, and leave the leader one after the other.
    messages_s = (num_peers - 1) * num_peers * BYTES_PER_MEMBER / 10e6
    way_s = 5 * ONE_WAY_S + messages_s
    assert figures.epoch_s == pytest.approx(10.0 + figures.parts.reduce_s + way_s, rel=1e-3)
    # Some epochs are before links are measured, with shares to within one value.
    assert figures.utilisation == pytest.approx(10.0 / figures.epoch_s, rel=1e-3)
    assert figures.sent_bytes == pytest.approx(2 * (num_peers - 1) / num_peers * 4 * NUMEL, rel=1e-3)


@pytest.mark.parametrize("codec", [name for name, bits in BITS_BY_CODEC.items() if bits < 16])
def test_a_codec_makes_the_round_shorter_by_the_bytes_that_it_saves(codec):
    figures = simulate(scenario(codec=codec))
    # topk's averages hold more than what each peer sends, so it saves less there than its contributions do.
    least = codec_named(codec).encoded_bytes(NUMEL) / (4 * NUMEL)
    plain_s = reduce_s(4, 4 * NUMEL, 10e6)
    most = 2.2 * least if codec == "topk" else 1.01 * least
    assert least * plain_s < figures.parts.reduce_s - 2 * ONE_WAY_S < most * plain_s


def test_a_round_shorter_than_its_overlap_costs_no_time_at_all():
    schedule = Schedule(local_steps=100, num_fragments=2, overlap_steps=40)
    figures = simulate(scenario(schedule=schedule))
    assert figures.parts.round_s < 4.0
    assert figures.epoch_s == pytest.approx(5.0, rel=1e-6)
    assert figures.utilisation == pytest.approx(1.0, rel=1e-6)


def test_of_a_longer_round_what_the_overlap_leaves_is_waited_for():
    schedule = Schedule(local_steps=100, num_fragments=2, overlap_steps=10)
    figures = simulate(scenario(mbps=16.0, schedule=schedule, num_epochs=6))
    round_s = reduce_s(4, 2 * NUMEL, 2e6) + 7 * ONE_WAY_S
    assert figures.epoch_s == pytest.approx(5.0 + round_s - 1.0, rel=2e-3)
    # The leader of a commit trains on one way earlier than the others, and waits for them in the next round.
    assert figures.parts.blocked_s == pytest.approx(round_s - 1.0 + ONE_WAY_S, rel=2e-3)


def test_the_one_epoch_delay_hides_a_round_as_long_as_an_epoch():
    schedule = Schedule(local_steps=100, overlap_steps=99)
    figures = simulate(scenario(mbps=24.0, schedule=schedule))
    assert 8.0 < figures.parts.round_s < 9.9
    assert figures.utilisation == pytest.approx(1.0, rel=1e-6)


def test_where_the_overlap_is_left_open_nobody_waits_for_a_round_shorter_than_an_epoch():
    never_waits = Schedule(local_steps=100, overlap_steps=AS_LONG_AS_THE_ROUND)
    figures = simulate(scenario(mbps=24.0, schedule=never_waits))
    assert 8.0 < figures.parts.round_s < 9.9
    assert figures.utilisation == pytest.approx(1.0, rel=5e-3)


def test_nobody_that_has_steps_left_waits_for_a_round_longer_than_the_time_of_an_epoch():
    never_waits = Schedule(local_steps=100, overlap_steps=AS_LONG_AS_THE_ROUND, local_time_s=4.0)
    even = scenario(3, mbps=24.0, schedule=never_waits, num_uncounted=2)
    unlike = replace(even, peers=(*even.peers[:2], replace(even.peers[2], step_s=1.5)))
    figures = simulate(unlike)
    # The fast ones would be done after 10 s; the slow one hands over at the end of the step it is in.
    assert 7.0 < figures.parts.round_s < figures.epoch_s < 10.0
    assert figures.utilisation == pytest.approx(1.0, abs=0.05)


def test_uneven_links_are_used_as_well_as_the_shares_allow():
    even = scenario(4)
    mbps = (80.0, 80.0, 80.0, 30.0)
    uneven = replace(
        even, peers=tuple(replace(p, link=link(m)) for p, m in zip(even.peers, mbps, strict=True))
    )
    best_s = optimal_seconds([1e6 * m / 8 for m in mbps], 4 * NUMEL)
    took_s = simulate(uneven).parts.reduce_s - 2 * ONE_WAY_S
    assert best_s <= took_s < 1.12 * best_s
    # With equal shares the slowest link would determine the time.
    assert took_s < 0.8 * reduce_s(4, 4 * NUMEL, 30e6 / 8)


def test_processors_slower_than_the_link_set_the_pace():
    slow = replace(IDEAL, reduce=1e6, propose=4e6, apply=8e6, hand_over=16e6, take=16e6)
    figures = simulate(scenario(machine=slow))
    num_bytes = 4 * NUMEL
    assert figures.parts.reduce_s == pytest.approx(num_bytes / 1e6 + 2 * ONE_WAY_S, rel=2e-3)
    assert figures.parts.apply_s == pytest.approx(num_bytes / 8e6)
    in_turn_s = num_bytes * (2 / 16e6 + 1 / 4e6 + 1 / 1e6 + 1 / 8e6)
    assert figures.epoch_s == pytest.approx(10.0 + in_turn_s + 7 * ONE_WAY_S, rel=2e-3)


def test_a_window_bounds_what_one_connection_carries():
    # 3 streams from each peer, each with 20 kB per round trip of 40 ms: 0.5 MB/s, of a link of 10 MB/s.
    figures = simulate(scenario(window_bytes=20e3))
    assert figures.parts.reduce_s == pytest.approx(reduce_s(4, 4 * NUMEL, 1.5e6), rel=0.01)


def test_everybody_waits_for_the_slowest_and_its_tokens_count_for_more_of_nothing():
    even = scenario(3)
    slow = replace(even, peers=(*even.peers[:2], replace(even.peers[2], step_s=0.2)))
    figures = simulate(slow)
    assert figures.epoch_s == pytest.approx(20.0 + figures.parts.round_s + 3 * ONE_WAY_S, abs=0.1)
    assert figures.parts.wait_s == pytest.approx(10.0, abs=0.2)
    assert ONE_WAY_S <= figures.gathering_s <= 3 * ONE_WAY_S
    assert figures.utilisation == pytest.approx((10 + 10 + 20) / 3 / figures.epoch_s, rel=1e-3)


@pytest.mark.parametrize(
    "step_s", [(0.1, 1.3), (0.1, 1.3, 1.3), (0.1, 1.3, 1.3, 0.1)], ids=lambda each: str(len(each))
)
def test_nobody_trains_all_steps_of_the_slowest_in_the_first_epoch_if_its_length_is_learned(step_s):
    even = scenario(len(step_s), schedule=Schedule(local_steps=100, local_time_s=0.0))
    peers = tuple(replace(peer, step_s=each) for peer, each in zip(even.peers, step_s, strict=True))
    swarm = CostSwarm(replace(even, peers=peers))
    swarm.run()
    ends = [0.0, *(committed_at(swarm, epoch) for epoch in range(1, 6))]
    first, *later = (after - before for before, after in pairwise(ends))
    # 100 steps of the slow ones take 130 s, but at least eight of them are possible while the fast ones train 100.
    assert first < 15.0 and max(later) < 20.0
    steps = [record.steps for record in swarm.records if record.epoch == 1]
    assert sorted(steps)[-1] == 100 and min(steps) >= 7


def test_cost_and_speed_follow_from_time_tokens_and_prices():
    figures = simulate(scenario())
    assert figures.cost == pytest.approx(4 * 2.0 * figures.elapsed_s / 3600)
    assert figures.tokens_per_s == pytest.approx(4 * 1000 * figures.num_epochs / figures.elapsed_s)
    assert figures.cost_per_billion_tokens == pytest.approx(
        1e9 * figures.cost / (figures.tokens_per_s * figures.elapsed_s)
    )


def test_equal_seeds_give_equal_runs_and_others_give_others():
    shaken = scenario(6, jitter=0.05, mtbf_s=300.0, restart_s=30.0, num_epochs=12)
    first, again, other = (simulate(replace(shaken, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.elapsed_s != other.elapsed_s


def committed_at(swarm: CostSwarm, epoch: int) -> float:
    """The time at which the last member made this commit."""
    return max(record.at for record in swarm.records if record.epoch == epoch)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("at_s", [5.0, 11.0], ids=["training", "reducing"])
def test_a_lost_peer_costs_the_others_one_attempt_and_comes_back(rank, at_s):
    calm, swarm = CostSwarm(scenario(num_epochs=8)), CostSwarm(scenario(restart_s=20.0, num_epochs=8))
    epoch_s = calm.run().epoch_s
    swarm.clock.at(at_s + 2 * epoch_s, lambda: swarm.lose(rank))
    figures = swarm.run()
    assert (figures.losses.peers_lost, figures.losses.returns) == (1, 1)
    members = [sum(record.epoch == epoch for record in swarm.records) for epoch in range(1, 10)]
    assert members[:2] == [4, 4] and members[-1] == 4 and min(members) == 3
    late_s = committed_at(swarm, 3) - committed_at(calm, 3)
    if at_s < 10:
        # A peer that has been silent for four seconds is not waited for; rounds without it are a little shorter.
        assert figures.losses.failed_attempts == 0 and -1.0 < late_s < 0.5
    else:
        # The loss is noticed after the daemon's timeouts; the next attempt is without the peer.
        assert figures.losses.failed_attempts >= 1 and 1.0 < late_s < 25.0
    # While faults happen nobody waits for a commit: the epochs after it take as long as their steps.
    ends = [committed_at(swarm, epoch) for epoch in range(5, 10)]
    assert all(after - before == pytest.approx(10.0, abs=1.5) for before, after in pairwise(ends))
    assert figures.losses.lost_train_s == pytest.approx(at_s if at_s < 10 else 10.0, abs=0.5)
    assert figures.join_s >= 0.999 * 8 * NUMEL / 10e6
    assert figures.losses.downloaded_bytes >= 8 * NUMEL


def test_of_many_the_mesh_notices_a_lost_one_and_nobody_takes_another_for_lost():
    calm, swarm = (
        CostSwarm(scenario(40, num_epochs=4)),
        CostSwarm(scenario(40, restart_s=1000.0, num_epochs=4)),
    )
    usual = calm.run()
    reducing_at = 2 * usual.epoch_s - usual.parts.reduce_s / 2
    swarm.clock.at(reducing_at, lambda: swarm.lose(7))
    figures = swarm.run()
    assert figures.losses.failed_attempts == 1
    members = [sum(record.epoch == epoch for record in swarm.records) for epoch in range(1, 6)]
    assert members == [40, 39, 39, 39, 39]
    late_s = committed_at(swarm, 2) - committed_at(calm, 2)
    assert silence_s(40) - usual.parts.reduce_s < late_s < usual.parts.reduce_s + silence_s(40)


def test_all_lost_at_once_go_on_from_a_checkpoint():
    swarm = CostSwarm(scenario(restart_s=20.0, num_epochs=6))
    for rank in range(4):
        swarm.clock.at(30.0 + rank, lambda rank=rank: swarm.lose(rank))
    figures = swarm.run()
    assert figures.losses.peers_lost == 4
    assert swarm.newest.plan.epoch == 7
    assert sum(record.epoch == 7 for record in swarm.records) == 4


def test_two_hundred_peers_take_seconds_of_a_processor():
    began_s = time.thread_time()
    figures = simulate(scenario(200, mbps=500.0, codec="int8", jitter=0.01, num_epochs=1))
    # On idle cores it takes about 4 s, half that for each of its two epochs.
    assert time.thread_time() - began_s < 20.0
    assert figures.members == 200
    # Every vote goes to one leader and every commit comes from it: that takes its link a while.
    assert figures.parts.vote_s > 2 * ONE_WAY_S


def test_a_step_takes_six_operations_for_each_weight_and_token():
    assert step_seconds(10e9, 1e6, 8 * 989e12, 0.4) == pytest.approx(18.96, rel=1e-3)
