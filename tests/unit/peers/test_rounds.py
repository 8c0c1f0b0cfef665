"""The round's decisions, on a simulated clock and network: every fault here is one seeded schedule."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.errors import ProtocolError
from peers.round.actions import Apply, CatchUp, Reduce, Send
from peers.round.messages import (
    MAX_NORM,
    Abort,
    Ask,
    Commit,
    Group,
    Join,
    Proposal,
    Vote,
    parse,
    to_message,
)
from peers.round.verdicts import dissenters
from peers.rounds import Phase, Round
from tests.support.round_world import TIMING, World, status

LONG_EPOCHS = dataclasses.replace(TIMING, carry_s=200.0)


def everybody_ready(world: World, *, late: dict[int, float] | None = None) -> World:
    for rank in world.peers:
        world.ready(rank, (late or {}).get(rank, 0.1 * rank))
    return world


def the_commit(world: World) -> Commit:
    """The one commit of all survivors that have not been told to catch up."""
    commits = {peer.commit for peer in world.survivors.values() if peer.commit}
    assert len(commits) == 1
    return commits.pop()


def test_three_peers_commit_one_group_at_the_first_attempt():
    world = everybody_ready(World(3))
    world.run()
    commit = the_commit(world)
    assert commit.group.ranks == (0, 1, 2)
    assert commit.group.weights == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert all(peer.num_reductions == 1 and peer.commit == commit for peer in world.peers.values())


def test_a_peer_alone_commits_at_once():
    world = World(1)
    world.ready(0, 0.0)
    world.run()
    assert the_commit(world).group.ranks == (0,)
    assert world.peers[0].committed_at < 2.0


def test_the_leader_waits_for_a_straggler_that_is_alive():
    world = everybody_ready(World(3), late={2: 20.0})
    world.run()
    assert the_commit(world).group.ranks == (0, 1, 2)


def test_nobody_waits_for_one_that_has_said_nothing_for_a_while_and_it_counts_when_it_is_back():
    leader, view = a_round(me=0, num_peers=3), {rank: status(rank) for rank in range(3)}
    leader.on_message(1, Join(0, "a", Proposal(1, 1, 1.0, 1, False), ""), 0.1)
    assert leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.2) == []
    sent = leader.on_view(view, 4.0, quiet=frozenset({2}))
    assert [action.message.ranks for action in sent if isinstance(action, Send)] == [(0, 1)]
    leader = a_round(me=0, num_peers=3, quiet=frozenset({2}))
    leader.on_message(1, Join(0, "a", Proposal(1, 1, 1.0, 1, False), ""), 0.1)
    assert leader.on_view(view, 0.2) == []
    assert leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.3) == []
    sent = leader.on_message(2, Join(0, "a", Proposal(2, 1, 1.0, 1, False), ""), 0.4)
    assert [action.rank for action in sent if isinstance(action, Send)] == [1, 2]


def groups_in(actions):
    """The members of the groups that are sent, each once."""
    return [set(a.message.ranks) for a in actions if isinstance(a, Send) and isinstance(a.message, Group)][:1]


def join_of(rank: int, step: int) -> Join:
    return Join(0, "a", Proposal(rank, 1, 1.0, step, False), "")


def test_work_of_an_epoch_before_waits_for_the_others_and_does_not_start_the_clock_for_them():
    leader = a_round(me=0, num_peers=3, first_step=10)
    assert leader.on_message(1, join_of(1, 10), 0.1) == []
    assert leader.on_tick(TIMING.gather_s + 1) == []
    # Minutes later those come who have trained this epoch; one of them is late.
    ready_at = 3 * LONG_EPOCHS.carry_s / 4
    assert leader.on_message(2, join_of(2, 20), ready_at) == []
    assert groups_in(leader.on_tick(ready_at + TIMING.gather_s - 0.1)) == []
    assert groups_in(leader.on_tick(ready_at + TIMING.gather_s)) == [{1, 2}]


def test_work_of_an_epoch_before_is_not_kept_for_ever_where_nobody_else_comes():
    leader = a_round(me=0, num_peers=3, first_step=10)
    leader.on_message(1, join_of(1, 10), 0.1)
    assert groups_in(leader.on_tick(LONG_EPOCHS.carry_s)) == []
    assert groups_in(leader.on_tick(LONG_EPOCHS.carry_s + 0.1)) == [{1}]
    # A member that is that early does not take its leader for one that does not lead.
    member = a_round(me=1, num_peers=3, first_step=10)
    member.on_ready(Proposal(1, 1, 1.0, 10, False), 0.0)
    assert member._phase_deadline == 2 * LONG_EPOCHS.carry_s + TIMING.attempt_s


def test_a_leader_that_was_not_ready_itself_forms_no_second_group_on_a_lineage_that_has_gone_on():
    leader, view = a_round(me=0, num_peers=3), {rank: status(rank) for rank in range(3)}
    leader.timing = dataclasses.replace(TIMING, attempt_s=100.0)
    leader.on_message(1, join_of(1, 1), 0.1)
    (sent,) = leader.on_tick(TIMING.gather_s + 0.1)
    done = leader.on_message(1, a_vote(sent.message.attempt, 1), TIMING.gather_s + 1)
    assert [type(action.message) for action in done] == [Commit]
    # Peer 1 has not been seen on the new lineage yet.
    assert leader.on_message(2, join_of(2, 1), TIMING.gather_s + 2) == []
    assert leader.on_tick(TIMING.gather_s + 60) == []
    # Where nobody is left who has that commit, the others go on without it.
    assert groups_in(leader.on_view({0: view[0], 2: view[2]}, TIMING.gather_s + 61)) == [{2}]


def test_who_has_a_commit_and_does_not_show_it_holds_up_the_others_for_one_attempt_at_most():
    leader = a_round(me=0, num_peers=3)
    leader.timing = dataclasses.replace(TIMING, attempt_s=100.0)
    leader.on_message(1, join_of(1, 1), 0.1)
    (sent,) = leader.on_tick(TIMING.gather_s + 0.1)
    leader.on_message(1, a_vote(sent.message.attempt, 1), TIMING.gather_s + 1)
    leader.on_message(2, join_of(2, 1), TIMING.gather_s + 2)
    until = TIMING.gather_s + 1 + 100.0
    assert leader.on_tick(until - 1) == []
    assert until in leader._lead.times
    assert groups_in(leader.on_tick(until)) == [{2}]


@pytest.mark.parametrize("is_unawaited", [False, True])
def test_who_has_not_come_for_several_rounds_is_waited_for_no_more_and_taken_if_it_comes(is_unawaited):
    leader = a_round(me=0, num_peers=3, unawaited=[2] if is_unawaited else [])
    leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.0)
    assert groups_in(leader.on_message(1, join_of(1, 1), 0.1)) == ([{0, 1}] if is_unawaited else [])
    leader = a_round(me=0, num_peers=3, unawaited=[2] if is_unawaited else [])
    leader.on_message(2, join_of(2, 1), 0.0)
    leader.on_message(1, join_of(1, 1), 0.1)
    assert groups_in(leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.2)) == [{0, 1, 2}]


def test_a_leader_that_has_said_nothing_for_a_while_is_passed_over_until_it_is_back():
    member, view = a_round(me=2, num_peers=3), {rank: status(rank) for rank in range(3)}
    mine = Join(0, "a", Proposal(2, 1, 1.0, 1, False), "")
    assert member.on_ready(mine.proposal, 0.1) == [Send(0, mine)]
    assert member.on_view(view, 4.0, quiet=frozenset({0})) == [Send(1, mine)]
    assert member.on_view(view, 4.5) == [Send(0, mine)]
    assert member.on_view(view, 4.6) == []
    # It takes no peer for quiet that it is itself.
    alone = a_round(me=0, num_peers=1, quiet=frozenset({0}))
    assert isinstance(alone.on_ready(Proposal(0, 1, 1.0, 1, False), 0.1)[-1], Reduce)


def test_who_waits_turns_to_a_leader_that_has_just_come_and_still_follows_the_one_before():
    view = {rank: status(rank) for rank in (1, 2)}
    member = a_round(me=2, num_peers=3)
    member.on_view(view, 0.0)
    mine = Join(0, "a", Proposal(2, 1, 1.0, 1, False), "")
    assert member.on_ready(mine.proposal, 0.1) == [Send(1, mine)]
    assert member.on_view({**view, 0: status(0)}, 0.2) == [Send(0, mine)]
    # Peer 1 had made a group before it saw that.
    leader = a_round(me=1, num_peers=3)
    leader.on_view(view, 0.0)
    leader.on_message(2, mine, 0.15)
    group = next(
        a.group for a in leader.on_ready(Proposal(1, 1, 1.0, 1, False), 0.15) if isinstance(a, Reduce)
    )
    assert member.on_message(1, group, 0.25) == [Reduce(group)]


@pytest.mark.parametrize(
    ("me", "here", "lost", "waits"),
    [
        # Its own connection broke, most likely, through which it heard both.
        (1, {1}, {0, 2}, True),
        (0, {0, 2}, {1}, False),
        # Of two halves the one with the lowest rank goes on.
        (0, {0, 3}, {1, 2}, False),
        (1, {1, 2}, {0, 3}, True),
    ],
)
def test_who_has_lost_most_of_the_others_waits_for_them_before_it_goes_on_alone(me, here, lost, waits):
    view, gone = {rank: status(rank) for rank in here}, {rank: status(rank) for rank in lost}
    leader = Round(
        me=me, incarnation=1, fragment=0, epoch=0, lineage="a", timing=LONG_EPOCHS, view=view, lost=gone
    )
    for rank in here - {me}:
        leader.on_message(rank, Join(0, "a", Proposal(rank, 1, 1.0, 1, False), ""), 0.1)
    actions = leader.on_ready(Proposal(me, 1, 1.0, 1, False), 0.2)
    assert any(isinstance(action, Reduce) for action in actions) is not waits
    if waits:
        assert leader.standing.waits_for == "a way back to the others"
        assert leader.on_view(view, 1.0, lost=gone) == []
        assert not any(isinstance(action, Reduce) for action in leader.on_tick(3.0))
        first_ready_at = 0.1 if len(here) > 1 else 0.2
        assert leader.deadline == pytest.approx(first_ready_at + leader.timing.regain_s)
        # Though they be lost again and again, it does not wait for ever.
        assert any(isinstance(action, Reduce) for action in leader.on_view(view, 3.3, lost=gone))


def test_no_attempt_is_made_with_a_member_that_has_fallen_quiet_since_it_joined():
    leader, view = a_round(me=0, num_peers=3), {rank: status(rank) for rank in range(3)}
    leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.0)
    leader.on_message(2, join_of(2, 1), 0.1)
    assert groups_in(leader.on_view(view, 0.2, quiet=frozenset({2}))) == []
    assert groups_in(leader.on_message(1, join_of(1, 1), 0.3)) == [{0, 1}]


def test_a_leader_that_suddenly_hears_of_nobody_does_not_go_on_alone():
    leader, view = a_round(me=0, num_peers=4), {rank: status(rank) for rank in range(4)}
    leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.0)
    for rank in (1, 2):
        leader.on_message(rank, join_of(rank, 1), 0.1)
    assert groups_in(leader.on_view(view, 0.2, quiet=frozenset({1, 2, 3}))) == [{0, 1, 2}]


def test_a_leader_that_was_excluded_is_not_followed_for_having_been_told():
    member = a_round(me=2, num_peers=3)
    member.on_ready(Proposal(2, 1, 1.0, 1, False), 0.1)
    leader = a_round(me=0, num_peers=3)
    leader.on_message(2, join_of(2, 1), 0.1)
    leader.on_message(1, join_of(1, 1), 0.1)
    group = next(
        a.group for a in leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.2) if isinstance(a, Reduce)
    )
    member._lead.excluded.add(0)
    assert member.on_message(0, group, 0.3) == []


def test_a_straggler_past_the_deadline_is_left_behind_and_catches_up():
    world = everybody_ready(World(3), late={2: TIMING.gather_s + 15})
    world.run()
    assert the_commit(world).group.ranks == (0, 1)
    assert world.peers[2].caught_up is not None
    assert not world.peers[2].caught_up.contributed


def trailing(world: World, rank: int) -> World:
    """This rank has work to bring, and has missed the last commit so far."""
    behind = dataclasses.replace(status(rank, lineage="before a", state="averaging"))
    for peer in world.peers.values():
        peer.view[rank] = behind
        peer.round.on_view(dict(peer.view), 0.0)
    return world


PATIENT = dataclasses.replace(TIMING, follow_s=5.0)


def test_one_that_is_a_commit_behind_is_waited_for_when_its_turn_has_come():
    world = trailing(World(5, timing=PATIENT), 4)
    for rank in range(4):
        world.ready(rank, 0.1)
    world.schedule(3.0, lambda: [world._see(rank, status(4)) for rank in range(5)])
    world.ready(4, 3.1)
    world.run()
    assert the_commit(world).group.ranks == (0, 1, 2, 3, 4)


def test_one_that_stays_behind_is_not_waited_for_any_longer():
    world = trailing(World(5, timing=PATIENT), 4)
    for rank in range(4):
        world.ready(rank, 0.1)
    world.run()
    assert the_commit(world).group.ranks == (0, 1, 2, 3)
    assert PATIENT.follow_s < world.peers[0].committed_at < PATIENT.follow_s + 3


def test_one_that_is_behind_when_it_is_not_its_turn_keeps_nobody_waiting():
    world = trailing(World(4, timing=PATIENT), 3)
    for rank in range(3):
        world.ready(rank, 0.1)
    world.run()
    assert the_commit(world).group.ranks == (0, 1, 2)
    assert world.peers[0].committed_at < 3


def test_a_straggling_leader_leads_without_being_a_member_and_catches_up():
    world = everybody_ready(World(3), late={0: TIMING.gather_s + 15})
    world.run()
    assert the_commit(world).group.ranks == (1, 2)
    assert world.peers[0].caught_up is not None


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("at", [0.0, 0.25, 0.6, 0.9, 1.2, 1.5, 1.8, 2.1])
def test_whoever_dies_and_whenever_the_survivors_commit_within_seconds(victim: int, at: float):
    world = everybody_ready(World(3, seed=int(at * 100) + victim))
    world.kill(victim, at)
    world.run()
    commit = the_commit(world)
    for rank, peer in world.survivors.items():
        assert peer.commit == commit or peer.caught_up, rank
        assert peer.commit is None or peer.committed_at < at + 8.0
    assert set(world.survivors) <= set(commit.group.ranks) | {victim}


def test_a_leader_that_dies_after_telling_one_member_of_the_commit_forks_nobody():
    def die_after_first_commit(world: World, sender: int, to: int, message: object) -> None:
        if isinstance(message, Commit) and sender == 0 and world.peers[0].alive and to == 2:
            world.peers[0].alive = False
            for other in (1, 2):
                world.schedule(world.now + 0.2, lambda other=other: world._lose(other, 0))

    # The send to peer 1 is under way when the leader dies on its way to peer 2.
    world = everybody_ready(World(3, on_send=die_after_first_commit))
    world.run()
    assert world.peers[1].commit is not None
    assert world.peers[2].commit == world.peers[1].commit
    assert world.peers[2].commit.group.ranks == (0, 1, 2)


def test_a_leader_that_dies_before_anybody_hears_of_the_commit_is_simply_left_out():
    def die_before_commit(world: World, sender: int, to: int, message: object) -> None:
        if isinstance(message, Commit) and sender == 0 and world.peers[0].alive:
            world.peers[0].alive = False
            for other in (1, 2):
                world.schedule(world.now + 0.2, lambda other=other: world._lose(other, 0))

    world = everybody_ready(World(3, on_send=die_before_commit))
    world.run()
    assert the_commit(world).group.ranks == (1, 2)


def test_a_member_that_never_votes_is_left_out_at_the_deadline():
    world = World(3)
    world.outcome_of = lambda rank, attempt: (
        world.stop_answering(2) or None if rank == 2 else Vote(0, "a", attempt, ("s",) * 3, "b", "m")
    )
    everybody_ready(world).run()
    assert the_commit(world).group.ranks == (0, 1)


def test_a_member_all_others_blame_twice_is_left_out():
    world = World(3)
    bad = {"attempts": 0}

    def outcome(rank: int, attempt: str) -> Vote | None:
        group = world.peers[rank].round._group
        if group is not None and 2 in group.ranks:
            bad["attempts"] += 1
            return None
        return Vote(0, "a", attempt, ("s", "s"), "b", "m")

    world.outcome_of = outcome
    world.suspects = {0: (2,), 1: (2,), 2: (0,)}
    everybody_ready(world).run()
    assert the_commit(world).group.ranks == (0, 1)
    assert world.peers[0].num_reductions <= 4


def test_an_owner_that_sends_unequal_bytes_is_named():
    group = a_group((0, 1, 2, 3))
    votes = {rank: Vote(0, "a", group.attempt, ("x", "y", "z", "w"), "b", "m") for rank in range(4)}
    votes[3] = Vote(0, "a", group.attempt, ("x", "CHANGED", "z", "w"), "c", "n")
    assert dissenters(group, votes) == {1}


def test_of_two_members_whose_digests_differ_the_higher_resyncs():
    group = a_group((4, 7))
    votes = {
        4: Vote(0, "a", group.attempt, ("x", "y"), "b", "m"),
        7: Vote(0, "a", group.attempt, ("x", "y"), "c", "m"),
    }
    assert dissenters(group, votes) == {7}


def test_equal_votes_name_nobody():
    group = a_group((0, 1))
    assert dissenters(group, {r: Vote(0, "a", group.attempt, ("x", "y"), "b", "m") for r in (0, 1)}) == set()


def test_a_peer_with_other_digests_is_told_to_resync():
    aborts = []
    world = World(3)
    world.outcome_of = lambda rank, attempt: Vote(
        0, "a", attempt, ("s",) * len(world.peers[rank].round._group.ranks), "c" if rank == 1 else "b", "m"
    )
    world.on_send = lambda w, sender, to, message: (
        aborts.append(message) if isinstance(message, Abort) else None
    )
    everybody_ready(world).run()
    assert the_commit(world).group.ranks == (0, 2)
    assert world.peers[1].caught_up is not None
    assert any(abort.resync and abort.excluded == (1,) for abort in aborts)


@settings(max_examples=300, deadline=None)
@given(
    num_peers=st.integers(2, 6),
    seed=st.integers(0, 10**6),
    kills=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 8)), max_size=3),
    starts=st.lists(st.floats(0, 5), min_size=6, max_size=6),
)
def test_under_any_schedule_of_deaths_survivors_end_on_one_lineage(num_peers, seed, kills, starts):
    world = World(num_peers, seed=seed)
    for rank in world.peers:
        world.ready(rank, starts[rank])
    for rank, at in kills:
        if rank < num_peers:
            world.kill(rank, at)
    world.run(until=400)
    commits = {peer.commit for peer in world.survivors.values() if peer.commit}
    assert len(commits) <= 1
    for rank, peer in world.survivors.items():
        assert peer.commit is not None or peer.caught_up is not None, (
            f"peer {rank} is stuck in {peer.round.phase}"
        )
        if peer.commit:
            assert rank in peer.commit.group.ranks
            assert math.isclose(sum(peer.commit.group.weights), 1.0)


# Members and leaders that lie, and peers that come back as another self


def a_round(me: int, num_peers: int, **other: object) -> Round:
    view = {rank: status(rank) for rank in range(num_peers)}
    return Round(
        me=me, incarnation=1, fragment=0, epoch=0, lineage="a", timing=LONG_EPOCHS, view=view, **other
    )


def a_vote(attempt: str, num_members: int = 3, **other: object) -> Vote:
    return Vote(**{"fragment": 0, "lineage": "a", "attempt": attempt, "shares": ("s",) * num_members,
                   "anchor": "b", "momentum": "m", **other})  # fmt: skip


def test_a_forged_commit_of_other_digests_than_voted_for_is_ignored():
    member = a_round(me=1, num_peers=3)
    member.on_ready(Proposal(1, 1, 1.0, 1, False), 0.0)
    group = a_group((0, 1, 2))
    member.on_message(0, group, 0.1)
    member.on_reduced(group.attempt, a_vote(group.attempt), 0.2)
    assert member.on_message(2, Commit(group, "forged", "m"), 0.3) == []
    commit = Commit(group, "b", "m")
    assert member.on_message(0, commit, 0.4) == [Apply(commit)]


def test_a_commit_that_the_sender_cannot_have_made_changes_nothing():
    member = a_round(me=1, num_peers=3)
    member.on_ready(Proposal(1, 1, 1.0, 1, False), 0.0)
    assert member.on_message(2, Commit(a_group((0, 1)), "x", "y"), 0.1) == []
    # One that made it shows the state that came of it.
    view = {rank: status(rank) for rank in range(3)} | {2: status(2, lineage="b", epoch=1, tokens=100)}
    assert member.on_view(view, 0.2) == [CatchUp(2, "peer 2 is ahead, at epoch 1", contributed=True)]


def test_a_group_with_other_weights_than_its_members_have_earned_is_ignored():
    member = a_round(me=1, num_peers=2)
    member.on_ready(Proposal(1, 1, 1.0, 1, False), 0.0)
    honest = a_group((0, 1))
    assert member.on_message(0, dataclasses.replace(honest, weights=(1e300, 0.5)), 0.1) == []
    assert member.on_message(0, honest, 0.2) == [Reduce(honest)]


def test_a_proposal_of_more_tokens_than_anybody_can_train_is_refused():
    # It would take the swarm's count of tokens past what announcements may say, and so cut all channels.
    honest = Join(0, "a", Proposal(1, 1 << 40, 1.0, 1, False), "")
    assert parse(to_message(honest)) == honest
    with pytest.raises(ProtocolError):
        parse(to_message(dataclasses.replace(honest, proposal=Proposal(1, 1 << 62, 1.0, 1, False))))


def test_a_norm_whose_square_is_no_number_is_refused():
    # What members may send is bounded by it: by nothing, if it is infinite.
    longest = Join(0, "a", Proposal(1, 1, MAX_NORM, 1, False), "")
    assert parse(to_message(longest)) == longest
    for norm in (1e155, float("inf"), float("nan"), -1.0):
        with pytest.raises(ProtocolError):
            parse(to_message(dataclasses.replace(longest, proposal=Proposal(1, 1, norm, 1, False))))


def test_an_abort_is_understood_however_many_members_its_reason_is_about():
    leader = a_round(me=0, num_peers=300)
    for rank in range(1, 300):
        leader.on_message(rank, join_of(rank, 1), 0.1)
    leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.2)
    sent = leader.on_tick(0.2 + TIMING.attempt_s)
    aborts = [a.message for a in sent if isinstance(a, Send) and isinstance(a.message, Abort)]
    assert len(aborts) == 299 and parse(to_message(aborts[0])) == aborts[0]
    assert "and 288 more" in aborts[0].reason


@pytest.mark.parametrize("ranks", [(0, 1, 2), tuple(range(100)), (0, 1)])
def test_a_leader_that_makes_one_attempt_after_the_other_and_names_nobody_is_left(ranks):
    member, deposed_after = a_round(me=1, num_peers=3), None
    member.on_ready(Proposal(1, 1, 1.0, 1, False), 0.0)
    for number in range(20):
        group = dataclasses.replace(a_group(ranks), attempt=f"{number:032x}")
        actions = member.on_message(0, group, 5.0 * number + 1)
        if actions != [Reduce(group)]:
            deposed_after = number
            break
        member.on_message(0, Abort(0, "a", group.attempt, (), False, "again"), 5.0 * number + 2)
    # Members that it has invented count for nothing.
    assert deposed_after == 2 * min(3, len(ranks)) + 2
    assert member.offenders == {0} and "leads from one attempt to the next" in member.failures[-1]
    # Of those that are left it is the lowest rank itself.
    assert member.leader == 1


@pytest.mark.parametrize(("carry_s", "offenders"), [(TIMING.gather_s, {0}), (200.0, set())])
def test_a_leader_that_leads_nowhere_has_spoilt_the_round_unless_it_may_know_longer_epochs(
    carry_s, offenders
):
    member = a_round(me=2, num_peers=3)
    member.timing = dataclasses.replace(TIMING, carry_s=carry_s)
    (sent,) = member.on_ready(Proposal(2, 1, 1.0, 1, False), 0.0)
    assert sent.rank == 0 and not member.offenders
    (sent,) = member.on_tick(member._phase_deadline)
    assert sent.rank == 1 and member.offenders == offenders
    # The next one may rightly follow the first.
    member.on_tick(member._phase_deadline)
    assert member.offenders == offenders


@pytest.mark.parametrize(
    "barred, num_left_out, is_lured, is_in",
    [
        ((0,), 0, False, False),
        ((0,), 2, False, False),
        ((0,), 3, False, True),
        ((0, 1), 3, False, True),
        ((0,), 3, True, True),
    ],
)
def test_who_is_left_out_time_after_time_follows_whom_the_others_follow(
    barred, num_left_out, is_lured, is_in
):
    # The others have learned not to follow these; a peer that came later has not.
    world = World(
        5,
        barred={rank: barred for rank in range(4) if rank not in barred},
        num_left_out={4: num_left_out},
        led_by=len(barred),
    )
    for rank in barred:
        world.stop_answering(rank)
    if is_lured:
        members = tuple(Proposal(rank, 100, 1.0, 10, False) for rank in (0, 4))
        group = dataclasses.replace(a_group((0, 4)), members=members)
        world.schedule(0.01, lambda: world.deliver(0, 4, group))
    for rank in range(len(barred), 5):
        world.ready(rank, at=0.0)
    world.run()
    commit = world.peers[3].commit
    assert commit is not None
    assert (4 in commit.group.ranks) == is_in
    assert (world.peers[4].commit == commit) == is_in
    assert (world.peers[3].committed_at < TIMING.gather_s) == is_in
    assert not is_in or 4 not in world.peers[len(barred)].round.offenders
    # As long as one is there that it would follow and the others do not, it goes on like that.
    assert world.peers[3].round.is_led_by_first
    assert world.peers[4].round.is_led_by_first == (not is_in)


def test_who_is_followed_by_the_others_leads_though_it_would_follow_one_they_have_barred():
    world = World(5, barred={rank: (0,) for rank in (2, 3, 4)})
    world.stop_answering(0)
    for rank in range(1, 5):
        world.ready(rank, at=0.0)
    world.run()
    for rank in range(1, 5):
        assert world.peers[rank].commit.group.ranks == (1, 2, 3, 4)
        # It has waited for the one that might come; the others have not lost their patience with it.
        assert TIMING.gather_s < world.peers[rank].committed_at < TIMING.gather_s + 5
        assert not world.peers[rank].round.offenders


def test_what_was_said_to_who_did_not_lead_yet_shortens_no_wait_for_the_others():
    world = World(
        6, timing=dataclasses.replace(TIMING, gather_s=10.0, attempt_s=140.0), reduction_s=lambda _: 60.0
    )
    for rank in range(6):
        world.ready(rank, at=0.0)
    # As from one that had taken it for the leader for a moment.
    join = Join(0, "a", Proposal(5, 100, 1.0, 10, False), "")
    world.schedule(0.0, lambda: world.deliver(5, 1, join))
    world.kill(0, at=30.0)
    world.run()
    for rank in range(1, 6):
        assert world.peers[rank].commit.group.ranks == (1, 2, 3, 4, 5)


def test_whoever_holds_a_join_and_does_not_lead_has_nothing_to_do_about_it():
    member = a_round(me=1, num_peers=3)
    member.on_message(2, Join(0, "a", Proposal(2, 1, 1.0, 1, False), ""), 0.0)
    assert member.deadline == float("inf")
    # It leads for a moment, and later for good.
    member.on_view({rank: status(rank) for rank in range(3)}, 1.0, frozenset({0}))
    assert member.deadline == 1.0 + TIMING.gather_s
    member.on_view({rank: status(rank) for rank in range(3)}, 2.0)
    assert member.deadline == float("inf")
    member.on_view({rank: status(rank) for rank in (1, 2)}, 100.0)
    assert member.deadline == 100.0 + TIMING.gather_s


def test_a_leader_has_nothing_to_do_between_a_failed_attempt_and_the_end_of_its_wait():
    leader = a_round(me=0, num_peers=3)
    leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.0)
    for rank in (1, 2):
        leader.on_message(rank, Join(0, "a", Proposal(rank, 1, 1.0, 1, False), ""), 0.0)
    assert leader._group is not None
    leader.on_reduce_failed(leader._group.attempt, (), 1.0)
    leader.on_view({rank: status(rank) for rank in range(4)}, 1.1)
    assert leader.on_tick(2.0) == [] and leader.phase is Phase.SEEKING
    assert leader.deadline > 2.0


def test_who_still_trains_makes_no_group_of_others_that_are_ahead_of_it():
    member = a_round(me=1, num_peers=3)
    member.on_message(2, Join(0, "a", Proposal(2, 1, 1.0, 1, False), ""), 0.0)
    ahead = {rank: status(rank, lineage="b", epoch=1, tokens=100) for rank in (0, 2)}
    assert member.on_view({**ahead, 1: status(1)}, 1.0) == []
    assert member.on_tick(1.0 + TIMING.gather_s) == []


def test_who_drops_its_leader_while_others_are_ahead_goes_there_and_not_on_alone():
    member = a_round(me=2, num_peers=3)
    member.on_ready(Proposal(2, 1, 1.0, 1, False), 0.0)
    view = {0: status(0), 1: status(1, lineage="b", epoch=1, tokens=100), 2: status(2)}
    actions = []
    for number in range(2):
        group = dataclasses.replace(a_group((0, 2)), attempt=f"{number:032x}")
        assert member.on_message(0, group, 1.0 + number) == [Reduce(group)]
        assert member.on_view(view, 1.2 + number) == []
        actions = member.on_reduce_failed(group.attempt, {0}, 1.5 + number)
        if member.phase is Phase.OVER:
            break
    assert isinstance(actions[-1], CatchUp) and not any(isinstance(action, Reduce) for action in actions)


def test_only_the_leader_of_an_attempt_ends_it():
    member = a_round(me=2, num_peers=3)
    member.on_ready(Proposal(2, 1, 1.0, 1, False), 0.0)
    group = a_group((0, 1, 2))
    member.on_message(0, group, 0.1)
    member.on_reduced(group.attempt, a_vote(group.attempt), 0.2)
    member.on_view({1: status(1), 2: status(2)}, 1.0)
    assert member.leader == 1
    member.on_message(1, Abort(0, "a", group.attempt, (), False, "another leader's"), 1.1)
    commit = Commit(group, "b", "m")
    assert member.on_message(0, commit, 1.2) == [Apply(commit)]


@pytest.mark.parametrize("told_by", [(), (2,)])
def test_nobody_is_talked_out_of_its_leader_by_a_third_one(told_by):
    member = a_round(me=1, num_peers=3)
    member.on_ready(Proposal(1, 1, 1.0, 1, False), 0.0)
    for number in range(2):
        group = dataclasses.replace(a_group((0, 1, 2)), attempt=f"{number:032x}")
        assert member.on_message(0, group, 1.0 + number) == [Reduce(group)]
        (sent, *_) = member.on_reduce_failed(group.attempt, {0}, 1.5 + number, told_by=told_by)
        assert sent.message.suspects == (0,) and sent.message.told_by == told_by
    assert member.offenders == (set() if told_by else {0})


def test_who_comes_back_as_another_in_one_attempt_after_the_other_is_in_one_at_most():
    leader, view = a_round(me=0, num_peers=3), {rank: status(rank) for rank in range(3)}
    leader.on_message(1, join_of(1, 1), 0.1)
    leader.on_message(2, join_of(2, 1), 0.1)
    assert groups_in(leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.2)) == [{0, 1, 2}]
    view = {**view, 2: dataclasses.replace(view[2], incarnation=view[2].incarnation + 1)}
    assert groups_in(leader.on_view(view, 0.3)) == [{0, 1}]
    assert not leader.offenders


def test_who_has_just_begun_to_lead_is_not_blamed_for_the_one_before():
    member, view = a_round(me=2, num_peers=3), {rank: status(rank) for rank in range(3)}
    member.timing = TIMING
    member.on_ready(Proposal(2, 1, 1.0, 1, False), 0.0)
    deadline = member._phase_deadline
    (sent,) = member.on_view(view, deadline - 1, quiet=frozenset({0}))
    assert sent.rank == 1
    member.on_tick(deadline)
    assert not member.offenders


def test_only_who_has_another_state_is_told_to_fetch_it():
    # A voter that says it got other bytes of a share says nothing about anybody's state.
    for shares, anchor, resync in ((("s", "x", "s"), "b", False), (("s", "s", "s"), "other", True)):
        leader = a_round(me=0, num_peers=3)
        for rank in (1, 2):
            leader.on_message(rank, join_of(rank, 1), 0.1)
        group = next(
            a.group for a in leader.on_ready(Proposal(0, 1, 1.0, 1, False), 0.2) if isinstance(a, Reduce)
        )
        leader.on_reduced(group.attempt, a_vote(group.attempt), 0.3)
        leader.on_message(1, a_vote(group.attempt), 0.4)
        sent = leader.on_message(2, a_vote(group.attempt, shares=shares, anchor=anchor), 0.5)
        aborts = [a.message for a in sent if isinstance(a, Send) and isinstance(a.message, Abort)]
        assert aborts and {abort.resync for abort in aborts} == {resync}


def test_who_has_others_accuse_others_is_left_out_before_a_second_one_is():
    """Rank 3 tells members 0 and 1 in turns that another one has failed it."""
    world, failed = World(5), []

    def outcome(rank: int, attempt: str) -> Vote | None:
        ranks = world.peers[rank].round._group.ranks
        listener = len(failed) % 2
        if 3 not in ranks or rank != listener:
            return a_vote(attempt, len(ranks))
        world.suspects, world.told_by = {rank: (2 if 2 in ranks else 4,)}, {rank: (3,)}
        failed.append(attempt)
        return None

    world.outcome_of = outcome
    everybody_ready(world).run()
    members = set(the_commit(world).group.ranks)
    assert 3 not in members and len(members) >= 3


@pytest.mark.parametrize(
    ("liar", "suspects"),
    [(3, lambda n: ()), (3, lambda n: (1 + n % 2,)), (3, lambda n: (0,)), (0, lambda n: ())],
)
def test_a_member_that_fails_every_attempt_is_left_out_itself(liar: int, suspects):
    world, failed = World(4), []

    def outcome(rank: int, attempt: str) -> Vote | None:
        if rank != liar:
            return a_vote(attempt, len(world.peers[rank].round._group.ranks))
        world.suspects = {liar: suspects(len(failed))}
        failed.append(attempt)
        return None

    world.outcome_of = outcome
    everybody_ready(world).run()
    # A leader that fails its own attempts leads on without being a member.
    assert liar not in the_commit(world).group.ranks
    assert len(the_commit(world).group.ranks) >= 2
    assert len(failed) <= 4


def test_a_member_that_calls_all_others_unequal_is_left_out_itself():
    world = World(3)
    world.outcome_of = lambda rank, attempt: a_vote(
        attempt, shares=("x" if rank == 2 else "s",) * len(world.peers[rank].round._group.ranks)
    )
    everybody_ready(world).run()
    assert the_commit(world).group.ranks == (0, 1)


def test_a_member_that_calls_one_after_the_other_unequal_leaves_out_one_at_most():
    world = World(4)

    def outcome(rank: int, attempt: str) -> Vote:
        ranks = world.peers[rank].round._group.ranks
        victim = next(i for i, r in enumerate(ranks) if r in (1, 2)) if rank == 3 else None
        return a_vote(attempt, shares=tuple("x" if i == victim else "s" for i in range(len(ranks))))

    world.outcome_of = outcome
    everybody_ready(world).run()
    assert the_commit(world).group.ranks == (0, 2)


def test_a_leader_that_spoils_what_it_leads_and_blames_nobody_is_left_by_all_others(monkeypatch):
    world = World(4, suspects=dict.fromkeys((1, 2, 3), (0,)))
    monkeypatch.setattr(world.peers[0].round._lead._blame, "guilty", lambda ranks: set())

    def outcome(rank, attempt):
        ranks = world.peers[rank].round._group.ranks
        spoilt = 0 in ranks and rank != 0
        return None if spoilt else Vote(0, "a", attempt, tuple("s" for _ in ranks), "b", "m")

    world.outcome_of = outcome
    everybody_ready(world).run()
    commits = [world.peers[rank].commit for rank in (1, 2, 3)]
    assert commits[0] is not None and commits == [commits[0]] * 3
    assert commits[0].group.ranks == (1, 2, 3)
    assert all(world.peers[rank].round.offenders == {0} for rank in (2, 3))
    assert world.peers[0].commit is None and world.peers[0].caught_up is not None


def test_a_member_that_alone_loses_attempts_to_its_leader_stops_nobody():
    world = World(4, suspects={2: (0,)})
    world.outcome_of = lambda rank, attempt: (
        None
        if rank == 2 and 0 in world.peers[2].round._group.ranks
        else Vote(0, "a", attempt, tuple("s" for _ in world.peers[rank].round._group.ranks), "b", "m")
    )
    everybody_ready(world).run()
    assert world.peers[0].commit.group.ranks == (0, 1, 3)
    assert world.peers[2].commit is None and world.peers[2].caught_up is not None


def test_members_that_lose_each_other_and_nobody_else_break_off_what_cannot_end():
    world = World(3)
    world.reduction_s = lambda attempt: 1e9 if not world.aborts else 0.5
    everybody_ready(world)
    world.part(1, 2, at=3.0)
    world.run()
    assert world.aborts[0].reason.endswith("lost peer 1") or world.aborts[0].reason.endswith("lost peer 2")
    assert the_commit(world).group.ranks == (0, 1, 2)
    assert world.peers[0].committed_at < 5.0


def test_where_nobody_votes_in_time_nobody_is_left_out_for_it():
    world = World(3)
    world.reduction_s = lambda attempt: 1e9 if not world.aborts else 0.5
    everybody_ready(world).run()
    assert the_commit(world).group.ranks == (0, 1, 2)
    assert world.peers[0].committed_at < 2 * TIMING.attempt_s


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("at", [0.25, 0.6, 0.9, 1.2, 1.5])
def test_a_peer_that_is_back_before_it_was_missed_is_not_waited_for(victim: int, at: float):
    world = everybody_ready(World(3, seed=int(at * 100) + victim))
    world.restart(victim, at)
    world.run()
    survivors = {rank: peer for rank, peer in world.peers.items() if rank != victim}
    for peer in survivors.values():
        assert peer.commit is not None and peer.committed_at < at + 8.0


@pytest.mark.parametrize("member", [1, 2])
def test_a_member_whose_commit_was_lost_on_the_way_commits_as_soon_as_the_leader_shows_that_it_has(member):
    world, lost = World(3), []

    def loses_the_first(sender: int, to: int, message: object) -> bool:
        if isinstance(message, Commit) and to == member:
            lost.append(message)
        return isinstance(message, Commit) and to == member and len(lost) == 1

    world.loses = loses_the_first
    everybody_ready(world).run()
    assert the_commit(world).group.ranks == (0, 1, 2)
    assert world.peers[member].committed_at < 8.0


def test_a_leader_that_is_no_member_opens_no_second_attempt_for_those_who_have_committed():
    world, groups = World(3), []
    world.on_send = lambda w, sender, to, message: (
        groups.append(message) if isinstance(message, Group) else None
    )
    everybody_ready(world, late={0: TIMING.gather_s + 15}).run()
    assert len({group.attempt for group in groups}) == 1


def test_a_peer_that_has_joined_another_attempt_still_asks_what_became_of_the_one_it_voted_for():
    # Else it brings work again that is in the others' state already.
    member = a_round(me=1, num_peers=2)
    member.on_ready(Proposal(1, 1, 1.0, 1, False), 0.0)
    group = a_group((0, 1))
    member.on_message(0, group, 0.1)
    member.on_reduced(group.attempt, a_vote(group.attempt, 2), 0.2)
    (reduce,) = (a for a in member.on_view({1: status(1)}, 0.3) if isinstance(a, Reduce))
    assert reduce.group.ranks == (1,)
    ahead = {1: status(1), 0: status(0, lineage="b", epoch=1, tokens=100)}
    assert member.on_view(ahead, 0.4) == [Send(0, Ask(0, "a"))]
    caught_up = member.on_message(0, Commit(group, "b", "m"), 0.5)[-1]
    assert caught_up == CatchUp(0, "peer 0 is ahead, at epoch 1", contributed=True)


def test_an_attempt_that_stands_is_not_left_for_a_fork_that_this_peer_has_no_part_in():
    member = a_round(me=1, num_peers=3)
    member.on_ready(Proposal(1, 1, 1.0, 1, False), 0.0)
    group = a_group((0, 1))
    member.on_message(0, group, 0.1)
    member.on_reduced(group.attempt, a_vote(group.attempt, 2), 0.2)
    forked = {rank: status(rank) for rank in range(2)} | {2: status(2, lineage="c", epoch=1, tokens=100)}
    assert member.on_view(forked, 0.3) == []
    assert member.on_message(2, Commit(a_group((2,)), "c", "c"), 0.4) == []
    commit = Commit(group, "b", "m")
    assert member.on_message(0, commit, 0.5) == [Apply(commit)]


def test_a_member_in_doubt_asks_all_that_have_gone_on_when_the_first_does_not_answer():
    member = a_round(me=2, num_peers=3)
    member.on_ready(Proposal(2, 1, 1.0, 1, False), 0.0)
    group = a_group((0, 1, 2))
    member.on_message(0, group, 0.1)
    member.on_reduced(group.attempt, a_vote(group.attempt), 0.2)
    ahead = {rank: status(rank, lineage="b", epoch=1, tokens=300) for rank in range(2)} | {2: status(2)}
    asked = [a for a in member.on_view(ahead, 0.3) if isinstance(a, Send) and isinstance(a.message, Ask)]
    assert [send.rank for send in asked] == [0]
    # However late it comes to that, as after a freeze: nobody has been given time to answer meanwhile.
    asked = [a for a in member.on_tick(60.0) if isinstance(a, Send) and isinstance(a.message, Ask)]
    assert [send.rank for send in asked] == [0, 1]
    member.on_tick(61.1)
    (caught_up,) = (a for a in member.on_tick(62.2) if isinstance(a, CatchUp))
    assert not caught_up.contributed


def a_group(ranks: tuple[int, ...]) -> Group:
    members = tuple(Proposal(rank, 1, 1.0, 1, False) for rank in ranks)
    weights = tuple(1 / len(ranks) for _ in ranks)
    return Group("0" * 32, 0, 0, "a", ranks[0], members, weights, len(ranks))
