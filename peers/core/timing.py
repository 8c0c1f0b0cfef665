"""Every waiting time of the core: constants, each with its reason, and what is learned from rounds and epochs.

All follow from the heartbeat, the round trip, the length of rounds and the length of epochs.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from peers.core.settings import Settings
from peers.timing import BEAT_PEERS, BEAT_S, START_S, STREAMS_S

SILENT_BEATS = 6
"""Missed heartbeats after which a peer is not waited for: a busy machine misses two or three."""
REGAIN = 4
"""Silences for which a lost peer may come back before it counts as gone: who goes on without a majority loses what it
commits as soon as the others are heard again. Twelve seconds, in which most processes and links are well again, and for
which workers train on."""
ROUND_TRIPS = 8
"""What an answer may take, in round trips: both ends queue, and packets are lost and sent again."""
FIRST_GRACE_S = START_S
"""Before any epoch is known: models compile and caches fill at different speeds."""
LEAST_GRACE_SHARE = 0.1
"""Of an epoch: what training steps may vary by."""
DEVIATIONS = 6.0
"""So many robust standard deviations beyond the median are late."""
ENOUGH_ROUNDS = 4
"""Fewer say little about what is usual."""
LATER = 1.5
"""Where somebody was left out, waiting this much longer would perhaps have sufficed."""
SLOWEST_PEER = 8.0
"""A peer that takes so many times as long for an epoch is never waited for."""
SLOWEST_LINK = 1e6
"""Bytes per second, 8 Mbit/s: what the first round, and a fetch, are given time for."""
LEAST_ROUND_S = START_S
"""The first round is given this much: streams are opened, kernels compiled."""
ROUNDS = 4.0
"""An attempt may take so many usual rounds before it is given up."""
FETCH_S = START_S
"""A fetch may take this long beside what its bytes need."""
_NORMAL_MAD = 1.4826
"""Of a normal distribution, the standard deviation over the median absolute deviation."""


@dataclass(kw_only=True)
class Timing:
    """What one peer has seen of its swarm. Times in seconds."""

    most_grace_s: float
    """The user's bound."""
    most_attempt_s: float
    """Likewise."""
    first_round_s: float = LEAST_ROUND_S
    fetch_timeout_s: float = FETCH_S
    num_peers: int = 1
    round_trip_s: float = 0.0
    _waited_s: float = 0.0
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _epochs: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _gathers: deque[float] = field(default_factory=lambda: deque(maxlen=16))

    @classmethod
    def of(cls, settings: Settings) -> Timing:
        return cls(most_grace_s=settings.grace_s, most_attempt_s=settings.attempt_timeout_s)

    def set_sizes(self, *, fragment_bytes: int, state_bytes: int) -> None:
        """How much a commit and a fetch have to move, as soon as the worker has said how large its model is."""
        self.first_round_s = max(LEAST_ROUND_S, 2 * fragment_bytes / SLOWEST_LINK)
        self.fetch_timeout_s = FETCH_S + state_bytes / SLOWEST_LINK

    @property
    def beat_s(self) -> float:
        return BEAT_S * max(1.0, self.num_peers / BEAT_PEERS)

    @property
    def silence_s(self) -> float:
        """A peer that says nothing for so long is not there, as far as this one can tell."""
        return max(SILENT_BEATS * self.beat_s, ROUND_TRIPS * self.round_trip_s)

    @property
    def regain_s(self) -> float:
        """After so long without it, others may go on without a peer even if they are no majority."""
        return REGAIN * self.silence_s

    @property
    def most_patience_s(self) -> float:
        """For what has to come from a peer that may be gone, and nobody else can do."""
        return 10 * self.silence_s

    @property
    def reaction_s(self) -> float:
        """What a peer that is well takes to do what it has to do next."""
        return max(2 * self.beat_s, ROUND_TRIPS * self.round_trip_s)

    @property
    def usual_round_s(self) -> float:
        return statistics.median(self._rounds) if self._rounds else self.first_round_s

    @property
    def connect_s(self) -> float:
        """For all streams of an attempt to stand; among many they share processors."""
        return STREAMS_S * self.beat_s / BEAT_S

    @property
    def prompt_s(self) -> float:
        """For a member of an attempt to begin, where a stream with it stands."""
        if not self._rounds:
            return self.connect_s
        return min(self.connect_s, self.reaction_s + min(self.silence_s, self.usual_round_s))

    @property
    def stall_s(self) -> float:
        """A stream of a reduction may be silent for so long."""
        return self.silence_s + min(self.silence_s, self.usual_round_s)

    @property
    def attempt_s(self) -> float:
        """From the proposal to the certificate."""
        if not self._rounds:
            return min(self.most_attempt_s, self.first_round_s)
        usual = self.connect_s + self.stall_s + ROUNDS * self.usual_round_s
        return min(self.most_attempt_s, usual)

    @property
    def least_grace_s(self) -> float:
        """What steps vary by, and what everybody takes to say that it is ready."""
        return min(
            self.most_grace_s, max(self.reaction_s, LEAST_GRACE_SHARE * max(self._epochs, default=0.0))
        )

    def grace_s(self, epoch_s: float) -> float:
        """How long a quorum that is ready, so long after the epoch began, waits for the others."""
        slowest = max(self._epochs, default=epoch_s)
        if len(self._gathers) < ENOUGH_ROUNDS:
            return min(self.most_grace_s, max(FIRST_GRACE_S, slowest))
        median = statistics.median(self._gathers)
        deviation = _NORMAL_MAD * statistics.median(abs(seconds - median) for seconds in self._gathers)
        learned = max(self.least_grace_s, median + DEVIATIONS * deviation)
        return min(self.most_grace_s, learned, SLOWEST_PEER * max(slowest, self.reaction_s))

    def patience_s(self, *, is_troubled: bool) -> float:
        """How long a worker stands still for the commit of its work, before it trains on meanwhile."""
        if len(self._waits) < ENOUGH_ROUNDS:
            return self.first_round_s
        return self.usual_round_s if is_troubled else self.reaction_s + statistics.median_low(self._waits)

    def answered(self, seconds: float) -> None:
        """A worker's work is in a commit, so long after it was handed over."""
        self._waits.append(seconds)

    def pause_s(self, num_failures: int) -> float:
        """Before the next attempt, after so many have failed one after the other."""
        if not num_failures:
            return 0.0
        return min(self.silence_s, max(self.round_trip_s, 0.05) * 2.0 ** min(num_failures - 1, 16))

    def committed(self, *, round_s: float, epoch_s: float) -> None:
        """An epoch is over. What it has waited for others, as was told to `gathered` just before, does not count as
        the length of an epoch: else one that never comes would be waited for ever longer."""
        self._rounds.append(min(round_s, self.first_round_s))
        self._epochs.append(max(0.0, epoch_s - self._waited_s))
        self._waited_s = 0.0

    def gathered(self, seconds: float, *, complete: bool) -> None:
        """From a quorum's readiness to the proposal."""
        if math.isfinite(seconds):
            self._waited_s = seconds
            self._gathers.append(seconds if complete else LATER * seconds)

    def attempt_timed_out(self) -> None:
        """Rounds take longer now than they used to."""
        longer = min(self.first_round_s, 2 * self.usual_round_s)
        self._rounds.clear()
        self._rounds.append(longer)
