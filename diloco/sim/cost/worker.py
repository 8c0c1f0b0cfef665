"""The training loop of one peer: steps, handing over a fragment, and waiting for the outcome of its round.

As in diloco/outer/diloco.py, weights are handed over `overlap_steps` before the end of an epoch, and their average is
merged at its end.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from diloco.sim.clock import Clock
from diloco.sim.cost.machine import Machine
from peers.core.schedule import Schedule

_LEAST_PACE = 0.1
"""Lower limit of the jittered step duration, as a fraction of the mean."""


@dataclass
class Work:
    """An amount of training."""

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, step_s: float) -> None:
        self.steps += steps
        self.seconds += steps * step_s


@dataclass(frozen=True)
class Continuation:
    """The outcome of a round, and where to continue training."""

    epoch: int
    local_step: int
    epoch_s: float
    """How long that epoch may last; 0: as long as its steps take."""
    counts: bool
    """Whether the work handed over is in the commit; if not, it is handed over again with the next fragment."""


class Worker:
    """`hand_over` is called when a fragment's weights have been copied to the daemon."""

    def __init__(
        self,
        *,
        clock: Clock,
        schedule: Schedule,
        step_s: float,
        jitter: float,
        machine: Machine,
        chance: random.Random,
        fragment_bytes: Callable[[int], float],
        hand_over: Callable[[Work], object],
        merged: Callable[[float, float], object],
    ) -> None:
        """`merged(at, blocked_s)` is called with the time at which an average is merged, and how long training was
        blocked for that round."""
        self._clock, self._schedule, self._step_s, self._jitter = clock, schedule, step_s, jitter
        self._machine, self._chance, self._fragment_bytes = machine, chance, fragment_bytes
        self._hand_over, self._merged = hand_over, merged
        self.is_running = True
        self.trained = Work()
        """All training since the start."""
        self._pending = Work()
        self._handed = Work()
        self.epoch = 0
        """The epoch that it trains in."""
        self._pace = step_s
        """Seconds per step."""
        self._epoch_s = 0.0
        """How long its epoch may last; 0: as long as its steps take."""
        self._entered_at = 0.0
        """When its epoch began, for its time budget."""
        self._began_at, self._began_with = 0.0, 0
        """Since when it trains without a break, and the local step at which it began to."""
        self._trains_since: float | None = None
        self._blocked_since: float | None = None
        self._blocked_s = 0.0
        self.is_ahead = False
        """Whether it trains in the next epoch while its commit is awaited."""
        self._ahead_to: tuple[int, float] | None = None
        """The epoch in which to go ahead as soon as it would be blocked, and how long that may last; None: not yet."""
        self._answer: Continuation | None = None

    def stop(self) -> None:
        """End the worker for good."""
        self.is_running = False

    @property
    def local_step(self) -> int:
        """The nominal local step in its epoch (peers/core/schedule.py)."""
        # Rounded up by a little: a step that ends now is done.
        done = int((self._clock.now - self._began_at) / self._pace + 1e-6) if self._pace else 0
        step = self._began_with + done
        if not self.is_ahead:
            elapsed_s = self._clock.now - self._entered_at
            step = self._schedule.local_step_after(step, elapsed_s, self._epoch_s, step_s=0.0)
        return min(step, self._schedule.steps_per_epoch)

    @property
    def epoch_merged(self) -> int:
        """The epoch that the last commit which it has merged led to."""
        return self.epoch - self.is_ahead

    @property
    def uncommitted_s(self) -> float:
        """Training time whose work is in no commit."""
        running_s = self._clock.now - self._trains_since if self._trains_since is not None else 0.0
        return self._pending.seconds + self._handed.seconds + max(0.0, running_s)

    def begin(self, epoch: int, local_step: int, epoch_s: float, *, goes_on: bool = False) -> None:
        """Train in this epoch from this local step on. `goes_on`: it is in that epoch already."""
        self._enter(epoch, local_step, epoch_s, goes_on=goes_on)
        # It looks at the time after each step; one that goes on has just made one.
        num_steps = max(0 if goes_on else 1, self._steps_to(self._schedule.leaves_at(epoch, None)))
        self._after(num_steps * self._pace, lambda: self._leave(num_steps))

    def answer(self, answer: Continuation) -> None:
        """The round is over: merge the outcome, now or at the end of the epoch."""
        self._answer = answer
        if answer.counts:
            self._handed = Work()
        if self._blocked_since is not None:
            self._merge()
        elif self.is_ahead:
            # It looks for the answer after each step.
            trained_s = self._clock.now - self._began_at
            num_steps = math.ceil(trained_s / self._pace - 1e-6) if self._pace else 0
            self._after(max(0.0, num_steps * self._pace - trained_s), lambda: self._collect(num_steps))

    def go_ahead(self, epoch: int, epoch_s: float) -> None:
        """The round takes long: train in the next epoch as soon as the worker would be blocked."""
        self._ahead_to = epoch, epoch_s
        if self._blocked_since is not None and self._answer is None and not self.is_ahead:
            self._train_ahead(epoch, epoch_s)

    def _enter(self, epoch: int, local_step: int, epoch_s: float, *, goes_on: bool = False) -> None:
        """`goes_on`: it is in that epoch already."""
        if not goes_on:
            self._pace = self._step_s * max(_LEAST_PACE, self._chance.gauss(1.0, self._jitter))
        self.epoch, self._epoch_s, now = epoch, epoch_s, self._clock.now
        entered_at = now - self._schedule.elapsed_at(local_step, epoch_s)
        self._entered_at = min(self._entered_at, entered_at) if goes_on else entered_at
        self._began_at, self._began_with, self._trains_since = now, local_step, now

    def _steps_to(self, local_step: int) -> int:
        """How many steps it makes from when it began until it is at this nominal local step of its epoch or beyond."""
        num_steps = max(0, local_step - self._began_with)
        if self._epoch_s and not self.is_ahead and self._pace:
            due_at = self._entered_at + self._schedule.elapsed_at(local_step, self._epoch_s)
            num_steps = min(num_steps, max(0, round((due_at - self._began_at) / self._pace)))
        return num_steps

    def _train_ahead(self, epoch: int, epoch_s: float) -> None:
        assert self._blocked_since is not None
        self._blocked_s += self._clock.now - self._blocked_since
        self._blocked_since, self._ahead_to, self.is_ahead = None, None, True
        self._enter(epoch, 0, epoch_s)
        began_at, num_steps = self._began_at, self._steps_to(self._schedule.steps_per_epoch)

        def end() -> None:
            if self.is_ahead and self._began_at == began_at and self._answer is None:
                self._collect(num_steps)

        self._after(num_steps * self._pace, end)

    def _leave(self, num_steps: int) -> None:
        self._train(num_steps)
        took_s = self._bytes / self._machine.hand_over
        handed, self._pending = self._pending, Work()
        self._handed, self._blocked_s = handed, took_s
        self._trains_since = self._clock.now + took_s
        rest = self._steps_to(self._schedule.steps_per_epoch) - num_steps
        self._after(took_s, lambda: self._hand_over(handed))
        self._after(took_s + rest * self._pace, lambda: self._collect(rest))

    def _collect(self, num_steps: int) -> None:
        self._train(num_steps)
        self._trains_since, self._blocked_since = None, self._clock.now
        if self._answer is not None:
            self._merge()
        elif self._ahead_to is not None and not self.is_ahead:
            self._train_ahead(*self._ahead_to)

    def _merge(self) -> None:
        assert self._answer is not None and self._blocked_since is not None
        answer, self._answer = self._answer, None
        took_s = self._bytes / self._machine.take
        blocked_s = self._blocked_s + self._clock.now - self._blocked_since + took_s
        goes_on = self.is_ahead and answer.epoch == self.epoch
        self._blocked_since, self._ahead_to = None, None
        # Work that is in no commit is handed over again with the next fragment.
        self._pending.steps += self._handed.steps
        self._pending.seconds += self._handed.seconds
        self._handed = Work()
        step = max(answer.local_step, self.local_step if goes_on else 0)
        self.is_ahead = False
        self._after(took_s, lambda: self.begin(answer.epoch, step, answer.epoch_s, goes_on=goes_on))
        self._merged(self._clock.now + took_s, blocked_s)

    @property
    def _bytes(self) -> float:
        return self._fragment_bytes(self.epoch)

    def _train(self, num_steps: int) -> None:
        self._pending.add(num_steps, self._pace)
        self.trained.add(num_steps, self._pace)

    def _after(self, seconds: float, event: Callable[[], object]) -> None:
        self._clock.after(seconds, lambda: event() if self.is_running else None)
