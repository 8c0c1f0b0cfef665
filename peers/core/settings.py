"""What a peer needs to know about its run and its user's settings. The same on all peers but for the last five."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from peers.core.weights import Aggregation


@dataclass(frozen=True, kw_only=True)
class Settings:
    manifest: str
    """Digest of the manifest."""
    steps_per_epoch: int
    num_fragments: int = 1
    aggregation: Aggregation = field(default_factory=Aggregation)
    quorum: float = 0.5
    """The part of the roster of which more must be in a commit."""
    grace_s: float = math.inf
    """How long a commit waits, once a quorum is ready, for the others at most."""
    attempt_timeout_s: float = math.inf
    """How long an attempt may take at most."""
    galaxy_size: int = 1
    """How many founders a run waits for."""
    founders_timeout_s: float = 600.0
    """For so long."""

    def fragment_of(self, epoch: int) -> int:
        """The fragment that is averaged at the end of this epoch."""
        return epoch % self.num_fragments
