"""Every timeout of the core: constants, each with its reason, and values learned from past rounds and epochs.

All of them derive from the heartbeat, the round trip, the length of rounds and the length of epochs.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from peers.core.settings import Settings
from peers.protocol.aggregation import Rule, holds_all
from peers.timing import BEAT_PEERS, FULL_MESH, STALL_S, START_S, STREAMS_S, heartbeat_s, status_s

SILENT_BEATS = 6
"""Missed heartbeats after which a peer counts as lost: a busy machine misses two or three."""
REGAIN = 4
"""Silence timeouts for which a lost peer may come back before it counts as gone and a minority may commit without it.
Not shorter: such a commit is lost if the majority is heard again. Twelve seconds among few peers, in which most
processes and links recover; workers train on meanwhile."""
ROUND_TRIPS = 8
"""Round trips that an answer may take: both ends queue, and packets are lost and sent again."""
FIRST_GRACE_S = START_S
"""The least grace while fewer than ENOUGH_ROUNDS are known: models compile and caches fill at different speeds."""
LEAST_GRACE_SHARE = 0.1
"""The least grace as a share of an epoch: training steps vary by that much."""
PATIENCE, PATIENCE_BEATS = 1.25, 1.0
"""Without faults lately, a commit is late after this many usual waits and this many heartbeats more: a busy machine
alone delays a commit by less, and a run without faults must be repeatable bit for bit."""
DEVIATIONS = 6.0
"""The learned grace is the median waiting time plus this many robust standard deviations."""
ENOUGH_ROUNDS = 4
"""Rounds to have seen before waiting times are learned from them."""
LATER = 1.5
"""A waiting time that ended with a peer still missing is multiplied by this: a longer grace might have sufficed."""
DUE_SHARE = 0.5
"""A member that will be ready, by its own progress, is waited for, up to this share of an epoch: it has evaluated, or
saved. Otherwise it would count as absent, and all would train ahead of each of the next commits."""
SLOWEST_PEER = 8.0
"""The grace is at most this many epochs: slower peers are never waited for."""
SLOWEST_LINK = 1e6
"""Bytes per second (8 Mbit/s): the first round and a fetch are given the time that this link needs."""
LEAST_ROUND_S = START_S
"""The least timeout of the first round, in which streams are opened and kernels compiled."""
ROUNDS = 4.0
"""An attempt times out after this many usual rounds, or an epoch if that is longer. If it fails late and nobody is to
blame, or fails again without whoever was, the next one has about three times as long (`attempt_failed`): links have
become slower."""
FETCH_S = START_S
"""A fetch may take this long in addition to what its bytes need."""
SHARED_BY = 8
"""A fetch is given the time that SLOWEST_LINK needs for so many: what one that is cut off has received is lost, and if
those that share a link were all cut off, all would begin again."""
_NORMAL_MAD = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(kw_only=True)
class Timing:
    """The timeouts of one peer, by what it has seen of its swarm. All times are in seconds."""

    most_grace_s: float
    """The user's bound on the grace."""
    most_attempt_s: float
    """The user's bound on the length of an attempt."""
    rule: Rule = "mean"
    """How work is averaged."""
    first_round_s: float = LEAST_ROUND_S
    fetch_timeout_s: float = FETCH_S
    num_peers: int = 1
    round_trip_s: float = 0.0
    """The median over the roster."""
    _waited_s: float = 0.0
    """How long the last commit waited from quorum to proposal."""
    _rounds: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """Lengths of the last reductions."""
    _epochs: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    """Lengths of the last epochs, without waiting for others."""
    _waits: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """How long workers waited from handing over their work to their answer."""
    _gathers: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    """Times from quorum to proposal."""

    @classmethod
    def of(cls, settings: Settings) -> Timing:
        return cls(
            most_grace_s=settings.grace_s,
            most_attempt_s=settings.attempt_timeout_s,
            rule=settings.aggregation.rule,
        )

    def set_sizes(self, *, fragment_bytes: int, state_bytes: int) -> None:
        """How many bytes a commit and a fetch move; known once the worker has said how large its model is."""
        self.first_round_s = max(LEAST_ROUND_S, 2 * fragment_bytes / SLOWEST_LINK)
        self.fetch_timeout_s = FETCH_S + SHARED_BY * state_bytes / SLOWEST_LINK

    @property
    def beat_s(self) -> float:
        return heartbeat_s(self.num_peers)

    @property
    def status_s(self) -> float:
        return status_s(self.num_peers)

    @property
    def silence_s(self) -> float:
        """The failure detector's timeout: a peer that is silent for this long counts as lost."""
        return max(SILENT_BEATS * self.beat_s, ROUND_TRIPS * self.round_trip_s)

    @property
    def regain_s(self) -> float:
        """A peer that has been lost for this long counts as gone: others may commit without it, even as a minority."""
        return REGAIN * self.silence_s

    @property
    def last_resort_s(self) -> float:
        """How long to wait for what only a peer that may be gone can provide."""
        return 10 * self.silence_s

    @property
    def reaction_s(self) -> float:
        """How long a healthy peer may take to react to a message: longer among many, since a leader sends to each."""
        return max(min(2 * self.status_s, STALL_S), ROUND_TRIPS * self.round_trip_s)

    @property
    def usual_round_s(self) -> float:
        return self.learned_round_s if self._rounds else self.first_round_s

    @property
    def learned_round_s(self) -> float:
        """As `usual_round_s`; 0 before the first round."""
        return statistics.median(self._rounds) if self._rounds else 0.0

    @property
    def connect_s(self) -> float:
        """How long all streams of an attempt may take to open: longer if each member has many. In large groups it has
        about 2 sqrt(N) (reduce/grid.py), unless the rule needs all values in one place; but some members hear of the
        attempt later than others."""
        num_streams = self.num_peers
        if num_streams <= FULL_MESH or holds_all(self.rule, num_streams):
            return STREAMS_S * max(1.0, num_streams / BEAT_PEERS)
        num_streams = max(FULL_MESH, math.ceil(2 * math.sqrt(num_streams)))
        return max(STREAMS_S * num_streams / BEAT_PEERS, STREAMS_S + self.reaction_s)

    @property
    def prompt_s(self) -> float:
        """How long a member may take to begin to send, once a stream with it is open."""
        if not self._rounds:
            return self.connect_s
        return min(self.connect_s, self.reaction_s + min(self.silence_s, self.usual_round_s))

    @property
    def stall_s(self) -> float:
        """How long a stream of a reduction may be silent."""
        return self.silence_s + min(self.silence_s, self.usual_round_s)

    @property
    def vote_s(self) -> float:
        """How long the votes of all and the certificate may take, once this peer's own reduction is done."""
        if not self._rounds:
            return min(self.most_attempt_s, self.first_round_s)
        usual = self.connect_s + self.stall_s + ROUNDS * self.usual_round_s
        return min(self.most_attempt_s, usual)

    @property
    def attempt_s(self) -> float:
        """The timeout of an attempt, from proposal to certificate. It may take as long as an epoch even if rounds are
        usually much shorter: otherwise a peer with a slow link could never come back."""
        epoch_s = statistics.median_low(self._epochs) if self._epochs else 0.0
        return min(self.most_attempt_s, max(self.vote_s, epoch_s))

    @property
    def least_grace_s(self) -> float:
        """The grace for peers that are not relied on: the spread of step times, and the time to announce readiness."""
        return min(
            self.most_grace_s, max(self.reaction_s, LEAST_GRACE_SHARE * max(self._epochs, default=0.0))
        )

    def grace_s(
        self, epoch_s: float, *, is_fetching: bool = False, due_in_s: Collection[float] = ()
    ) -> float:
        """How long a quorum waits for the other peers, if it was ready `epoch_s` after the epoch began.

        `is_fetching`: one of them fetches the last commit, which takes no longer than a round. `due_in_s`: how long
        after the quorum others of them will be ready, by their own progress.
        """
        slowest = max(self._epochs, default=epoch_s)
        if len(self._gathers) < ENOUGH_ROUNDS:
            learned = max(FIRST_GRACE_S, slowest)
        else:
            usual_s = statistics.median(self._gathers)
            # The median absolute deviation, which outliers do not change, as a standard deviation.
            deviation_s = _NORMAL_MAD * statistics.median(abs(each - usual_s) for each in self._gathers)
            learned = max(self.least_grace_s, usual_s + DEVIATIONS * deviation_s)
        # All members have to apply these, also those that have just come: who waits less times the leader out.
        if is_fetching:
            learned = max(learned, self.learned_round_s)
        longest_s = DUE_SHARE * max(epoch_s, statistics.median_low(self._epochs or [0.0]))
        learned = max([learned, *(due_s + self.reaction_s for due_s in due_in_s if due_s <= longest_s)])
        if len(self._gathers) >= ENOUGH_ROUNDS:
            learned = min(learned, SLOWEST_PEER * max(slowest, self.reaction_s))
        return min(self.most_grace_s, learned)

    def newcomers_grace_s(self, epoch_s: float) -> float:
        """The grace if only newcomers are late: at most the length of an epoch, because strangers can come without end
        and need only claim that they train. `epoch_s` is the epoch as this peer has seen it, which is short if this
        peer came late to it; so the usual length counts as well."""
        longest = max(epoch_s, statistics.median_low(self._epochs) if self._epochs else 0.0)
        return min(self.grace_s(epoch_s), max(self.least_grace_s, longest))

    @property
    def patience_s(self) -> float:
        """How long a worker waits for the commit of its work before it goes ahead, in a swarm without faults."""
        if len(self._waits) < ENOUGH_ROUNDS:
            return self.first_round_s
        return PATIENCE * statistics.median(self._waits) + PATIENCE_BEATS * self.beat_s

    def answered(self, seconds: float) -> None:
        """A commit contains the worker's work, `seconds` after it was handed over."""
        self._waits.append(seconds)

    def pause_s(self, num_failures: int) -> float:
        """The pause before the next attempt after this many failures in a row: exponential back-off."""
        if not num_failures:
            return 0.0
        return min(self.silence_s, max(self.round_trip_s, 0.05) * 2.0 ** min(num_failures - 1, 16))

    def committed(self, *, round_s: float, epoch_s: float) -> None:
        """A commit was made, at the end of an epoch of this length.

        The time from quorum to proposal, which `gathered` was just told, is not counted as part of the epoch: otherwise
        each wait for a peer that never comes would lengthen the next one.
        """
        self._rounds.append(min(round_s, self.first_round_s))
        self._epochs.append(max(0.0, epoch_s - self._waited_s))
        self._waited_s = 0.0

    def gathered(self, waited_s: float, last_s: float, *, complete: bool) -> None:
        """The last group was proposed `waited_s` after its quorum, and its last member was ready `last_s` after it;
        `complete`: no member that is relied on was missing."""
        if math.isfinite(waited_s):
            self._waited_s = waited_s
            self._gathers.append(last_s if complete else LATER * waited_s)

    def attempt_failed(self, lasted_s: float) -> None:
        """An attempt failed, `lasted_s` after its reduction began: for now, a round takes at least so long."""
        if lasted_s > self.usual_round_s:
            self._rounds.clear()
            self._rounds.append(min(self.first_round_s, lasted_s))
