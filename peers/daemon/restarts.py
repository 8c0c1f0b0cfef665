"""Decides whether a worker that has ended is started again. Pure; supervisor.py carries the decision out.

A worker is given up on after MAX_DEATHS ends in a row without progress, and after _MAX_SAME ends in a row for the same
reason. For the latter, steps do not count as progress, since they can be trained on the way to weights that are not
finite; but _COMMITS_PER_DEATH commits with this peer's work make up for one end, and so do rollouts that learners take.
An end by a signal has no reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from peers.timing import CONNECT_S, RETRY_S

FINISHED = 0
USER_ERROR = 2
"""The exit code of a worker that needs its user to act: starting it again would change nothing."""
WORKER_ENDED = "the worker ended with"
"""Begins the line that says why a worker is started again."""
GAVE_UP = "the worker failed"
"""Begins the message of a peer that has given up on its worker. Not to be started again at once; a service may do so
later, since the reason may be an outage."""

MAX_DEATHS = 5
"""Deaths in a row without progress."""
_MAX_SAME = 3
"""Deaths in a row for the same reason."""
_COMMITS_PER_DEATH = 2
"""More than one: a worker with a bug may commit once in each of its lives."""
_FIRST_SIGNAL = 128
_FIRST_DELAY_S = 2 * RETRY_S
_MAX_DELAY_S = CONNECT_S


@dataclass(frozen=True)
class WorkerEnd:
    """How one life of the worker ended, and whether another follows."""

    code: int
    """The exit code as a shell reports it: 128 + signal for a signal."""
    reason: str
    """The last line of its log; empty after a signal."""
    num_same: int
    """Ends in a row for this reason, this one included."""
    num_deaths: int
    """Ends in a row without progress, this one included."""
    restarts: bool

    def in_words(self) -> str:
        """For the log, where the worker is started again."""
        if self.num_same > 1:
            return f"{WORKER_ENDED} {self.code} again, for the same reason, and is started again"
        why = f": {self.reason}" if self.reason else ""
        return f"{WORKER_ENDED} {self.code} and is started again{why}"

    def given_up(self) -> str:
        """For the user, where the worker is given up on."""
        if self.reason.startswith(GAVE_UP):
            return self.reason
        if self.reason and self.num_same >= _MAX_SAME:
            return f"the worker failed {self.num_same} times in a row for the same reason: {self.reason}"
        why = self.reason or f"it ended with {self.code}"
        return f"{GAVE_UP} {self.num_deaths} times in a row without progress, the last time: {why}"


class Restarts:
    """Counts how often one worker has ended."""

    def __init__(self, max_deaths: int = MAX_DEATHS) -> None:
        self._max_deaths = max_deaths
        self._num_deaths, self._num_same, self._reason = 0, 0, ""
        self._num_commits = 0
        """Since the first death for this reason."""

    def progressed(self) -> None:
        """The worker trains: its earlier deaths no longer count, except those for one reason."""
        self._num_deaths = 0

    def committed(self, *, is_last: bool = False) -> None:
        """A commit contains the worker's work, or a learner has taken a rollout of it. `is_last`: what fails from now
        on fails after the training, and will do so after each training anew."""
        self._num_deaths, self._num_commits = 0, 0 if is_last else self._num_commits + 1

    def ended(self, code: int, said: str) -> WorkerEnd:
        reason = said if FINISHED < code < _FIRST_SIGNAL else ""
        if not reason or reason != self._reason:
            self._num_same = self._num_commits = 0
        self._num_same += 1
        self._reason = reason
        self._num_deaths += 1
        is_final = code in (FINISHED, USER_ERROR) or reason.startswith(GAVE_UP)
        is_hopeless = bool(reason) and self._num_same - self._num_commits // _COMMITS_PER_DEATH >= _MAX_SAME
        return WorkerEnd(
            code=code,
            reason=reason,
            num_same=self._num_same,
            num_deaths=self._num_deaths,
            restarts=not is_final and not is_hopeless and self._num_deaths < self._max_deaths,
        )


def restart_delay_s(deaths: int) -> float:
    """Seconds to wait before the next start, after so many deaths in a row."""
    return min(_FIRST_DELAY_S * 2 ** (deaths - 1), _MAX_DELAY_S)


def last_line(log: str) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
