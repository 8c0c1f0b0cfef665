"""One handling of an event: what time it is, what is to be done, and when to look again."""

from __future__ import annotations

import math

from peers.core.effects import Effect


class Turn:
    """Whoever waits for a moment asks `passed`, which notes it as the deadline: no waiting time is kept elsewhere."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.effects: list[Effect] = []
        self.deadline = math.inf

    def do(self, *effects: Effect) -> None:
        self.effects += effects

    def passed(self, moment: float) -> bool:
        if self.now >= moment:
            return True
        self.deadline = min(self.deadline, moment)
        return False

    def look_again(self) -> None:
        """Every rule is about to be evaluated anew, and notes its moments again."""
        self.deadline = math.inf
