"""One call of `Peer.handle`: the current time, the effects so far, and the next deadline."""

from __future__ import annotations

import math

from peers.core.effects import Effect


class Turn:
    """Rules that wait for a moment ask `passed`, which lowers the deadline to it: no timers are kept elsewhere."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.effects: list[Effect] = []
        self.deadline = math.inf

    def do(self, *effects: Effect) -> None:
        self.effects += effects

    def passed(self, moment: float) -> bool:
        """Whether this moment has come. If not, the peer is called again at that moment."""
        if self.now >= moment:
            return True
        self.deadline = min(self.deadline, moment)
        return False

    def look_again(self) -> None:
        """Forget the deadline: every rule is about to be evaluated again, and sets it anew."""
        self.deadline = math.inf
