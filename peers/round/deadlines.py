"""How long a round waits, learned from the ones before; pure, so that times are arguments.

The first rounds are given long: nobody knows the swarm yet. Then its leader waits for late members as long as the
latest one usually takes, by the median and the deviation of what it has seen. Whoever is later than that is left out,
and its work goes into the next round.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from peers.round.leader import Timing

Strategy = Literal["WAIT_FOR_ALL", "NO_WAIT"]

FIRST_GATHER_S = 30.0
LEAST_GATHER_S = 10.0
LEAST_FOLLOW_S = 1.0
LEAST_STALL_S, MOST_STALL_S = 2.0, 5.0
"""A stream may be silent for this much and four usual rounds, and never for more than the second."""
LEAST_CONNECT_S, MOST_CONNECT_S = 4.0, 10.0
"""Likewise, for all streams to stand."""
LEAST_GATHER_SHARE = 0.1
"""Of an epoch: what training steps may vary by, and what a peer may do beside them."""
DEVIATIONS = 6.0
"""So many robust standard deviations beyond the median are late."""
ENOUGH_ROUNDS = 4
MATCHMAKING_S = 15.0
SLOWEST_LINK = 1e6
"""Bytes per second, 8 Mbit/s: what a first round is given time for."""
_LEAST_ROUND_S = 30.0
_LATER = 1.5
"""Where somebody was left out, the latest would have come later than the leader has seen."""
_SLOWER = 8.0
"""Times what the leader's own epochs take without waiting: so long it waits for others at most."""
_NORMAL_MAD = 1.4826
"""Of a normal distribution, the standard deviation over the median absolute deviation."""


@dataclass(kw_only=True)
class Deadlines:
    """What one peer has seen of its swarm, in seconds."""

    strategy: Strategy = "WAIT_FOR_ALL"
    matchmaking_s: float | None = None
    """What a round waits for its members under NO_WAIT; none: MATCHMAKING_S."""
    averaging_timeout_s: float | None = None
    """What an attempt may take; none: learned."""
    _epochs: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _own: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _gathers: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def knows_epochs(self) -> bool:
        return bool(self._epochs)

    def epoch_took(
        self, seconds: float, *, of_it_round_s: float, trained_s: float = 0.0, steps_s: float = 0.0
    ) -> None:
        """`trained_s`: until this peer handed its work over; nothing, where the work was not that of a whole epoch.
        `steps_s`: what all steps of an epoch take it."""
        self._epochs.append(seconds)
        if trained_s > 0:
            # With overlap it does some of an epoch's steps before the epoch begins.
            self._own.append(max(trained_s, steps_s))
        self._rounds.append(of_it_round_s)

    def gathered(self, seconds: float, *, complete: bool) -> None:
        """This peer, as the leader, has waited so long from the first member to the last one, or to the deadline."""
        self._gathers.append(seconds if complete else _LATER * seconds)

    def attempt_timed_out(self, seconds: float) -> None:
        """Rounds take longer now than they used to."""
        self._rounds.clear()
        self._rounds.append(seconds)

    def timing(self, wire_bytes: int, epoch_so_far_s: float = 0.0) -> Timing:
        """For a round that moves about so many bytes, at the end of an epoch that is the first if none is known."""
        first = max(_LEAST_ROUND_S, wire_bytes / SLOWEST_LINK)
        usual = statistics.median(self._rounds) if self._rounds else first
        slowest = max(self._epochs, default=epoch_so_far_s)
        most = max(FIRST_GATHER_S, 2.0 * slowest)
        gather_s = self._gather_s(slowest, most)
        # Or whoever never comes would make each wait longer by the one before. The first may be a part of an epoch.
        is_bounded = self.strategy == "WAIT_FOR_ALL" and len(self._own) >= ENOUGH_ROUNDS
        longest_s = max(FIRST_GATHER_S, _SLOWER * max(self._own)) if is_bounded else math.inf
        return Timing(
            gather_s=gather_s,
            longest_gather_s=longest_s,
            carry_s=most,
            # Whoever makes the last commit after the others moves about as many bytes as they did.
            follow_s=min(gather_s, LEAST_FOLLOW_S + 2.0 * usual) if self._rounds else 0.0,
            attempt_s=self.averaging_timeout_s or 20.0 + 4.0 * usual,
            stall_s=min(MOST_STALL_S, LEAST_STALL_S + 4.0 * usual),
            connect_s=min(MOST_CONNECT_S, LEAST_CONNECT_S + 4.0 * usual),
        )

    def _gather_s(self, slowest: float, most: float) -> float:
        if self.strategy == "NO_WAIT":
            return MATCHMAKING_S if self.matchmaking_s is None else self.matchmaking_s
        if len(self._gathers) < ENOUGH_ROUNDS:
            return most
        median = statistics.median(self._gathers)
        deviation = _NORMAL_MAD * statistics.median(abs(seconds - median) for seconds in self._gathers)
        least = max(LEAST_GATHER_S, LEAST_GATHER_SHARE * slowest)
        return min(most, max(least, median + DEVIATIONS * deviation))
