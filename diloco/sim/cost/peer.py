"""A peer from its start to its loss: what the effects of its core (peers.core) cost in simulated time.

A reduction takes as long as links and CPUs need for it, everything else as long as the machine's paces say. While a
commit is applied, other events wait, as in the daemon.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from diloco.sim.cost.figures import EpochOfPeer
from diloco.sim.cost.reduction import Reduction
from diloco.sim.cost.scenario import FP32_BYTES
from diloco.sim.cost.worker import CostWorker, Work
from diloco.sim.runtime import Process
from diloco.sim.values import digest
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


class CostPeer(Process):
    """A peer that returns after a loss is a new CostPeer."""

    def __init__(self, swarm: CostSwarm, rank: int, incarnation: int, offer: Offer) -> None:
        super().__init__(swarm.peer_ids[rank], swarm.clock, swarm.messages, swarm.pledges[rank])
        self.swarm, self.rank = swarm, rank
        self.incarnation, self._offer = incarnation, offer
        self._means = swarm.scenario.peers[rank]
        self._paces = self._means.machine
        self.since = self._clock.now
        """Time of the start."""
        self.certificate: Certificate | None = None
        """Certificate of the state that this peer holds."""
        self.worker = CostWorker(self)
        self._part: EpochOfPeer | None = None
        """The fragment that the worker has handed over, and the progress of its round."""
        self._reduction: Reduction | None = None
        self._bandwidth = Bandwidth()
        self._ended: EpochOfPeer | None = None
        self._heard_mesh_at = -math.inf

    # Start and loss

    def start(self, machine: Peer) -> None:
        """Start with a worker that is ready immediately."""
        self.machine = machine
        self.swarm.messages.open(self)
        self.worker_arrives(self._offer)

    def stop(self) -> None:
        """The machine is lost."""
        self.is_running = False
        self.worker.stop()
        self.swarm.messages.close(self.peer_id)
        self.swarm.downloads.stop(self.rank)
        if self._reduction is not None:
            self._reduction.lose(self.rank)

    # Hooks of Process

    def heard_meanwhile(self) -> Event | None:
        """The mesh's report on who is here, once a second in a large swarm. Only a core that is called needs it."""
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

    # The worker

    def budget(self) -> float:
        """How long the worker's epoch may last, as far as is known. The worker reports its progress as well."""
        if (progress := self.due_event()) is not None:
            self.post(progress)
        return self.machine.epoch_s

    def handed_over(self, work: Work) -> None:
        assert self.certificate is not None
        epoch, scenario = self.worker.epoch, self.swarm.scenario
        num_bytes = scenario.fragment_bytes(epoch)
        part = self._part = EpochOfPeer(self.rank, work.steps, work.seconds, num_bytes, since=self._clock.now)
        handed = certificates.Work(
            tokens=work.steps * scenario.tokens_per_step,
            norm=1.0,
            step=scenario.schedule.nominal_step(epoch, self.worker.local_step, None),
            based_on=0,
            bandwidth=self._bandwidth.bytes_per_s,
        )
        part.parts.propose_s = num_bytes / self._paces.propose + 2 * self._paces.hop_s
        self._later(part.parts.propose_s, lambda: self.post(events.WorkReady(handed)))

    def merged(self, at: float, blocked_s: float) -> None:
        if self._ended is not None:
            self._ended.at, self._ended.parts.blocked_s = at, blocked_s
            self._ended = None
        self._clock.at(at, self.swarm.check_end)

    def answer(self, answer: effects.Answer) -> None:
        if answer.how == "begin":
            begin = partial(self.worker.begin, answer.epoch, answer.local_step, answer.epoch_s)
            self._later(self._paces.hop_s, begin)
            if self.incarnation > 1:
                self.swarm.losses.join_s.append(self._clock.now - self.since)
            return
        self.stop_reducing()
        self._part = None
        self._later(self._paces.hop_s, lambda: self.worker.answered(answer))

    def go_ahead(self, order: effects.GoAhead) -> None:
        self.worker.goes_ahead(order)

    # Reductions

    def stop_reducing(self) -> None:
        reduction, self._reduction = self._reduction, None
        if reduction is not None:
            reduction.leave(self.rank)

    def reduce(self, plan: Plan, timeout_s: float) -> None:
        self.stop_reducing()
        part, timing = self._part, self.machine.timing
        assert part is not None
        part.grouped_at = self._clock.now if part.grouped_at is None else part.grouped_at
        reduction = self._reduction = self.swarm.reduction(plan)
        reduction.begin(self, stall_s=timing.stall_s, connect_s=min(timing.connect_s, timeout_s / 2))
        self._later(timeout_s, lambda: reduction.time_out() if self._reduction is reduction else None)

    def reduced(self, reduction: Reduction, connect_s: float, reduce_s: float, sent_bytes: int) -> None:
        part = self._part
        if self._reduction is not reduction or part is None or self.certificate is None:
            return
        self._reduction = None
        paces, link = self._paces, self._means.link
        part.parts.connect_s, part.parts.reduce_s = connect_s, reduce_s
        part.sent_bytes += sent_bytes
        if reduce_s >= WINDOW_S:
            self._bandwidth.saw(min(link.up_bytes_per_s, link.down_bytes_per_s))
        part.parts.preview_s = paces.hop_s + paces.remaining_preview_s(
            part.num_bytes, reduce_s, FP32_BYTES * STATE_CHUNK_NUMEL
        )
        name = reduction.plan.digest

        def vote() -> None:
            part.voted_at = self._clock.now
            self.post(events.Reduced(name, digest("anchor", name), digest("momentum", name)))

        self._later(part.parts.preview_s, vote)

    def reduce_failed(self, reduction: Reduction, suspects: frozenset[int]) -> None:
        if self._reduction is not reduction:
            return
        self._reduction = None
        named = frozenset(self.swarm.peer_ids[rank] for rank in suspects if rank != self.rank)
        self.post(events.ReduceFailed(reduction.plan.digest, "a stream broke or stalled", named))

    # The outer state

    def apply(self, certificate: Certificate) -> None:
        part = self._part
        assert part is not None and part.grouped_at is not None
        part.parts.vote_s = self._clock.now - part.voted_at
        part.parts.apply_s = part.num_bytes / self._paces.apply + self._paces.hop_s
        part.parts.wait_s = part.grouped_at - part.since
        grouped_at = part.grouped_at

        def applied() -> None:
            self.certificate = certificate
            part.epoch, part.head, part.at = certificate.plan.epoch, certificate.head, self._clock.now
            part.parts.round_s = part.at - grouped_at
            self._ended = part
            self.swarm.committed(certificate, part)

        self.busy(part.parts.apply_s, applied)

    def fetch(self, fetch: effects.Fetch) -> None:
        """Download the state from the donors that are still alive, which also serve older states than their own."""
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
        self.swarm.parents[certificate.head] = certificate.plan.parent
        for other, peer_id in enumerate(self.swarm.peer_ids):
            if other != self.rank:
                round_trip_s = 2 * self.swarm.messages.delay_s(self.peer_id, peer_id)
                self.machine.swarm.measured(peer_id, round_trip_s)

    def rebase(self) -> None:
        assert self._part is not None
        self.busy(self._part.num_bytes / self._paces.take, lambda: None)

    def _later(self, seconds: float, event: Callable[[], object]) -> None:
        self._clock.after(seconds, lambda: event() if self.is_running else None)
