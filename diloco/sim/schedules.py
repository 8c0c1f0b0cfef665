"""Random schedules: from one seed a swarm, its faults and its liar are drawn and run, and the outcome is judged."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from diloco.sim import faults as injected
from diloco.sim.faults import Fault, draw_faults
from diloco.sim.forgers import FORGERS
from diloco.sim.invariants import InvariantViolated
from diloco.sim.liars import LIARS
from diloco.sim.network import Quality
from diloco.sim.swarm import Durations, Span, VirtualSwarm, peer_id_of, settings_for
from diloco.sim.values import State, initial_state
from peers.core.weights import Aggregation
from peers.protocol.aggregation import LEAST_ROBUST_GROUP, Rule

ALL_LIARS = LIARS | FORGERS
DELAYS_S = (*2 * ((0.001, 0.02), (0.01, 0.2)), (0.1, 0.5))
"""With the longest, timeouts scale with the round trips, no longer with the heartbeats."""
SLOW_FETCH_S = (3.0, 10.0)
"""As long as one to three epochs."""
FAULTS_S = 40.0
LOOK_S = 2.0
STEPS_PER_EPOCH = 6
COMMITS = 2
"""Commits after the last fault that all honest peers must have in common: liveness."""
SETTLE_S = 100.0
"""The time after the last fault in which these commits have to be made.

