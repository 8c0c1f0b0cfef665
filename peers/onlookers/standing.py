"""Where a peer stands in its round, as it tells those who look on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Step = Literal["joining", "idle", "seeking", "reducing", "voted"]
STEPS = frozenset(get_args(Step))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What one peer waits for, and for whom."""

    step: str = "joining"
    """One of STEPS: of the round (peers/core/round.py), or `joining` before there is one."""
    leader: int | None = None
    """World rank of whom it has told that it is ready; None while its worker trains."""
    missing: tuple[int, ...] = ()
    """Of a leader: the world ranks that it waits for, to join or to vote."""
    waits_for: str = ""
    """The same in words; empty while it waits for nothing."""
