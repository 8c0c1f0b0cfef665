"""What all virtual peers of one simulation share: clock, randomness, network, and the checks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from diloco.sim.clock import Clock
from diloco.sim.download import Downloads
from diloco.sim.invariants import Invariants
from diloco.sim.keys import KeyRing
from diloco.sim.network import Network
from diloco.sim.reduction import Reductions
from diloco.sim.truth import Truth
from diloco.sim.values import State
from peers.core.settings import Settings

Span = tuple[float, float]
"""Shortest and longest duration in seconds."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    load_s: Span = (0.2, 1.5)
    """Until a worker has loaded its model."""
    step_s: float = 0.5
    reduce_s: Span = (0.1, 0.8)
    fetch_s: Span = (0.1, 2.0)
    apply_s: Span = (0.001, 0.1)
    """Of the effects Apply, Adopt, Rebase and Answer."""


class Trace:
    """A log of all events and effects for people; empty unless switched on."""

    def __init__(self, clock: Clock, *, is_on: bool) -> None:
        self.is_on = is_on
        self.lines: list[str] = []
        self._clock = clock

    def add(self, who: str, text: str) -> None:
        self.lines.append(f"{self._clock.now:9.3f}  {who:<6} {text}")


@dataclass(kw_only=True)
class World:
    clock: Clock
    rng: random.Random
    settings: Settings
    durations: Durations
    ring: KeyRing
    network: Network
    reductions: Reductions
    downloads: Downloads
    truth: Truth
    invariants: Invariants
    trace: Trace
    num_pieces: int = 0

    def new_piece(self) -> int:
        self.num_pieces += 1
        return self.num_pieces

    def between(self, span: Span) -> float:
        return self.rng.uniform(*span)


@dataclass
class Disk:
    """What survives when a peer's processes die."""

    pledges: dict[str, int] = field(default_factory=dict)
    checkpoint: State | None = None