10 s until all peers are back, heard and trusted again, one attempt or download that hangs (30 s), and two epochs, in
each of which a quorum may wait a grace of 30 s for a slow peer.
"""
LIAR_S = 100.0
"""Additional time if a member lies: it leads every fourth or fifth attempt, and is left out after three that hang
(30 s)."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that the seed decides before the swarm begins."""

    seed: int
    num_peers: int
    starts: dict[int, float]
    """By rank."""
    faults: tuple[Fault, ...]
    liar: tuple[int, str] | None
    """Its rank, and the kind of lie."""
    saves: bool
    """Peers write checkpoints, and offer them when they restart."""
    offers_differ: bool
    grace_s: float
    delay_s: Span
    fetch_s: Span
    epoch_s: float | None
    never_waits: bool
    num_fragments: int
    quorum: float
    aggregation: Aggregation
    """As in the core's Settings."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.num_peers} peers, grace {self.grace_s:g} s, saves: {self.saves}"]
        if self.offers_differ:
            lines.append("  everybody offers another state")
        if self.epoch_s is not None:
            lines.append("  epochs last as long as trains most")
        if self.fetch_s == SLOW_FETCH_S:
            lines.append("  states are fetched slowly")
        if self.never_waits:
            lines.append("  workers never wait for a round")
        rule, discount = self.aggregation.rule, self.aggregation.staleness_discount
        lines.append(
            f"  {self.num_fragments} fragments, quorum {self.quorum:g}, {rule}, discount {discount:g}"
        )
        if self.liar is not None:
            lines.append(f"  peer {self.liar[0]} lies: {self.liar[1]}")
        late = [f"{rank} at {at:.1f} s" for rank, at in self.starts.items() if at > 1]
        if late:
            lines.append(f"  late: {', '.join(late)}")
        return "\n".join(lines + [f"  {fault}" for fault in self.faults])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    schedule: Schedule
    fault: str
    """The invariant that was violated; empty: none."""
    trace: list[str] = field(default_factory=list)


def draw(seed: int) -> Schedule:
    rng = random.Random(seed)
    num_peers = rng.choice((2, 3, 3, 4, 5, 5))
    starts = {
        rank: rng.uniform(5.0, 20.0) if rng.random() < 0.1 else rng.uniform(0.0, 1.0)
        for rank in range(num_peers)
    }
    has_liar = num_peers >= 4 and rng.random() < 0.4
    liar = (rng.randrange(num_peers), rng.choice(list(ALL_LIARS))) if has_liar else None
    is_calm = has_liar and rng.random() < 0.5
    return Schedule(
        seed=seed,
        num_peers=num_peers,
        starts=starts,
        faults=() if is_calm else tuple(draw_faults(rng, num_peers, FAULTS_S, long=seed % 8 in (4, 6))),
        liar=liar,
        saves=rng.random() < 0.3,
        offers_differ=rng.random() < 0.1,
        grace_s=rng.choice((2.0, 5.0, 30.0)),
        delay_s=rng.choice(DELAYS_S),
        epoch_s=0.0 if seed % 4 == 2 else None,
        never_waits=seed % 8 in (2, 5),
        num_fragments=2 if rng.random() < 0.3 else 1,
        # A member that lies could make any other quorum unattainable.
        quorum=0.7 if not has_liar and rng.random() < 0.1 else 0.5,
        aggregation=_draw_aggregation(rng, num_peers),
        fetch_s=SLOW_FETCH_S if rng.random() < 0.2 else Durations.fetch_s,
    )


def _draw_aggregation(rng: random.Random, num_peers: int) -> Aggregation:
    rules: tuple[Rule, ...] = ("clip", "clip", "clip", "clip", "mean", "trimmed-mean")
    rule = rng.choice(rules) if num_peers >= LEAST_ROBUST_GROUP else "clip"
    return Aggregation(
        rule=rule,
        # A step counts for one token.
        max_tokens_per_epoch=STEPS_PER_EPOCH,
        staleness_discount=0.5 if rng.random() < 0.2 else 1.0,
    )


def swarm_of(schedule: Schedule, *, traced: bool = False) -> VirtualSwarm:
    liar = schedule.liar
    swarm = VirtualSwarm(
        schedule.num_peers,
        schedule.seed,
        starts=False,
        settings=settings_for(
            schedule.num_peers,
            grace_s=schedule.grace_s,
            epoch_s=schedule.epoch_s,
            never_waits=schedule.never_waits,
            steps_per_epoch=STEPS_PER_EPOCH,
            num_fragments=schedule.num_fragments,
            quorum=schedule.quorum,
            aggregation=schedule.aggregation,
        ),
        durations=Durations(fetch_s=schedule.fetch_s),
        quality=Quality(delay_s=schedule.delay_s),
        liars={liar[0]: ALL_LIARS[liar[1]]} if liar else None,
        saves=schedule.saves,
        traced=traced,
    )
    if schedule.offers_differ:
        swarm.offers = {peer_id_of(rank): initial_state(f"of {rank}") for rank in range(schedule.num_peers)}
    for rank, at in schedule.starts.items():
        swarm.at(at, lambda rank=rank: swarm.start(rank))  # type: ignore[misc]
    injected.inject(swarm, list(schedule.faults))
    return swarm


def run(seed: int, *, traced: bool = False) -> Verdict:
    schedule = draw(seed)
    swarm = swarm_of(schedule, traced=traced)
    fault, settled_s = "", 0.0
    try:
        swarm.run(FAULTS_S)
        while why_unsettled(swarm):
            if settled_s >= SETTLE_S + (LIAR_S if schedule.liar else 0.0):
                if lacks_honest_majority(swarm):
                    break
                raise InvariantViolated(f"{settled_s:.0f} s after the last fault {why_unsettled(swarm)}")
            swarm.run(LOOK_S)
            settled_s += LOOK_S
        if lost := lost_pieces(swarm):
            raise InvariantViolated(lost)
    except Exception as error:  # noqa: BLE001  Whatever a peer fails with is a fault of the schedule.
        fault = f"{type(error).__name__}: {error}" if not isinstance(error, InvariantViolated) else str(error)
    return Verdict(schedule=schedule, fault=fault, trace=swarm.trace)


def why_unsettled(swarm: VirtualSwarm) -> str:
    """Why liveness does not hold yet. Empty: all honest peers are live, on one chain, and have made COMMITS further
    commits on it since the last fault."""
    if not injected.is_over(swarm):
        return "faults last"
    states = [peer.state for peer in swarm.honest]
    if any(state is None for state in states):
        return f"{sum(state is None for state in states)} honest peers have no state"
    by_genesis: dict[str, list[State]] = {}
    for state in states:
        if state is not None:
            by_genesis.setdefault(state.genesis, []).append(state)
    # Runs that were founded apart during a partition stay apart: neither roster may be overruled by the other. One of
    # fewer peers than the rule needs makes no commits.
    runs = (held for held in by_genesis.values() if len(held) >= swarm.settings.aggregation.least_group)
    return next(filter(None, map(_why_apart, runs)), "")


def lacks_honest_majority(swarm: VirtualSwarm) -> bool:
    """Whether there is a run in which the roster of every honest peer lacks an honest majority: then no further commit
    is guaranteed.

    This happens if the liar founded the run alone, or with one other, before most peers had started, or if honest
    members have left.
    """
    lacks: dict[str, list[bool]] = {}
    for peer in swarm.honest:
        if peer.state is not None:
            roster = swarm.truth.roster_after(peer.state.head)
            has_majority = 2 * len(roster - swarm.liars) > len(roster)
            lacks.setdefault(peer.state.genesis, []).append(not has_majority)
    return any(map(all, lacks.values()))


def _why_apart(held: list[State]) -> str:
    least = min(held, key=lambda state: state.epoch)
    if not all(least.leads_to(state) for state in held):
        return "honest peers are on different chains"
    common: State | None = least
    for _ in range(COMMITS):
        if common is None or common.made_at <= FAULTS_S:
            return f"honest peers have not made {COMMITS} further commits in common"
        common = common.parent
    return ""


def lost_pieces(swarm: VirtualSwarm) -> str:
    """Pieces that live workers of honest peers have trained and that are lost, as a sentence; empty: none.

    A piece is not lost if it is in any state, also of a chain that lost, or pending in its worker.
    """
    everywhere = {piece for state in swarm.truth.states.values() for piece in state.pieces}
    for peer in swarm.honest:
        worker = peer.worker
        assert worker is not None
        if lost := sorted(worker.trained - worker.pending - everywhere):
            return f"{peer.peer_id} has lost pieces {lost}"
    return ""


def report(seed: int) -> str:
    """The schedule of this seed, the trace of its run, and the verdict, as text."""
    verdict = run(seed, traced=True)
    return "\n".join([str(verdict.schedule), *verdict.trace, verdict.fault or "everything held"])
