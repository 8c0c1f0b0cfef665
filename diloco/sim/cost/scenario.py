"""The input of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from diloco.sim.cost.links import Link
from diloco.sim.cost.machine import Machine
from peers.core.schedule import Schedule

FP32_BYTES = 4
FLOP_PER_TOKEN_AND_WEIGHT = 6.0
"""FLOPs of forward and backward (Kaplan et al., arXiv 2001.08361), without attention scores."""


@dataclass(frozen=True, kw_only=True)
class SimulatedPeer:
    """Link, machine and speed of one peer."""

    link: Link
    machine: Machine
    step_s: float
    """Duration of an inner step."""
    price_per_hour: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to simulate."""

    peers: tuple[SimulatedPeer, ...]
    num_params: int
    codec: str
    schedule: Schedule
    tokens_per_step: int = 1 << 16
    """Tokens per inner step of one peer; more than the number of fragments, by which a commit divides its tokens."""
    num_epochs: int = 20
    """Commits to simulate, after `num_uncounted`."""
    num_uncounted: int = 1
    """First commits that the figures leave out: in them, peers still measure their links and each other's speed."""
    jitter: float = 0.0
    """Standard deviation of a peer's step duration between epochs, as a fraction of its mean."""
    mtbf_s: float = float("inf")
    """Mean time between failures of one peer, whose machine then falls silent."""
    restart_s: float = 300.0
    """Time from a loss until the peer is back and asks for the state."""
    window_bytes: float = float("inf")
    """TCP window: the most bytes in flight on one connection."""
    seed: int = 0

    @cached_property
    def fragment_sizes(self) -> tuple[int, ...]:
        """Number of weights in each fragment."""
        count = self.schedule.num_fragments
        return tuple(self.num_params * (i + 1) // count - self.num_params * i // count for i in range(count))

    def fragment_bytes(self, epoch: int) -> int:
        """Size in fp32 of the fragment that this epoch averages."""
        return FP32_BYTES * self.fragment_sizes[self.schedule.fragment_of(epoch)]

    @property
    def state_bytes(self) -> int:
        """Size of anchor and momentum in fp32."""
        return 2 * FP32_BYTES * self.num_params


def step_seconds(num_params: float, tokens: float, flops: float, mfu: float) -> float:
    """Duration of an inner step on a machine with `flops` peak FLOP/s, at a model FLOPs utilisation of `mfu`."""
    return FLOP_PER_TOKEN_AND_WEIGHT * num_params * tokens / (flops * mfu)
