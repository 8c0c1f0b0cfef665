"""What this peer is doing just now, for people: what its worker tells, and what the daemon knows better."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from peers.monitor.phases import Doing, PhaseClock
from peers.protocol.records import State
from peers.protocol.reports import Phase


@dataclass
class Activity:
    """Of one peer. The parts of the daemon write down what they are at; `phase` sums it up."""

    preparing: str = "joining the network"
    """Before there is a state to train from: which step."""
    told: Doing | None = None
    """By the worker: what keeps it from training steps."""
    received: tuple[int, int] | None = None
    """Of a state that is being downloaded: bytes that are here, and all."""
    _clock: PhaseClock = field(default_factory=PhaseClock)

    def phase(
        self,
        state: State,
        *,
        here: int,
        wanted: int,
        waits_for: str,
        step: int,
        end_step: int,
        left_s: float | None,
    ) -> Phase:
        """`here` of `wanted` peers are in the swarm; `left_s`: until the run's end, if that can be told."""
        doing = self._doing(state, here, wanted, waits_for)
        if doing is None:
            doing = Doing("training", "", step, end_step, "steps", left_s)
        return self._clock.at(doing, time.monotonic())

    def _doing(self, state: State, here: int, wanted: int, waits_for: str) -> Doing | None:
        """None: it trains."""
        if state == "leaving":
            return Doing("leaving")
        # While it trains, that goes on beside it.
        if self.received is not None and state != "training":
            return Doing("receiving the state", "", *self.received, "bytes")
        if state == "averaging":
            return Doing("averaging", f"waits for {waits_for}" if waits_for else "")
        if state == "joining" and self.told is None:
            return self._starting(here, wanted)
        if state == "waiting":
            return self._waiting(here, wanted) or Doing("waiting for the state")
        return self.told

    def _starting(self, here: int, wanted: int) -> Doing:
        return (self._waiting(here, wanted) if here else None) or Doing("starting", self.preparing)

    def _waiting(self, here: int, wanted: int) -> Doing | None:
        return Doing("waiting for peers", "", here, wanted, "peers") if here < wanted else None
