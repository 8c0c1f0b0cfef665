"""A virtual peer: one process of one peer, with its worker, its state and its machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from diloco.sim import values
from diloco.sim.effect_runner import carry_out
from diloco.sim.process import Machine, Process
from diloco.sim.tracing import describe
from diloco.sim.values import Pieces, Reduced, State
from diloco.sim.worker import Handed, VirtualWorker
from diloco.sim.world import Disk, World
from peers.core import events
from peers.core.effects import Effect
from peers.core.events import Event
from peers.protocol.certificates import Plan
from peers.protocol.messages import Message, Status

NUM_KEPT = 3
"""States that a peer can serve: its own and those before it."""


class VirtualPeer(Process):
    """`start` sets `machine`. `is_honest`: the invariants are checked for it."""

    def __init__(
        self, world: World, peer_id: str, disk: Disk, offered: State, *, is_honest: bool = True
    ) -> None:
        super().__init__(world.clock)
        self.world, self.disk, self.offered, self.is_honest = world, disk, offered, is_honest
        self._peer_id = peer_id
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
        self.said: Status | None = None
        self.kept: deque[State] = deque(maxlen=NUM_KEPT)
        self._has_offered = False

    @property
    def peer_id(self) -> str:
        return self._peer_id

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

    # As a process

    def carry_out(self, effect: Effect) -> None:
        carry_out(self, effect)

    def repeat_status(self) -> None:
        if self.said is not None:
            self.world.network.broadcast(self.peer_id, self.said)

    def on_event(self, event: Event | None) -> None:
        if self.world.trace.is_on and (text := describe(event)):
            self.world.trace.add(self.peer_id, f"<- {text}")

    def on_settled(self) -> None:
        self.world.invariants.after_event(self)

    def on_always_due(self) -> None:
        self.world.invariants.violated(f"{self.peer_id} is always due at {self.world.clock.now}")
