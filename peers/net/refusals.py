"""Which refusals are worth a line in the log. Pure: the clock is an argument.

A refused peer knocks again and again, and keys cost a stranger nothing: each peer's first refusal for each reason is
told, and only so many a minute.
"""

from __future__ import annotations

MAX_REMEMBERED = 1024
MAX_PER_MINUTE = 20


class Refusals:
    """What was told already, as far as memory is given to it."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], None] = {}
        self._minute = 0.0
        self._num_in_minute = 0
        self._num_untold = 0

    def is_news(self, peer_id: str, why: str, now: float) -> bool:
        """Whether to tell that this peer was refused; `now` in seconds of any steady clock."""
        if (peer_id, why) in self._told:
            return False
        self._told[peer_id, why] = None
        while len(self._told) > MAX_REMEMBERED:
            del self._told[next(iter(self._told))]
        if now - self._minute >= 60.0:
            self._minute, self._num_in_minute = now, 0
        self._num_in_minute += 1
        if self._num_in_minute > MAX_PER_MINUTE:
            self._num_untold += 1
            return False
        return True

    def take_untold(self) -> int:
        """How many news were too many to tell, since this was asked last."""
        untold, self._num_untold = self._num_untold, 0
        return untold
