"""Named faults, with real peers in the virtual runtime. Every invariant is checked after every event of a peer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from diloco.sim.faults import MOMENTS
from diloco.sim.schedules import lost_pieces
from diloco.sim.swarm import Durations, VirtualSwarm, peer_id_of, settings_for
from diloco.sim.values import State, initial_state
from peers.core.effects import Apply, Broadcast, Reduce
from peers.protocol.messages import Certificates

EPOCH_S = 4.0
"""The longest time that an undisturbed epoch takes."""


def together(swarm: VirtualSwarm, within_s: float = 60.0, commits: int = 2) -> None:
    """Run until all live peers have made this many new commits in common; check that no work is lost."""
    before = swarm.now

    def are_together() -> bool:
        states = [peer.state for peer in swarm.peers.values()]
        if any(state is None for state in states):
            return False
        least = min(states, key=lambda state: state.epoch)
        if not all(least.leads_to(state) for state in states):
            return False
        for _ in range(commits):
            if least is None or least.made_at <= before:
                return False
            least = least.parent
        return True

    assert swarm.run_until(are_together, within_s), f"{swarm.epochs()} after {within_s} s"
    assert lost_pieces(swarm) == ""


def in_epoch(swarm: VirtualSwarm, epoch: int) -> None:
    """Run until all peers train in this epoch."""
    assert swarm.run_until(lambda: set(swarm.epochs().values()) == {epoch}, 60.0), swarm.epochs()


def chain_of(state: State | None) -> Iterator[State]:
    while state is not None:
        yield state
        state = state.parent


def leader_of(swarm: VirtualSwarm, attempt: int = 0) -> int:
    peer = next(iter(swarm.peers.values()))
    return int(peer.machine.round.leader_of(attempt)[1:])


def test_founders_that_offer_different_states_begin_from_one_of_them():
    swarm = VirtualSwarm(3, starts=False)
    for rank in range(3):
        swarm.offers[peer_id_of(rank)] = initial_state(f"of {rank}")
        swarm.start(rank)
    together(swarm)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_leader_that_dies_costs_one_attempt(moment):
    swarm = VirtualSwarm(4)
    in_epoch(swarm, 3)
    leader = leader_of(swarm)
    swarm.peers[leader].before[MOMENTS[moment]] = lambda: swarm.kill(leader)
    assert swarm.run_until(lambda: leader not in swarm.peers or min(swarm.epochs().values()) > 4, 3 * EPOCH_S)
    swarm.kill(leader)
    together(swarm, within_s=6 * EPOCH_S)


def test_a_member_that_dies_while_it_reduces_costs_the_others_nothing_they_have_trained():
    swarm = VirtualSwarm(4, seed=2)
    in_epoch(swarm, 3)
    member = leader_of(swarm, attempt=1)
    swarm.peers[member].before[Reduce] = lambda: swarm.at(swarm.now + 0.1, lambda: swarm.kill(member))
    assert swarm.run_until(lambda: member not in swarm.peers, 2 * EPOCH_S)
    together(swarm, within_s=6 * EPOCH_S)
    swarm.start(member)
    together(swarm, within_s=6 * EPOCH_S)


def test_the_work_of_a_slow_peer_comes_into_later_commits():
    swarm = VirtualSwarm(3, settings=settings_for(3, grace_s=1.0))
    in_epoch(swarm, 3)
    swarm.slow_down(2, 4.0)
    swarm.run(10 * EPOCH_S)
    worker = swarm.peers[2].worker
    assert worker is not None
    late = worker.trained - worker.pending
    assert len(late) > 15 and late <= swarm.state(2).pieces
    assert min(swarm.epochs().values()) > 8


@pytest.mark.parametrize("num_peers", [2, 4])
def test_commits_go_on_though_all_links_have_become_twenty_times_slower(num_peers):
    swarm = VirtualSwarm(num_peers, durations=Durations(reduce_s=(0.9, 1.0)))
    in_epoch(swarm, 5)
    swarm.reductions.reduce_s = (18.0, 20.0)
    together(swarm, within_s=400.0)


def test_a_peer_with_a_slow_link_that_was_away_for_long_is_in_the_commits_again():
    durations = Durations(step_s=2.0, reduce_s=(0.5, 0.6), apply_s=(0.001, 0.002))
    swarm = VirtualSwarm(4, settings=settings_for(4, grace_s=300.0), durations=durations)
    in_epoch(swarm, 2)
    swarm.kill(3)
    assert swarm.run_until(lambda: min(swarm.epochs().values()) == 12, 300.0)
    swarm.start(3)
    assert swarm.run_until(lambda: swarm.peers[3].state is not None, 60.0)
    # Only its link is slow: a reduction with it takes 7 s, where the others take half a second, and train 12 s.
    swarm.peers[3].slowness = 12.0
    back_at = swarm.now
    together(swarm, within_s=120.0, commits=4)
    later = [state for state in chain_of(swarm.state(0)) if state.made_at > back_at]
    assert sum("p3" in state.certificate.plan.signer_set for state in later) >= 3


def test_a_member_that_has_evaluated_is_waited_for():
    """Else each of the next commits would count as one with a fault."""
    swarm = VirtualSwarm(4, settings=settings_for(4, grace_s=300.0), durations=Durations(step_s=2.0))
    in_epoch(swarm, 4)
    in_epoch(swarm, 8)
    worker = swarm.peers[0].worker
    go_on = worker._step_or_hand_over

    def evaluate() -> None:
        del worker._step_or_hand_over
        worker.after(5.0, go_on)

    worker._step_or_hand_over = evaluate
    in_epoch(swarm, 10)
    last = list(itertools.islice(chain_of(swarm.state(0)), 3))
    assert [len(state.certificate.plan.signers) for state in last] == [4, 4, 4]


def test_who_was_frozen_over_some_commits_brings_its_work_to_the_next():
    swarm = VirtualSwarm(3)
    in_epoch(swarm, 3)
    swarm.freeze(2, 3 * EPOCH_S)
    swarm.run(3 * EPOCH_S - 0.1)
    work = set(swarm.peers[2].worker.pending)
    assert work
    together(swarm)
    assert work <= swarm.state(0).pieces


def test_a_worker_that_crashes_takes_only_what_it_has_not_handed_over():
    swarm = VirtualSwarm(3)
    in_epoch(swarm, 3)
    peer = swarm.peers[1]
    peer.before[Reduce] = lambda: swarm.crash_worker(1, back_after_s=1.0)
    assert swarm.run_until(lambda: peer.worker is None, 2 * EPOCH_S)
    handed = peer.in_hand.pieces
    together(swarm)
    assert handed <= swarm.state(1).pieces


def test_a_withheld_certificate_is_asked_for():
    swarm = VirtualSwarm(3)
    in_epoch(swarm, 3)
    leader = leader_of(swarm)
    peer = swarm.peers[leader]
    # The leader is killed just before it applies its commit; the others hold a result without a certificate.
    peer.before[Apply] = lambda: swarm.kill(leader)
    peer.before[Broadcast] = lambda: None
    assert swarm.run_until(lambda: leader not in swarm.peers, 2 * EPOCH_S)
    together(swarm)
    swarm.start(leader)
    together(swarm)


def test_a_commit_that_a_majority_has_signed_is_not_rolled_back_while_the_others_wait_for_its_certificate():
    swarm = VirtualSwarm(3)
    in_epoch(swarm, 3)
    leader = leader_of(swarm)
    swarm.network.tamper = lambda sender, _, message: (
        None if sender == peer_id_of(leader) and isinstance(message, Certificates) else message
    )
    assert swarm.run_until(lambda: swarm.state(leader).epoch == 4, 2 * EPOCH_S)
    commit = swarm.state(leader)
    behind = {rank: 3 for rank in range(3) if rank != leader}
    # Longer than a majority must stay at a head before a peer rolls back to it.
    swarm.run(2.0)
    assert swarm.epochs() == behind | {leader: 4} and swarm.state(leader) is commit
    swarm.network.tamper = lambda sender, receiver, message: message
    together(swarm)


def test_a_certificate_that_one_peer_kept_undoes_nothing_that_its_other_signers_have_signed_since():
    swarm = VirtualSwarm(5)
    in_epoch(swarm, 3)
    keeper = leader_of(swarm)
    one, other, *rest = sorted({0, 1, 2, 3, 4} - {keeper})
    # A majority signs a commit; its leader sends the certificate to nobody and is then cut off.
    swarm.partition((keeper, one, other), rest)
    swarm.network.tamper = lambda sender, _, message: (
        None if sender == peer_id_of(keeper) and isinstance(message, Certificates) else message
    )
    assert swarm.run_until(lambda: swarm.state(keeper).epoch == 4, 2 * EPOCH_S)
    kept = swarm.state(keeper)
    assert swarm.contributors(kept.head) == {keeper, one, other}
    swarm.partition([keeper], (one, other))
    # The other two go on from the head before that commit, first alone and then with two of its signers.
    for rank in (one, other):
        swarm.freeze(rank, 25.0)
    swarm.run(20.0)
    swarm.heal_partition((one, other), rest)
    first = next(state for state in chain_of(swarm.state(rest[0])) if state.epoch == 4)
    assert swarm.contributors(first.head) == set(rest)
    everybody_else = {one, other, *rest}
    assert swarm.run_until(lambda: swarm.contributors(swarm.state(one).head) == everybody_else, 60.0)
    signed_last = swarm.state(one)

    swarm.network.tamper = lambda sender, receiver, message: message
    swarm.heal_partition([keeper], (one, other))
    swarm.heal_partition([keeper], rest)
    together(swarm)
    assert all(signed_last.leads_to(swarm.state(rank)) for rank in range(5))
    assert not kept.leads_to(swarm.state(keeper))


def test_all_die_and_go_on_from_their_checkpoints():
    swarm = VirtualSwarm(3, saves=True)
    in_epoch(swarm, 4)
    for rank in range(3):
        swarm.kill(rank)
    saved = max((disk.checkpoint for disk in swarm.disks.values()), key=lambda state: state.epoch)
    swarm.run(5.0)
    for rank in range(3):
        swarm.start(rank)
    together(swarm)
    assert saved.epoch >= 3 and all(saved.leads_to(peer.state) for peer in swarm.peers.values())


def test_who_has_finished_brings_its_last_work_and_is_taken_off_the_roster():
    swarm = VirtualSwarm(3)
    in_epoch(swarm, 3)
    worker = swarm.peers[2].worker
    swarm.finish(2)
    assert swarm.run_until(lambda: swarm.peers[2].machine.phase == "leaving", 3 * EPOCH_S)
    swarm.kill(2)
    together(swarm, within_s=4 * EPOCH_S)
    assert not worker.is_running and worker.trained <= swarm.state(0).pieces
    assert swarm.roster(swarm.state(0).head) == {0, 1}


@pytest.mark.parametrize("others", ["go on", "have left", "have died"])
def test_a_worker_that_fails_after_its_last_work_trains_again(others):
    swarm = VirtualSwarm(3)
    in_epoch(swarm, 3)
    for rank in range(3) if others == "have left" else (2,):
        swarm.finish(rank)
    assert swarm.run_until(lambda: swarm.peers[2].machine.phase == "leaving", 3 * EPOCH_S)
    if others == "go on":
        swarm.run(2 * EPOCH_S)
        assert swarm.roster(swarm.state(0).head) == {0, 1}
    else:
        swarm.kill(0)
        swarm.kill(1)
    swarm.crash_worker(2, 1.0)
    together(swarm)
    assert 2 in swarm.contributors(swarm.state(2).head)


def test_who_was_away_for_longer_than_certificates_are_kept_takes_what_the_others_show(monkeypatch):
    monkeypatch.setattr("peers.core.chain.MAX_OWN", 6)
    swarm = VirtualSwarm(3)
    in_epoch(swarm, 3)
    swarm.freeze(2, 12 * EPOCH_S)
    swarm.run(12 * EPOCH_S)
    assert swarm.state(0).epoch - swarm.state(2).epoch > 6
    together(swarm)
    together(swarm)
    assert swarm.contributors(swarm.state(0).head) == {0, 1, 2}


@pytest.mark.parametrize("seed", [2, 7])
def test_the_only_member_does_not_return_to_the_head_before_its_newest_when_it_restarts(seed):
    swarm = VirtualSwarm(3, seed=seed)
    in_epoch(swarm, 2)
    for rank in (0, 1):
        swarm.finish(rank)
    assert swarm.run_until(lambda: swarm.roster(swarm.state(2).head) == {2}, 60.0)
    for rank in (0, 1):
        swarm.kill(rank)
        swarm.start(rank)
        assert swarm.run_until(lambda rank=rank: swarm.peers[rank].state is not None, 60.0)
        swarm.crash_worker(rank, 1000.0)
    swarm.run(1.0)
    assert swarm.run_until(lambda: len(swarm.heads()) == 1, 60.0)
    # Peer 1 stays at this head; peer 0 receives the next certificate.
    before = swarm.state(1)
    swarm.network.tamper = lambda sender, receiver, message: (
        None if receiver == "p1" and isinstance(message, Certificates) else message
    )
    assert swarm.run_until(lambda: swarm.state(0).parent is before and len(swarm.heads()) == 2, 60.0)
    swarm.kill(2)
    swarm.start(2)
    assert swarm.run_until(lambda: swarm.peers[2].state is not None, 60.0)
    assert swarm.state(2).parent is before
    # If peer 2 went back now, that would violate an invariant.
    swarm.run(5.0)
