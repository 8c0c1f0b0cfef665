"""What the core needs to know of its run and of its user's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from peers.core.weights import Aggregation


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields up to `aggregation` are the same on all peers of a run; the others are the user's."""

    manifest: str
    """Digest of the manifest."""
    steps_per_epoch: int
    num_fragments: int = 1
    samples_per_block: int = 1
    """Samples that a peer trains in an epoch; 1: not known, so that `Plan.data_base` counts blocks."""
    epoch_s: float | None = None
    """How long an epoch may last; 0: learned (epoch_time.py); None: as long as its steps take."""
    overlap_steps: int = 0
    """Steps that workers train in an epoch after they have handed over its work."""
    never_waits: bool = False
    """Whether workers train on during every round, and not only while faults happen."""
    aggregation: Aggregation = field(default_factory=Aggregation)
    quorum: float = 0.5
    """A commit needs more than this share of the roster."""
    grace_s: float = math.inf
    """The longest time that a ready quorum waits for the others."""
    attempt_timeout_s: float = math.inf
    """The longest time that an attempt may take."""
    galaxy_size: int = 1
    """How many founders a run waits for, at most `founders_timeout_s`."""
    founders_timeout_s: float = 600.0

    def fragment_of(self, epoch: int) -> int:
        """The fragment that is averaged at the end of this epoch."""
        return epoch % self.num_fragments
