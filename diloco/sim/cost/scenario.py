"""What is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from diloco.sim.cost.links import Link
from diloco.sim.cost.machine import Machine
from peers.core.schedule import Schedule

FLOP_PER_TOKEN_AND_WEIGHT = 6.0
"""Of a step, forward and backward (Kaplan et al., arXiv 2001.08361); attention's scores are left out."""


@dataclass(frozen=True, kw_only=True)
class SimulatedPeer:
    """What one peer has."""

    link: Link
    machine: Machine
    step_s: float
    """What an inner step takes it."""
    price_per_hour: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run."""

    peers: tuple[SimulatedPeer, ...]
    num_params: int
    codec: str
    schedule: Schedule
    tokens_per_step: int = 1 << 16
    """Of one peer. Rounds tell by tokens who is ahead, so they should be more than a step's share of a fragment."""
    num_epochs: int = 20
    """Commits until the simulation ends, beside a first that counts for nothing: links are measured in it."""
    jitter: float = 0.0
    """Standard deviation of a peer's steps from epoch to epoch, as a part of their mean."""
    mtbf_s: float = float("inf")
    """Mean time between two losses of one peer, whose machine then falls silent."""
    restart_s: float = 300.0
    """From a loss until the peer is back, and asks for the state."""
    window_bytes: float = float("inf")
    """What one TCP connection has under way at most."""
    averaging_timeout_s: float | None = None
    seed: int = 0

    @cached_property
    def fragment_sizes(self) -> tuple[int, ...]:
        """Weights of each fragment."""
        count = self.schedule.num_fragments
        return tuple(self.num_params * (i + 1) // count - self.num_params * i // count for i in range(count))

    @property
    def state_bytes(self) -> int:
        """Of anchor and momentum, fp32."""
        return 8 * self.num_params


def step_seconds(num_params: float, tokens: float, flops: float, mfu: float) -> float:
    """An inner step's time on a machine of so many FLOP/s at its peak, of which training uses the part `mfu`."""
    return FLOP_PER_TOKEN_AND_WEIGHT * num_params * tokens / (flops * mfu)
