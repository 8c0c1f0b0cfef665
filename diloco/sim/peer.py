"""A virtual peer: one process of one peer, with its worker, its state and its machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from diloco.sim import values
from diloco.sim.runtime import Machine, Process
from diloco.sim.tracing import describe, describe_effect
from diloco.sim.values import NOTHING, Pieces, Reduced, State
from diloco.sim.worker import Handed, VirtualWorker
from diloco.sim.world import Disk, World
from peers.core import effects, events
from peers.core.effects import Effect
from peers.core.events import Event
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Message, Status

NUM_KEPT = 3
"""States that a peer can serve: its own and those before it."""


class VirtualPeer(Process):
    """`start` sets `machine`. `is_honest`: the invariants are checked for it."""

    def __init__(
        self, world: World, peer_id: str, disk: Disk, offered: State, *, is_honest: bool = True
    ) -> None:
        super().__init__(peer_id, world.clock, world.network, disk.pledges)
        self.world, self.disk, self.offered, self.is_honest = world, disk, offered, is_honest
        self.slowness = 1.0
        self.before: dict[type, Callable[[], object]] = {}
        """By kind of effect: what to do once, just before the next effect of that kind."""
        self.garbles = False
        """Its next reduction gives other bits than everybody else's."""
        self.saves = False
        """It writes a checkpoint at every commit."""
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

    def start(self, machine: Machine) -> None:
        self.machine = machine
        self.start_worker()
        self.pump()

    def kill(self) -> None:
        """End the process: everything that is not on the disk is gone. The caller closes its network port."""
        self.is_running = False
        if self.worker is not None:
            self.worker.crash()
        self.world.reductions.end(self.peer_id, "died")
        self.world.downloads.end(self.peer_id)

    def freeze(self) -> None:
        """Handle nothing until `thaw`; events are queued."""
        self.is_frozen = True
        self.world.reductions.frozen(self.peer_id)

    def thaw(self) -> None:
        self.is_frozen = False
        self.pump()

    # The worker

    def start_worker(self) -> None:
        world = self.world
        self.worker = VirtualWorker(
            self,
            world.clock,
            world.rng,
            world.new_piece,
            steps_per_epoch=world.settings.steps_per_epoch,
            step_s=world.durations.step_s * self.slowness,
        )
        self.worker.start(world.between(world.durations.load_s))

    def crash_worker(self) -> None:
        if self.worker is not None:
            self.worker.crash()
            self._post(events.WorkerGone())
            self.worker = None

    def told(self, worker: VirtualWorker, event: Event, handed: Handed | None = None) -> None:
        """The worker tells the daemon of this event."""
        if isinstance(event, events.StateOffered):
            if self._has_offered:
                return
            self._has_offered = True
        asking = worker if isinstance(event, events.WorkerWaits) else None
        self._post(event, handed, asking)

    # Events

    def received(self, sender: str, message: Message) -> None:
        self._post(events.Received(sender, message))

    def connected(self, peer_id: str) -> None:
        self._post(events.Connected(peer_id))

    def disconnected(self, peer_id: str) -> None:
        self._post(events.Disconnected(peer_id))

    def reduced(self, plan: Plan, parts: dict[str, Pieces]) -> None:
        assert self.state is not None
        outcome = values.reduce_parts(self.state, plan, parts)
        if self.garbles:
            self.garbles = False
            garbled = values.digest("garbled", outcome.anchor)
            outcome = Reduced(plan, outcome.pieces, outcome.doubled, garbled, outcome.momentum)
        self.outcome = outcome
        self._post(events.Reduced(plan.digest, outcome.anchor, outcome.momentum))

    def reduce_failed(self, plan: Plan, reason: str, suspects: frozenset[str]) -> None:
        self._post(events.ReduceFailed(plan.digest, reason, suspects))

    def fetched(self, state: State) -> None:
        self.fetched_state = state
        self._post(events.Fetched(state.head))

    def fetch_failed(self, head: str, reason: str, suspects: frozenset[str]) -> None:
        self._post(events.FetchFailed(head, reason, suspects))

    def state_of(self, head: str) -> State | None:
        """The state that it serves for this head."""
        return next((state for state in self.kept if state.head == head), self.made_up.get(head))

    def _post(self, event: Event, handed: Handed | None = None, asking: VirtualWorker | None = None) -> None:
        def take() -> None:
            self.in_hand = handed or self.in_hand
            self.asking = asking or self.asking

        self.post(event, take)

    def leave(self) -> None:
        """Ask the peer to leave."""
        self._post(events.Leave())

    # Effects

    def carry_out(self, effect: Effect) -> None:
        if (happens := self.before.pop(type(effect), None)) is not None:
            happens()
            if not self.is_running:
                return
        if self.world.trace.is_on and (text := self._described(effect)):
            self.world.trace.add(self.peer_id, f"-> {text}")
        super().carry_out(effect)

    def on_sent(self, message: Message) -> None:
        if self.is_honest:
            self.world.invariants.sends(self, message)

    def reduce(self, plan: Plan, timeout_s: float) -> None:
        self.world.invariants.begins_to_reduce(self, plan)
        pieces = self.in_hand.pieces if self.in_hand is not None else NOTHING
        self.world.reductions.begin(self, plan, pieces, timeout_s)

    def stop_reducing(self) -> None:
        self.world.reductions.end(self.peer_id)

    def fetch(self, fetch: effects.Fetch) -> None:
        self.world.downloads.begin(self, fetch.path[-1].body, fetch.donors, fetch.timeout_s)

    def apply(self, certificate: Certificate) -> None:
        def end() -> None:
            self.world.invariants.applies(self, certificate)
            assert self.state is not None and self.outcome is not None
            self._move_to(values.apply_outcome(self.state, self.outcome, certificate, self._clock.now))
            self.outcome = None

        self._take_time(end)

    def adopt(self, certificate: Certificate) -> None:
        def end() -> None:
            fetched, offered, body = self.fetched_state, self.offered, certificate.body
            self.world.invariants.adopts(self, certificate)
            if fetched is not None and fetched.head == certificate.head:
                self._move_to(fetched)
            elif certificate.is_genesis and (offered.anchor, offered.momentum) == (
                body.anchor,
                body.momentum,
            ):
                self._move_to(values.begin_from(offered, certificate, self._clock.now))
            else:
                self.world.invariants.violated(f"{self.peer_id} adopts a state that it has not fetched")
            self.fetched_state = self.outcome = None

        self._take_time(end)

    def rebase(self) -> None:
        def end() -> None:
            self.world.invariants.rebases(self)
            if self.in_hand is not None and self.state is not None:
                self.in_hand = self.in_hand.on(self.state.head)

        self._take_time(end)

    def answer(self, answer: effects.Answer) -> None:
        def end() -> None:
            self.world.invariants.answers(self, answer)
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
        self.state = self.world.truth.holds(self, state, self._clock.now)
        self.kept.append(self.state)
        if self.saves:
            self.disk.checkpoint = self.state

    def _take_time(self, end: Callable[[], None]) -> None:
        self.busy(self.slowness * self.world.between(self.world.durations.apply_s), end)

    def _described(self, effect: Effect) -> str:
        """For the trace: statuses only where something but the worker's step has changed."""
        if (
            isinstance(effect, effects.Broadcast)
            and isinstance(effect.message, Status)
            and self.said is not None
        ):
            old, new = self.said, effect.message
            if (old.phase, old.head, old.attempt, old.work) == (new.phase, new.head, new.attempt, new.work):
                return ""
        return describe_effect(effect)

    # What the invariants and the trace see

    def on_event(self, event: Event | None) -> None:
        if self.world.trace.is_on and (text := describe(event)):
            self.world.trace.add(self.peer_id, f"<- {text}")

    def on_settled(self) -> None:
        self.world.invariants.after_event(self)

    def on_always_due(self) -> None:
        self.world.invariants.violated(f"{self.peer_id} is always due at {self.world.clock.now}")
