"""A virtual peer: one process of one peer, with its worker, its state and its machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.sim import values
from diloco.sim.runtime import Process
from diloco.sim.tracing import describe, text_of
from diloco.sim.values import NOTHING, Pieces, Reduced, State
from diloco.sim.worker import Handed, VirtualWorker
from peers.core import effects, events
from peers.core.effects import Effect
from peers.core.events import Event
from peers.core.peer import Peer
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Status

if TYPE_CHECKING:
    from diloco.sim.swarm import Disk, VirtualSwarm

NUM_KEPT = 3
"""States that a peer can serve: its own and those before it."""


class VirtualPeer(Process):
    """`start` sets `machine`. The invariants are checked unless it is one of the swarm's liars."""

    def __init__(self, swarm: VirtualSwarm, peer_id: str, disk: Disk, offered: State) -> None:
        super().__init__(peer_id, swarm.clock, swarm.network, disk.pledges)
        self.swarm, self.disk, self.offered = swarm, disk, offered
        self.is_honest = peer_id not in swarm.liars
        self.slowness = swarm.slowness.get(peer_id, 1.0)
        self.before: dict[type, Callable[[], object]] = {}
        """By kind of effect: what to do once, just before the next effect of that kind."""
        self.garbles = False
        """Its next reduction gives other bits than those of the other members."""
        self.state: State | None = None
        self.made_up: dict[str, State] = {}
        """Made-up states that a liar serves, by head."""
        self.in_hand: Handed | None = None
        self.worker: VirtualWorker | None = None
        self.asking: VirtualWorker | None = None
        """The worker that asked last where to begin."""
        self.outcome: Reduced | None = None
        """The outcome of its last reduction."""
        self.fetched_state: State | None = None
        self.kept: deque[State] = deque(maxlen=NUM_KEPT)
        self._has_offered = False

    def start(self, machine: Peer) -> None:
        self.machine = machine
        self.start_worker()
        self.pump()

    def kill(self) -> None:
        """End the process: everything that is not on the disk is gone. The caller closes its network port."""
        self.is_running = False
        if self.worker is not None:
            self.worker.stop()
        self.swarm.reductions.end(self.peer_id, "died")
        self.swarm.downloads.end(self.peer_id)

    def freeze(self) -> None:
        """Handle nothing until `thaw`; events are queued."""
        self.is_frozen = True
        self.swarm.reductions.frozen(self.peer_id)

    def thaw(self) -> None:
        self.is_frozen = False
        self.pump()

    # The worker

    def start_worker(self) -> None:
        self.worker = VirtualWorker(self)
        self.worker.start(self.swarm.between(self.swarm.durations.load_s))

    def crash_worker(self) -> None:
        if self.worker is not None:
            self.worker.stop()
            self.post(events.WorkerGone())
            self.worker = None

    def arrived(self, worker: VirtualWorker) -> None:
        """The worker has loaded its model, and asks where to begin."""

        def take() -> None:
            self.asking = worker

        offer, self._has_offered = None if self._has_offered else self.offered.offer, True
        self.worker_arrives(offer, take)

    def told(self, event: Event, handed: Handed | None = None) -> None:
        """The worker tells the daemon of this event."""

        def take() -> None:
            self.in_hand = handed or self.in_hand

        self.post(event, take)

    # How reductions and downloads end

    def reduced(self, plan: Plan, parts: dict[str, Pieces]) -> None:
        assert self.state is not None
        outcome = values.reduce_parts(self.state, plan, parts)
        if self.garbles:
            self.garbles = False
            outcome = replace(outcome, anchor=values.digest("garbled", outcome.anchor))
        self.outcome = outcome
        self.post(events.Reduced(plan.digest, outcome.anchor, outcome.momentum))

    def fetched(self, state: State) -> None:
        self.fetched_state = state
        self.swarm.truth.takes_part(self.peer_id, self._clock.now)
        self.post(events.Fetched(state.head))

    def fetch_failed(self, failed: events.FetchFailed) -> None:
        self.swarm.truth.takes_part(self.peer_id, self._clock.now)
        self.post(failed)

    def state_of(self, head: str) -> State | None:
        """The state that it serves for this head."""
        return next((state for state in self.kept if state.head == head), self._made_up_state(head))

    def _made_up_state(self, head: str) -> State | None:
        """Linked to the state that it claims to follow, so that the invariants see where it parts from others."""
        state = self.made_up.get(head)
        if state is None or state.certificate is None:
            return state
        parent = state.certificate.plan.parent
        return replace(state, parent=self.swarm.truth.states.get(parent) or self._made_up_state(parent))

    # Effects

    def carry_out(self, effect: Effect) -> None:
        if (happens := self.before.pop(type(effect), None)) is not None:
            happens()
            if not self.is_running:
                return
        if self.swarm.traced and (text := self._described(effect)):
            self.swarm.note(self.peer_id, f"-> {text}")
        if isinstance(effect, effects.Send | effects.Broadcast):
            self._check(self.swarm.invariants.sends, effect.message)
        super().carry_out(effect)

    def reduce(self, plan: Plan, timeout_s: float) -> None:
        self._check(self.swarm.invariants.begins_to_reduce, plan)
        pieces = self.in_hand.pieces if self.in_hand is not None else NOTHING
        self.swarm.reductions.begin(self, plan, pieces, timeout_s)

    def stop_reducing(self) -> None:
        self.swarm.reductions.end(self.peer_id)

    def fetch(self, fetch: effects.Fetch) -> None:
        follows = self.state is not None and fetch.path[0].plan.parent == self.state.head
        body, donors = fetch.path[-1].body, fetch.donors
        self.swarm.truth.knows(fetch.path)
        self.swarm.truth.pauses(self.peer_id, self._clock.now)
        self.swarm.downloads.begin(self, body, donors, fetch.timeout_s, follows=follows)

    def apply(self, certificate: Certificate) -> None:
        def end() -> None:
            self.swarm.truth.knows((certificate,))
            self._check(self.swarm.invariants.applies, certificate)
            assert self.state is not None and self.outcome is not None
            self._move_to(values.apply_outcome(self.state, self.outcome, certificate, self._clock.now))
            self.outcome = None

        self._take_time(end)

    def adopt(self, certificate: Certificate) -> None:
        def end() -> None:
            fetched, offered, body = self.fetched_state, self.offered, certificate.body
            self.swarm.truth.knows((certificate,))
            self._check(self.swarm.invariants.adopts, certificate)
            if fetched is not None and fetched.head == certificate.head:
                self._move_to(fetched)
            elif certificate.is_genesis and (offered.anchor, offered.momentum) == (
                body.anchor,
                body.momentum,
            ):
                self._move_to(values.begin_from(offered, certificate, self._clock.now))
            else:
                self.swarm.invariants.violated(f"{self.peer_id} adopts a state that it has not fetched")
            self.fetched_state = self.outcome = None

        self._take_time(end)

    def rebase(self) -> None:
        def end() -> None:
            self._check(self.swarm.invariants.rebases)
            if self.in_hand is not None and self.state is not None:
                self.in_hand = replace(self.in_hand, base=self.state.head)

        self._take_time(end)

    def answer(self, answer: effects.Answer) -> None:
        def end() -> None:
            self._check(self.swarm.invariants.answers, answer)
            head = self.state.head if self.state is not None else ""
            if answer.how == "begin":
                # A new worker may have started since, which has not asked yet.
                if self.worker is not None and self.worker is self.asking:
                    self.worker.begin(head, answer)
                return
            handed, self.in_hand = self.in_hand, None
            # The worker may have been replaced since.
            if handed is not None and handed.worker is self.worker:
                # With "keep", work that was rebased before stays on its new base.
                handed.worker.answered(handed.base if answer.how == "keep" else head, answer)

        self._take_time(end)

    def go_ahead(self, order: effects.GoAhead) -> None:
        handed = self.in_hand
        if handed is not None and handed.worker is self.worker:
            handed.worker.goes_ahead(order)

    def _move_to(self, state: State) -> None:
        self.state = self.swarm.truth.holds(self, state, self._clock.now)
        self.kept.append(self.state)
        if self.swarm.saves:
            self.disk.checkpoint = self.state

    def _take_time(self, end: Callable[[], None]) -> None:
        self.busy(self.slowness * self.swarm.between(self.swarm.durations.apply_s), end)

    def _described(self, effect: Effect) -> str:
        """For the trace: statuses only where something but the worker's step has changed."""

        def told(status: Status) -> tuple[object, ...]:
            return status.phase, status.head, status.attempt, status.work

        match effect:
            case effects.Send(_, Status()):
                return ""
            case effects.Broadcast(Status() as new) if self.said is not None and told(self.said) == told(new):
                return ""
        return text_of(effect)

    # What the invariants and the trace see

    def _check(self, check: Callable[..., None], *arguments: object) -> None:
        if self.is_honest:
            check(self, *arguments)

    def on_event(self, event: Event | None) -> None:
        if self.swarm.traced and (text := describe(event)):
            self.swarm.note(self.peer_id, f"<- {text}")

    def on_settled(self) -> None:
        self._check(self.swarm.invariants.after_event)
