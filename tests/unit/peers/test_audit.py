"""False sums are found, by whom it may be, and nobody honest pays for it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from peers.errors import RoundFailed
from peers.reduction.residuals import Residuals
from peers.round.audit import contradictions, demanded, most_audited, owners_to_audit
from peers.round.audit_exchange import AuditTask, audit_shares
from peers.round.messages import Audit, Group, Proposal, Vote, parse, to_message
from tests.support.reduction_group import RANKS, ReductionGroup
from tests.support.round_world import World
from tests.unit.peers.test_rounds import everybody_ready, the_commit

SEVERAL_CHUNKS = 4 * (1 << 18) * 3 + 77


def group_of(*ranks: int, attempt: str = "0" * 32) -> Group:
    members = tuple(Proposal(rank, 1, 1.0, 0, False) for rank in ranks)
    return Group(attempt, 0, 0, "a", ranks[0], members, (1.0,) * len(ranks), 0)


# Who asks, and what is looked at


def test_each_owner_is_looked_at_as_often_as_was_said_however_many_there_are():
    group, rounds = group_of(*range(8)), 4000
    chances = [random.Random(rank) for rank in range(8)]
    times = 0
    for _ in range(rounds):
        times += any(3 in demanded(group, rank, 0.2, chances[rank]) for rank in range(8))
    assert 0.17 < times / rounds < 0.23


def test_nobody_asks_for_an_audit_of_itself_or_without_the_flag():
    group, chance = group_of(1, 4, 6), random.Random(0)
    assert demanded(group, 4, 1.0, chance) == (1, 6)
    assert demanded(group, 4, 0.0, chance) == ()
    assert demanded(group_of(4), 4, 1.0, chance) == ()


def test_who_asks_for_everything_gets_little_and_crowds_nobody_out_for_good():
    ranks = tuple(range(20))
    assert most_audited(0.05, 20) == 3
    drawn = [
        owners_to_audit(group_of(*ranks, attempt=f"{attempt:032x}"), ranks, (), 0.05)
        for attempt in range(200)
    ]
    assert all(len(owners) == 3 for owners in drawn)
    assert {owner for owners in drawn for owner in owners} == set(ranks)


def test_whose_sums_were_called_false_is_looked_at_first():
    assert 7 in owners_to_audit(group_of(*range(9)), range(9), (7,), 0.01)


def test_member_and_owner_that_say_unlike_things_are_both_named():
    group = group_of(1, 2)
    votes = {
        1: Vote(0, "a", group.attempt, sent=("own", "x"), received=("own", "z")),
        2: Vote(0, "a", group.attempt, sent=("z", "mine"), received=("y", "mine")),
    }
    assert contradictions(group, votes, [1]) == set()
    assert contradictions(group, votes, [2]) == {(1, 2)}


def test_an_audit_survives_the_wire():
    audit = Audit(0, "a", "0" * 32, (1, 4), (("x", "y"), ("z", "w")))
    assert parse(to_message(audit)) == audit


# The round


def test_sums_that_hold_are_committed_after_the_audit_by_all():
    world = everybody_ready(World(4, audit=0.3, demands={3: (1,), 0: (2,)}))
    world.run()
    assert the_commit(world).group.ranks == (0, 1, 2, 3)
    assert all(peer.num_audits == 1 and not peer.round.offenders for peer in world.peers.values())


@pytest.mark.parametrize("false", [0, 2])
def test_an_owner_of_false_sums_is_out_at_once_also_if_it_leads(false: int):
    asks = 3
    world = World(4, audit=0.3, demands={asks: (false,)})
    # The culprit itself finds nothing, whoever asks.
    world.finding_of = lambda rank, audit: (
        ((), (false,)) if false in audit.owners and rank != false else ((), ())
    )
    everybody_ready(world).run()
    honest = [rank for rank in range(4) if rank != false]
    commits = {world.peers[rank].commit for rank in honest}
    assert len(commits) == 1 and commits.pop().group.ranks == tuple(honest)
    assert false in world.peers[1].round.offenders or false != 0
    assert world.peers[false].commit is None


def test_who_calls_true_sums_false_is_left_out_itself():
    world = World(4, audit=0.3, demands={3: (1,)})
    world.finding_of = lambda rank, audit: ((), (1,)) if rank == 3 else ((), ())
    everybody_ready(world).run()
    assert world.peers[0].commit.group.ranks == (0, 1, 2)
    assert world.peers[0].round.offenders == {3}


def test_a_member_that_sends_something_else_to_those_who_look_is_left_out():
    world = World(4, audit=0.3, demands={3: (1,)})
    world.finding_of = lambda rank, audit: ((2,), ()) if rank != 2 and len(audit.inputs[0]) == 4 else ((), ())
    everybody_ready(world).run()
    assert world.peers[0].commit.group.ranks == (0, 1, 3)


def test_a_leader_that_hears_of_no_audit_is_left_by_who_asked_for_it(monkeypatch):
    world = World(3, audit=0.3, demands={2: (1,)})
    monkeypatch.setattr(world.peers[0].round._lead, "_owners_to_audit", lambda group: ())
    everybody_ready(world).run()
    assert world.peers[2].commit is None
    assert world.peers[2].round.offenders == {0}
    assert any("without the audit" in reason for reason in world.peers[2].round.failures)


def test_a_leader_that_misquotes_a_member_is_left_by_it(monkeypatch):
    world = World(3, audit=0.3, demands={0: (1,)})
    leader = world.peers[0].round._lead
    begin = leader._begin_audit

    def misquote(*arguments):
        return [
            (rank, dataclasses.replace(audit, inputs=((*audit.inputs[0][:2], "another"),)))
            for rank, audit in begin(*arguments)
        ]

    monkeypatch.setattr(leader, "_begin_audit", misquote)
    everybody_ready(world).run()
    assert any("has not" in reason for reason in world.peers[2].round.failures)
    assert world.peers[2].round.offenders == {0}


@pytest.mark.parametrize("at", [1.0, 1.2, 1.4, 1.6])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_whoever_dies_around_an_audit_the_survivors_commit(victim: int, at: float):
    world = everybody_ready(
        World(3, seed=victim + int(at * 10), audit=1.0, demands={0: (1, 2), 1: (2,), 2: (0,)})
    )
    world.kill(victim, at)
    world.run()
    commits = {peer.commit for peer in world.survivors.values() if peer.commit}
    assert len(commits) == 1
    assert all(peer.commit or peer.caught_up for peer in world.survivors.values())


# The sums


@pytest.fixture
def audited():
    """A reduction that has been done, whose sums can be looked at."""
    with contextlib.ExitStack() as stack:

        def build(**options):
            group = ReductionGroup(4, SEVERAL_CHUNKS, audited=True, **options)
            stack.enter_context(contextlib.closing(group))
            group.residuals = [Residuals(SEVERAL_CHUNKS) for _ in range(4)]
            with ThreadPoolExecutor(4) as pool:
                group.reports = list(
                    pool.map(lambda me: group.reduce(me, residuals=group.residuals[me]), range(4))
                )
            return group

        yield build


def findings(group: ReductionGroup, owners, cancelled=None) -> list[frozenset[int] | RoundFailed]:
    inputs = [[group.reports[member].sent_digests[owner] for member in range(4)] for owner in owners]

    def look(me):
        task = AuditTask(group.plan(me), owners, inputs)
        try:
            return audit_shares(
                task,
                group.anchor,
                group.locals[me],
                group.residuals[me].contribution,
                group.results[me],
                *group.sockets(me),
                stall_timeout_s=5.0,
                timeout_s=20.0,
                cancelled=group.cancelled[me],
            )
        except RoundFailed as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(look, range(4)))


def test_members_and_owners_say_the_same_of_what_went_between_them(audited):
    reports = audited(codec="int8").reports
    for owner in range(4):
        for member in range(4):
            assert reports[member].sent_digests[owner] == reports[owner].received_digests[member]


@pytest.mark.parametrize("rule", ["clip", "trimmed-mean", "centered-clip"])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8", "int4"])
def test_true_sums_hold_and_flipped_ones_do_not(audited, codec, rule):
    group = audited(codec=codec, rule=rule)
    assert findings(group, [0, 2]) == [frozenset()] * 4
    share = slice(group.bounds[2], group.bounds[3])
    for result in group.results:
        result[share].neg_()
    assert findings(group, [0, 2]) == [{RANKS[2]}] * 4


def test_one_bit_of_one_sum_is_found_where_the_codec_loses_nothing(audited):
    group = audited(codec="fp32")
    for result in group.results:
        result[group.bounds[1]] = result[group.bounds[1]].nextafter(result[0] + 10)
    assert findings(group, [1]) == [{RANKS[1]}] * 4


def test_what_a_lossy_codec_carries_over_from_earlier_rounds_is_nobodys_crime(audited):
    group = audited(codec="int4")
    for me in range(4):
        group.residuals[me].commit(group.plan(me), group.anchor, group.locals[me], decay=1.0)
        # A step that is far smaller than the one before: what is left of that one would drown it.
        group.locals[me] = group.anchor + 0.01 * (group.locals[me] - group.anchor)
    group.norms = [100 * norm for norm in group.norms]
    with ThreadPoolExecutor(4) as pool:
        group.reports = list(pool.map(lambda me: group.reduce(me, residuals=group.residuals[me]), range(4)))
    assert findings(group, range(4)) == [frozenset()] * 4


def test_who_sends_something_else_now_than_it_did_then_is_named(audited):
    group = audited(codec="fp32")
    group.locals[3] = group.locals[3] + 1e-3
    found = findings(group, [1])
    assert all(isinstance(error, RoundFailed) for error in found)
    assert [error.suspects for error in found] == [{RANKS[3]}] * 3 + [frozenset()]


def test_a_member_that_is_gone_is_named_by_all_and_nobody_else_is(audited):
    group = audited(codec="fp32")
    for sock in (*group.send[3].values(), *group.receive[3].values()):
        sock.shutdown(socket.SHUT_RDWR)
    found = findings(group, [1])
    assert all(isinstance(error, RoundFailed) for error in found)
    assert [error.suspects for error in found[:3]] == [{RANKS[3]}] * 3
