"""A peer from its start to its loss: what the effects of its core (peers.core) cost in simulated time.

A reduction takes as long as links and CPUs need for it, everything else as long as the machine's paces say. While a
commit is applied, other events wait, as in the daemon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from diloco.sim.cost.figures import EpochOfPeer, Parts
from diloco.sim.cost.reduction import FP32_BYTES, Reduced, Reduction
from diloco.sim.cost.worker import Continuation, Work, Worker
from diloco.sim.runtime import Process
from peers.core import effects, events
from peers.core.events import Event
from peers.core.peer import Peer
from peers.core.round import Stage
from peers.protocol import certificates
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Offer
from peers.reduce.bandwidth import WINDOW_S, Bandwidth
from peers.state.header import STATE_CHUNK_NUMEL
from peers.timing import OFTEN_S

if TYPE_CHECKING:
    from diloco.sim.cost.swarm import CostSwarm

_NO_DONOR_S = 0.5
"""Time after which a download without any live donor fails."""


@dataclass
class Piece:
    """A fragment that the worker has handed over, and the progress of its round."""

    work: Work
    fragment: int
    since: float
    grouped_at: float | None = None
    voted_at: float = 0.0
    parts: Parts = field(default_factory=Parts)
    sent_bytes: int = 0


class CostPeer(Process):
    """`machine` is the peer's core. A peer that returns after a loss is a new CostPeer."""

    machine: Peer

    def __init__(self, swarm: CostSwarm, rank: int, incarnation: int, offer: Offer) -> None:
        super().__init__(swarm.peer_ids[rank], swarm.clock, swarm.messages, swarm.pledges[rank])
        scenario = swarm.scenario
        self.swarm, self.rank = swarm, rank
        self.incarnation, self._offer = incarnation, offer
        self._means = scenario.peers[rank]
        self._paces = self._means.machine
        self.since = self._clock.now
        """Time of the start."""
        self.certificate: Certificate | None = None
        """Certificate of the state that this peer holds."""
        self.worker = Worker(
            clock=self._clock,
            schedule=scenario.schedule,
            step_s=self._means.step_s,
            jitter=scenario.jitter,
            machine=self._paces,
            chance=swarm.chance_of(rank, incarnation),
            fragment_bytes=lambda epoch: FP32_BYTES * self._numel_of(scenario.schedule.fragment_of(epoch)),
            hand_over=self._handed_over,
            merged=self._merged,
        )
        self._piece: Piece | None = None
        self._reduction: Reduction | None = None
        self._bandwidth = Bandwidth()
        self._ended: EpochOfPeer | None = None
        self._heard_mesh_at = -math.inf

    # Life

    def start(self, machine: Peer) -> None:
        """Start with a worker that is ready immediately."""
        self.machine = machine
        self.swarm.messages.open(self.peer_id, self)
        self.post(events.StateOffered(self._offer))
        self.post(events.WorkerWaits())

    def stop(self) -> None:
        """The machine is lost."""
        self.is_running = False
        self.worker.stop()
        self.swarm.messages.close(self.peer_id)
        self.swarm.downloads.stop(self.rank)
        if self._reduction is not None:
            self._reduction.lose(self.rank)

    # As a process

    def heard_meanwhile(self) -> Event | None:
        """What the mesh of a large swarm says every second has an effect only when the core is called."""
        now = self._clock.now
        if not self.swarm.is_large or now < self._heard_mesh_at + OFTEN_S:
            return None
        self._heard_mesh_at = now
        return events.StillHere(frozenset(self.swarm.here))

    @property
    def is_idle(self) -> bool:
        """Whether the peer only trains or reduces."""
        core, round_ = self.machine, self.machine.round
        if round_ is None or core.catch_up.target is not None:
            return False
        is_training = core.phase == "training" and round_.stage is Stage.GATHER
        return is_training or round_.stage is Stage.REDUCE

    def may_sleep(self) -> bool:
        return self.is_idle and self.swarm.is_quiet

    def due_event(self) -> Event | None:
        """The worker's progress, if it still trains in the core's epoch."""
        is_there = self.certificate is not None and self.worker.epoch == self.machine.epoch
        trains = is_there and self.machine.phase == "training"
        return events.WorkerTrains(self.worker.local_step, self._means.step_s) if trains else None

    # The worker's side

    def _handed_over(self, work: Work) -> None:
        assert self.certificate is not None
        epoch, scenario = self.worker.epoch, self.swarm.scenario
        self._piece = Piece(work, scenario.schedule.fragment_of(epoch), self._clock.now)
        handed = certificates.Work(
            tokens=work.steps * scenario.tokens_per_step,
            norm=1.0,
            step=scenario.schedule.nominal_step(epoch, self.worker.local_step, None),
            based_on=0,
            bandwidth=self._bandwidth.bytes_per_s,
        )
        parts, took_s = self._piece.parts, self._bytes / self._paces.propose + 2 * self._paces.hop_s
        parts.propose_s = took_s
        self._later(took_s, lambda: self.post(events.WorkReady(handed)))

    def _merged(self, at: float, blocked_s: float) -> None:
        if self._ended is not None:
            self._ended.at, self._ended.parts.blocked_s = at, blocked_s
            self._ended = None
        self._clock.at(at, self.swarm.check_end)

    def answer(self, answer: effects.Answer) -> None:
        if answer.how == "begin":
            begin = partial(self.worker.begin, answer.epoch, answer.local_step, answer.epoch_s)
            self._later(self._paces.hop_s, begin)
            self.swarm.began(self)
            return
        self.stop_reducing()
        self._piece = None
        counts = answer.how == "contributed"
        onward = Continuation(answer.epoch, answer.local_step, answer.epoch_s, counts)
        self._later(self._paces.hop_s, lambda: self.worker.answer(onward))

    def go_ahead(self, order: effects.GoAhead) -> None:
        self.worker.go_ahead(order.epoch, order.epoch_s)

    # Reductions

    def stop_reducing(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.leave(self.rank)

    def reduce(self, plan: Plan, timeout_s: float) -> None:
        self.stop_reducing()
        piece, timing = self._piece, self.machine.timing
        assert piece is not None
        piece.grouped_at = self._clock.now if piece.grouped_at is None else piece.grouped_at
        reduction = self._reduction = self.swarm.reduction(plan)
        reduction.begin(
            self.rank,
            on_reduced=lambda reduced: self._reduced(reduction, reduced),
            on_failed=lambda suspects: self._reduce_failed(reduction, suspects),
            stall_s=timing.stall_s,
            connect_s=min(timing.connect_s, timeout_s / 2),
        )
        self._later(timeout_s, lambda: reduction.time_out() if self._reduction is reduction else None)

    def _reduced(self, reduction: Reduction, reduced: Reduced) -> None:
        piece = self._piece
        if self._reduction is not reduction or piece is None or self.certificate is None:
            return
        self._reduction = None
        paces, parts, link = self._paces, piece.parts, self._means.link
        parts.connect_s, parts.reduce_s = reduced.connect_s, reduced.reduce_s
        piece.sent_bytes += reduced.volume.sent_bytes
        if reduced.reduce_s >= WINDOW_S:
            self._bandwidth.saw(min(link.up_bytes_per_s, link.down_bytes_per_s))
        parts.preview_s = paces.hop_s + paces.remaining_preview_s(
            self._bytes, reduced.reduce_s, FP32_BYTES * STATE_CHUNK_NUMEL
        )
        anchor, momentum = self.swarm.outcome_of(reduction.plan)

        def vote() -> None:
            piece.voted_at = self._clock.now
            self.post(events.Reduced(reduction.plan.digest, anchor, momentum))

        self._later(parts.preview_s, vote)

    def _reduce_failed(self, reduction: Reduction, suspects: frozenset[int]) -> None:
        if self._reduction is not reduction:
            return
        self._reduction = None
        named = frozenset(self.swarm.peer_ids[rank] for rank in suspects if rank != self.rank)
        self.post(events.ReduceFailed(reduction.plan.digest, "a stream broke or stalled", named))

    # States

    def apply(self, certificate: Certificate) -> None:
        piece = self._piece
        assert piece is not None
        piece.parts.vote_s = self._clock.now - piece.voted_at
        piece.parts.apply_s = self._bytes / self._paces.apply + self._paces.hop_s

        def applied() -> None:
            assert piece.grouped_at is not None
            now, plan = self._clock.now, certificate.plan
            self.certificate = certificate
            piece.parts.round_s, piece.parts.wait_s = now - piece.grouped_at, piece.grouped_at - piece.since
            self._ended = EpochOfPeer(
                epoch=plan.epoch,
                rank=self.rank,
                at=now,
                num_members=len(plan.contributors),
                train_s=piece.work.seconds,
                steps=piece.work.steps,
                sent_bytes=piece.sent_bytes,
                head=certificate.head,
                parts=piece.parts,
            )
            self.swarm.committed(certificate, self._ended)

        self.busy(piece.parts.apply_s, applied)

    def fetch(self, fetch: effects.Fetch) -> None:
        """Download the state from the donors that are still alive. They can serve older states, by recorded commits."""
        head = fetch.path[-1].head
        donors = [peer.rank for p in fetch.donors if (peer := self.swarm.living.get(p)) is not None]
        if not donors:
            failed = events.FetchFailed(head, "no donor is there", frozenset(fetch.donors))
            self._later(_NO_DONOR_S, lambda: self.post(failed))
            return
        num_bytes = self.swarm.downloads.size_of(fetch.path, self.certificate)
        self.swarm.downloads.begin(self.rank, donors, num_bytes, lambda: self.post(events.Fetched(head)))

        def time_out() -> None:
            target = self.machine.catch_up.target
            if target is not None and target.head == head:
                self.swarm.downloads.stop(self.rank)
                self.post(events.FetchFailed(head, "it took too long"))

        self._later(fetch.timeout_s, time_out)

    def adopt(self, certificate: Certificate) -> None:
        if self.certificate is not None and self.certificate.head != certificate.head:
            self.swarm.losses.caught_up += 1
        self.certificate = certificate
        self.swarm.adopted(certificate)
        for other, peer_id in enumerate(self.swarm.peer_ids):
            if other != self.rank:
                round_trip_s = 2 * self.swarm.messages.delay_s(self.peer_id, peer_id)
                self.machine.swarm.measured(peer_id, round_trip_s)

    def rebase(self) -> None:
        self.busy(self._bytes / self._paces.take, lambda: None)

    # Figures

    def _numel_of(self, fragment: int) -> int:
        return self.swarm.scenario.fragment_sizes[fragment]

    @property
    def _bytes(self) -> float:
        """fp32 size of the fragment that is being averaged."""
        assert self._piece is not None
        return FP32_BYTES * self._numel_of(self._piece.fragment)

    def _later(self, seconds: float, event: Callable[[], object]) -> None:
        self._clock.after(seconds, lambda: event() if self.is_running else None)
