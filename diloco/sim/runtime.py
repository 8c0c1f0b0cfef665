"""Passes events to one peer's machine in order, and carries out all effects of one event before the next.

This is the virtual counterpart of peers/daemon. What an effect does, and how long it takes, is left to subclasses:
diloco/sim/peer.py moves values that show every lost or doubled step, diloco/sim/cost/peer.py moves bytes over links.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco.sim.clock import Clock
from peers.core import effects, events
from peers.core.effects import Effect
from peers.core.events import Event
from peers.core.peer import Peer
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Offer, Status
from peers.timing import BEAT_S

if TYPE_CHECKING:
    from diloco.sim.cost.messages import Messages
    from diloco.sim.network import Network

LOOK_AGAIN_S = 0.1
MAX_TICKS = 100
"""Deadlines handled at one moment; a machine that wants more never lets time pass."""


class Process(ABC):
    """One process of one peer's daemon. `machine` is set before the first event; `pledges` outlive the process."""

    def __init__(self, peer_id: str, clock: Clock, wire: Network | Messages, pledges: dict[str, int]) -> None:
        self.machine: Peer
        self.peer_id = peer_id
        self.is_running = True
        self.is_frozen = False
        self.said: Status | None = None
        """Its last status."""
        self.pledges = pledges
        self._clock, self._wire = clock, wire
        self._inbox: deque[tuple[Event, Callable[[], object] | None]] = deque()
        self._effects: deque[Effect] = deque()
        self._is_busy = self._is_pumping = False
        self._tick_at = math.inf

    # Effects

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case effects.Send(to, message):
                self._wire.send(self.peer_id, to, message)
            case effects.Broadcast(message):
                self.said = message if isinstance(message, Status) else self.said
                self._wire.broadcast(self.peer_id, message)
            case effects.Pledge(head, attempt):
                self.pledges[head] = attempt
            case effects.Reduce(plan, timeout_s):
                self.reduce(plan, timeout_s)
            case effects.CancelReduce():
                self.stop_reducing()
            case effects.Apply(certificate):
                self.apply(certificate)
            case effects.Fetch():
                self.fetch(effect)
            case effects.Adopt(certificate):
                self.adopt(certificate)
            case effects.Rebase():
                self.rebase()
            case effects.Answer():
                self.answer(effect)
            case effects.GoAhead():
                self.go_ahead(effect)
            case effects.Tell():
                pass

    # Each of these returns at once; one that takes time calls `busy`, or `post` later.

    @abstractmethod
    def reduce(self, plan: Plan, timeout_s: float) -> None: ...

    @abstractmethod
    def stop_reducing(self) -> None: ...

    @abstractmethod
    def apply(self, certificate: Certificate) -> None: ...

    @abstractmethod
    def fetch(self, fetch: effects.Fetch) -> None: ...

    @abstractmethod
    def adopt(self, certificate: Certificate) -> None: ...

    @abstractmethod
    def rebase(self) -> None: ...

    @abstractmethod
    def answer(self, answer: effects.Answer) -> None: ...

    @abstractmethod
    def go_ahead(self, order: effects.GoAhead) -> None: ...

    # What a subclass may add

    def on_event(self, event: Event | None) -> None:  # noqa: B027
        """Called before the machine handles it."""

    def on_settled(self) -> None:  # noqa: B027
        """Called when all effects of an event are carried out."""

    def may_sleep(self) -> bool:
        """Whether its deadline may be ignored until the next event. The machine takes that for a freeze of its own."""
        return False

    def due_event(self) -> Event | None:
        """The event to pass to the machine when its deadline has come."""
        return None

    def heard_meanwhile(self) -> Event | None:
        """An event that is to come before all others whenever the machine is about to be called."""
        return None

    # Events

    def post(self, event: Event, before: Callable[[], object] | None = None) -> None:
        """Queue an event. `before` is called just before the machine handles it."""
        if self.is_running:
            self._inbox.append((event, before))
            self.pump()

    def worker_arrives(self, offer: Offer | None, before: Callable[[], object] | None = None) -> None:
        """A worker asks where to begin. `offer`: its state, which the daemon's first worker offers just after that."""

        def arrive() -> None:
            if before is not None:
                before()
            if offer is not None:
                self.post(events.StateOffered(offer))

        self.post(events.WorkerWaits(), arrive)

    def pump(self) -> None:
        """Carry out effects and handle events that are due now."""
        if self._is_pumping:
            return
        self._is_pumping = True
        if self.is_running and (heard := self.heard_meanwhile()) is not None:
            self._inbox.appendleft((heard, None))
        num_ticks = 0
        while self.is_running and not self.is_frozen and not self._is_busy:
            if self._effects:
                self.carry_out(self._effects.popleft())
                if not self._effects and not self._is_busy and self.is_running:
                    self.on_settled()
            elif self._inbox:
                event, before = self._inbox.popleft()
                if before is not None:
                    before()
                self._handle(event)
            elif self.machine.deadline <= self._clock.now and num_ticks < MAX_TICKS:
                num_ticks += 1
                self._handle(self.due_event())
            else:
                break
        self._is_pumping = False
        if num_ticks >= MAX_TICKS:
            raise AssertionError(f"{self.peer_id} is always due at {self._clock.now}")
        self._set_tick()

    def busy(self, seconds: float, then: Callable[[], None]) -> None:
        """Do nothing else for so long, then call `then`; heartbeats go on meanwhile."""
        self._is_busy = True
        for beat in range(1, int(seconds / BEAT_S) + 1):
            self._clock.after(beat * BEAT_S, self._beat)

        def end() -> None:
            if not self.is_running:
                return
            if self.is_frozen:
                self._clock.after(LOOK_AGAIN_S, end)
                return
            self._is_busy = False
            then()
            if not self._effects:
                self.on_settled()
            self.pump()

        self._clock.after(seconds, end)

    def _beat(self) -> None:
        if self.is_running and not self.is_frozen and self.said is not None:
            self._wire.broadcast(self.peer_id, self.said)

    def _handle(self, event: Event | None) -> None:
        self.on_event(event)
        self._effects.extend(self.machine.handle(event, self._clock.now))
        if not self._effects:
            self.on_settled()

    def _set_tick(self) -> None:
        deadline = self.machine.deadline
        if deadline >= self._tick_at or not self.is_running or self.is_frozen or self._is_busy:
            return
        self._tick_at = deadline

        def tick() -> None:
            if self._tick_at == deadline:
                self._tick_at = math.inf
                if not self.may_sleep():
                    self.pump()

        self._clock.at(deadline, tick)
