"""The run's last round: whoever has committed leaves at once, and must not be taken for somebody who never did."""

from __future__ import annotations

from peers import membership
from peers.round.actions import Action, Apply, CatchUp, Reduce, Send
from peers.round.aggregation import Aggregation
from peers.round.messages import Ask, Commit, Group, Join, Proposal, Vote
from peers.rounds import Round
from tests.support.round_world import TIMING, status

MEMBERS = tuple(Proposal(rank, 100, 1.0, 10, True) for rank in range(3))
GROUP = Group(
    attempt="f" * 32,
    fragment=0,
    epoch=0,
    lineage="a",
    leader=0,
    members=MEMBERS,
    weights=Aggregation().weights_of(MEMBERS),
    data_width=3,
)
GONE_ON = {
    0: status(0, lineage="b", epoch=1, state="leaving", tokens=300),
    2: status(2, lineage="b", epoch=1, state="leaving", tokens=300),
}


def voter() -> Round:
    """Peer 1 of three after its vote, with nothing heard of the others' votes."""
    view = {rank: status(rank) for rank in range(3)}
    member = Round(me=1, incarnation=1, fragment=0, epoch=0, lineage="a", timing=TIMING, view=view)
    assert [type(action.message) for action in member.on_ready(MEMBERS[1], 0.0)] == [Join]
    assert member.on_message(0, GROUP, 0.1) == [Reduce(GROUP)]
    vote = Vote(0, "a", GROUP.attempt, ("s", "s", "s"), "anchor", "momentum")
    assert member.on_reduced(GROUP.attempt, vote, 0.2) == [Send(0, vote)]
    return member


def test_a_voter_whose_leader_leaves_with_a_new_state_asks_it_instead_of_committing_alone():
    member = voter()
    actions = member.on_view({1: status(1), **GONE_ON}, 0.3)
    assert actions == [Send(0, Ask(0, "a"))]
    commit = Commit(GROUP, "anchor", "momentum")
    assert member.on_message(0, commit, 0.4) == [Apply(commit)]


def test_a_voter_that_gets_no_answer_adopts_what_the_leaver_holds():
    member = voter()
    member.on_view({1: status(1), **GONE_ON}, 0.3)
    now, actions = 0.3, list[Action]()
    while not any(isinstance(action, CatchUp) for action in actions):
        now = member.deadline
        assert now < 0.4 + TIMING.doubt_s + TIMING.ask_s
        actions = member.on_tick(now)


def test_a_peer_that_leaves_with_the_same_state_or_an_older_one_is_not_ahead():
    leaver = {0: status(0, state="leaving"), 1: status(1, lineage="b", epoch=1, tokens=300)}
    assert membership.ahead_of(leaver, 1) is None
    assert membership.ahead_of(leaver | {1: status(1)}, 1) is None
