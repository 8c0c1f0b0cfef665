"""The checks of the simulation, against machines that break the rules: a check that finds nothing proves nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from diloco.sim import schedules
from diloco.sim.forgers import FORGERS
from diloco.sim.invariants import Invariants, InvariantViolated
from diloco.sim.liars import Liar
from diloco.sim.schedules import lost_pieces
from diloco.sim.swarm import VirtualSwarm
from diloco.sim.truth import Outages, Truth
from diloco.sim.values import State, digest
from peers.core import catch_up, chain, effects, events
from peers.core.group import Group
from peers.core.weights import Aggregation
from peers.protocol.messages import Certificates, Vote
from tests.unit.peers.core.made import SETTINGS, chain_of, commit, genesis, verify


class Broken(Liar):
    """A peer that the checks take for honest although it breaks a rule; they must find the violation."""


class VotesTwice(Broken):
    def say(self, effect):
        if isinstance(effect, effects.Send) and isinstance(effect.message, Vote):
            return effect, effects.Send(effect.peer_id, replace(effect.message, anchor=digest("other")))
        return (effect,)


class VotesWithoutPledge(Broken):
    def say(self, effect):
        return () if isinstance(effect, effects.Pledge) else (effect,)


class TellsItsWorkerTooSoon(Broken):
    def answer(self, event):
        if isinstance(event, events.WorkReady):
            return (effects.Answer("contributed", self.certificate, 0),)
        return ()


class TrainsTheSameTwice(Broken):
    """Tells its worker to rebase work that the commit already contains."""

    def say(self, effect):
        if isinstance(effect, effects.Answer) and effect.how == "contributed":
            return (effects.Answer("rebase", effect.certificate, effect.local_step),)
        return (effect,)


class DoesNotApply(Broken):
    def say(self, effect):
        return () if isinstance(effect, effects.Apply) else (effect,)


class GoesBack(Broken):
    """Returns to the head before its newest, although everybody has signed what followed."""

    wanted = None

    def answer(self, event):
        match event:
            case events.WorkerTrains() if self.inner.epoch == 3 and self.wanted is None:
                self.wanted = self.inner.chain.get(self.inner.certificate.plan.parent)
                return (effects.Fetch((self.wanted,), ("p0", "p2", "p3"), 30.0),)
            case events.Fetched(head) if self.wanted is not None and head == self.wanted.head:
                return (effects.Adopt(self.wanted),)
        return ()


class BelievesAnybody(Broken):
    """Adopts whatever certificate it is shown."""

    def answer(self, event):
        match event:
            case events.Received("p0", Certificates(_, (*_, last))) if last.plan.signers == ("p0",):
                self.wanted = last
                return (effects.Fetch((last,), ("p0",), 30.0),)
            case events.Fetched(head) if head == self.wanted.head:
                return (effects.Adopt(self.wanted),)
        return ()


def swarm_with(machine, *, rank: int = 1, liars=None) -> VirtualSwarm:
    """A swarm of four; this machine is one of them and taken for honest."""
    swarm = VirtualSwarm(4, starts=False, liars=liars)
    swarm.machines[f"p{rank}"] = machine
    for peer in range(4):
        swarm.start(peer)
    return swarm


@pytest.mark.parametrize(
    ("machine", "complaint"),
    [
        (VotesTwice, "signs twice"),
        (VotesWithoutPledge, "without having pledged"),
        (TellsItsWorkerTooSoon, "are not"),
        (TrainsTheSameTwice, "already"),
        (DoesNotApply, "elsewhere"),
        (GoesBack, "goes back"),
    ],
)
def test_a_peer_that_breaks_a_rule_is_found(machine, complaint):
    swarm = swarm_with(machine)
    with pytest.raises(InvariantViolated, match=complaint):
        swarm.run(60.0)


def test_a_peer_that_adopts_a_forged_state_is_found():
    swarm = swarm_with(BelievesAnybody, liars={0: FORGERS["forges a commit"]})
    with pytest.raises(InvariantViolated, match="adopts"):
        swarm.run(60.0)


@pytest.mark.parametrize(("kind", "seed"), [("forges a commit", 133), ("forges a long chain", 285)])
def test_a_peer_that_adopts_whatever_is_signed_is_found(monkeypatch, kind, seed):
    monkeypatch.setattr(catch_up, "adoptable_prefix", lambda fork, **_: fork.theirs)
    monkeypatch.setattr(catch_up.CatchUp, "_majority_stayed_at", lambda *_: False)
    liar = schedules.draw(seed).liar
    assert liar is not None and liar[1] == kind
    assert "signed by" in schedules.run(seed).fault


def test_a_peer_that_lets_one_that_was_once_alone_rewrite_the_chain_is_found(monkeypatch):
    monkeypatch.setattr(chain, "_taken_in", lambda *_: set())
    assert "against the Fork rule" in schedules.run(4307).fault


def test_a_minority_that_commits_as_soon_as_the_others_are_lost_is_found(monkeypatch):
    monkeypatch.setattr(
        Group, "can_do_without", lambda self, turn, others: not any(map(self._swarm.is_live, others))
    )
    faults = [schedules.run(seed).fault for seed in (12, 14, 24, 29)]
    assert all("by a minority, though it hears" in fault for fault in faults)


def test_a_minority_need_not_wait_for_a_peer_that_was_back_only_while_nobody_could_hear_it():
    assert schedules.run(14849).fault == ""


def test_a_peer_that_prefers_the_wrong_side_of_a_fork_is_found(monkeypatch):
    monkeypatch.setattr(
        catch_up,
        "prefers_theirs",
        lambda fork, *who: not fork.ours or not chain.prefers_theirs(fork, *who),
    )
    assert any("against the Fork rule" in schedules.run(seed).fault for seed in (12, 20, 60))


def state_at(path):
    state = None
    for certificate in path:
        body = certificate.body
        state = State(
            certificate.head,
            certificate.plan.epoch,
            body.anchor,
            body.momentum,
            certificate=certificate,
            parent=state,
        )
    return state


def test_a_peer_that_gives_commits_up_for_a_run_founded_anew_is_found():
    way = [genesis("abc"), *chain_of(genesis("abc"), "abc", 5)]
    anew = genesis("c", epoch=3, parent=way[3].head)
    truth, theirs = Truth(), state_at([*way[:4], anew])
    truth.knows([*way, anew])
    peers = {
        name: SimpleNamespace(peer_id=name, is_honest=True, state=state, fetched_state=theirs)
        for name, state in (("a", state_at(way)), ("b", state_at(way)), ("c", theirs))
    }
    for peer in peers.values():
        truth.holds(peer, peer.state, 0.0)
    invariants = Invariants(SimpleNamespace(now=100.0), truth, verify, (), peers, SETTINGS)
    with pytest.raises(InvariantViolated, match="of another run"):
        invariants.adopts(peers["a"], anew)


def test_a_peer_that_stays_behind_with_a_liar_is_not_excused():
    way = [genesis("abcdz"), commit(genesis("abcdz"), "abcdz")]
    most, few = chain_of(way[-1], "abc", 4), chain_of(way[-1], "dz", 3)
    few.append(commit(few[-1], "dz", off="abc"))
    truth = Truth()
    truth.knows([*way, *most, *few])
    honest = [SimpleNamespace(state=state_at([*way, *most])) for _ in "abc"]
    swarm = SimpleNamespace(truth=truth, liars=frozenset("z"), honest=honest)
    swarm.honest.append(SimpleNamespace(state=state_at([*way, *few])))
    assert not schedules.lacks_honest_majority(swarm)
    swarm.honest = swarm.honest[-1:]
    assert schedules.lacks_honest_majority(swarm)


def test_wrong_weights_on_which_all_agree_are_found(monkeypatch):
    def first_counts(self, works, epoch, num_fragments, **_):
        return (1.0, *(0.0 for _ in works[1:]))

    monkeypatch.setattr(Aggregation, "weights_of", first_counts)
    with pytest.raises(InvariantViolated, match="with the weights"):
        VirtualSwarm(3).run(60.0)


def test_lost_pieces_are_found():
    swarm = VirtualSwarm(2)
    swarm.run(20.0)
    assert lost_pieces(swarm) == ""
    worker = swarm.peers[1].worker
    worker.pending -= {max(worker.trained)}
    assert "p1 has lost pieces" in lost_pieces(swarm)


def test_outages_with_several_causes_last_until_the_last_of_them_ends():
    outages = Outages()
    pair = [("a", "b")]
    outages.begin(pair, 1.0)
    outages.begin(pair, 2.0)
    outages.end(pair, 4.0)
    assert outages.longest_s("a", "b", 0.0, 5.0) == 4.0
    outages.end(pair, 6.0)
    assert outages.longest_s("a", "b", 0.0, 9.0) == 5.0
    assert outages.longest_s("a", "b", 7.0, 9.0) == outages.longest_s("b", "a", 0.0, 9.0) == 0.0


def test_outages_between_which_nothing_can_be_said_are_one():
    outages = Outages()
    pair = [("a", "b")]
    for begin, end in ((1.0, 4.0), (4.5, 6.0), (9.0, 10.0)):
        outages.begin(pair, begin)
        outages.end(pair, end)
    assert outages.longest_s("a", "b", 0.0, 20.0) == 5.0
    assert outages.longest_s("a", "b", 7.0, 20.0) == 1.0


def test_an_outage_counts_until_its_effects_have_ended():
    outages, pair = Outages(), [("a", "b")]
    assert outages.since("a", "b", 0.0) == float("inf")
    for begin, end in ((1.0, 4.0), (10.0, 12.0)):
        outages.begin(pair, begin)
        outages.end(pair, end)
    outages.begin(pair, 20.0)
    assert [outages.since("a", "b", ended_at) for ended_at in (3.0, 5.0, 13.0)] == [1.0, 10.0, 20.0]
