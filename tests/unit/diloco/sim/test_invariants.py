"""The checks of the simulation, against machines that break the rules: a check that finds nothing proves nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from diloco.sim import schedules
from diloco.sim.forgers import FORGERS
from diloco.sim.invariants import InvariantViolated
from diloco.sim.liars import Liar
from diloco.sim.schedules import lost_pieces
from diloco.sim.swarm import VirtualSwarm
from diloco.sim.truth import Outages
from diloco.sim.values import digest
from peers.core import catch_up, chain, effects, events
from peers.core.weights import Aggregation
from peers.protocol.messages import Certificates, Vote


class Broken(Liar):
    """A peer that is taken for honest, and is not: what it does has to be found."""


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
    """Answers that the work is to be rebased, though it is in."""

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
    """Of four, one of which is this machine and taken for honest."""
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


def test_a_peer_that_prefers_the_wrong_side_of_a_fork_is_found(monkeypatch):
    monkeypatch.setattr(
        catch_up, "prefers_theirs", lambda fork: not fork.ours or not chain.prefers_theirs(fork)
    )
    assert any("against the Fork rule" in schedules.run(seed).fault for seed in (12, 20, 60))


def test_wrong_weights_on_which_all_agree_are_found(monkeypatch):
    def first_counts(self, works, epoch, num_fragments):
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
