"""The training loop of one life of one peer: steps, the hand-over of a fragment, and the wait for what came of it.

As diloco/outer/diloco.py has it: weights leave `overlap_steps` before an epoch's end, and their average is merged at
its end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from diloco.sim.clock import Clock
from diloco.sim.cost.machine import Machine
from peers.core.schedule import Schedule

_LEAST_PACE = 0.1
"""Of the usual one, however the jitter falls."""


@dataclass
class Work:
    """What a worker has trained since it was last counted."""

    steps: int = 0
    seconds: float = 0.0

    def add(self, steps: int, step_s: float) -> None:
        self.steps += steps
        self.seconds += steps * step_s


@dataclass(frozen=True)
class Continuation:
    """What became of a fragment that was handed over."""

    epoch: int
    local_step: int
    counts: bool
    """The work is in the swarm's state, or lost for good; else it rides along to the next time."""


class Worker:
    """`hand_over` is called when a fragment's weights are where the daemon finds them."""

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
        """`merged` hears when a round's end is merged for good, and for how long the worker stood still for it."""
        self._clock, self._schedule, self._step_s, self._jitter = clock, schedule, step_s, jitter
        self._machine, self._chance, self._fragment_bytes = machine, chance, fragment_bytes
        self._hand_over, self._merged = hand_over, merged
        self.is_running = True
        self.trained = Work()
        """In this life."""
        self._pending = Work()
        self._handed = Work()
        self.epoch = 0
        """The one that it trains in."""
        self._began_at, self._began_with, self._pace = 0.0, 0, step_s
        self._trains_since: float | None = None
        self._still_since: float | None = None
        self._blocked_s = 0.0
        self._is_ahead = False
        """It trains on while its commit takes long."""
        self._ahead_to: int | None = None
        """The epoch that it is to do so in, once it would stand still."""
        self._answer: Continuation | None = None

    def stop(self) -> None:
        """It is dead."""
        self.is_running = False

    @property
    def local_step(self) -> int:
        """Where it stands in its epoch now."""
        done = int((self._clock.now - self._began_at) / self._pace) if self._pace else 0
        return min(self._began_with + done, self._schedule.steps_per_epoch)

    @property
    def uncommitted_s(self) -> float:
        """Training that no commit has taken in."""
        running_s = self._clock.now - self._trains_since if self._trains_since is not None else 0.0
        return self._pending.seconds + self._handed.seconds + max(0.0, running_s)

    def begin(self, epoch: int, local_step: int) -> None:
        """Train an epoch from this local step on."""
        self.epoch = epoch
        self._pace = self._step_s * max(_LEAST_PACE, self._chance.gauss(1.0, self._jitter))
        self._began_at, self._began_with = self._clock.now, local_step
        self._trains_since = self._clock.now
        leaves_at = max(self._schedule.leaves_at(epoch, None), local_step + 1)
        self._after((leaves_at - local_step) * self._pace, lambda: self._leave(leaves_at, local_step))

    def answer(self, answer: Continuation) -> None:
        """The round is over."""
        self._answer = answer
        if answer.counts:
            self._handed = Work()
        if self._is_ahead and self._still_since is None:
            self._train(self.local_step)
            self._trains_since, self._still_since = None, self._clock.now
        if self._still_since is not None:
            self._merge()

    def go_ahead(self, epoch: int) -> None:
        """The round takes long: train on in the next epoch, as soon as it stands still for it."""
        self._ahead_to = epoch
        if self._still_since is not None and self._answer is None and not self._is_ahead:
            self._train_ahead(epoch)

    def _train_ahead(self, epoch: int) -> None:
        now, steps = self._clock.now, self._schedule.steps_per_epoch
        assert self._still_since is not None
        self._blocked_s += now - self._still_since
        self._still_since, self._ahead_to, self._is_ahead = None, None, True
        self.epoch, self._began_at, self._began_with, self._trains_since = epoch, now, 0, now

        def end() -> None:
            if self._is_ahead and self._began_at == now:
                self._collect(steps)

        self._after(steps * self._pace, end)

    def _leave(self, local_step: int, began_with: int) -> None:
        self._train(local_step - began_with)
        took_s = self._bytes / self._machine.hand_over
        handed, self._pending = self._pending, Work()
        self._handed, self._blocked_s = handed, took_s
        self._trains_since = self._clock.now + took_s
        rest = max(0, self._schedule.steps_per_epoch - local_step)
        self._after(took_s, lambda: self._hand_over(handed))
        self._after(took_s + rest * self._pace, lambda: self._collect(rest))

    def _collect(self, num_steps: int) -> None:
        self._train(num_steps)
        self._trains_since, self._still_since = None, self._clock.now
        if self._answer is not None:
            self._merge()
        elif self._ahead_to is not None and not self._is_ahead:
            self._train_ahead(self._ahead_to)

    def _merge(self) -> None:
        assert self._answer is not None and self._still_since is not None
        answer, self._answer = self._answer, None
        took_s = self._bytes / self._machine.take
        blocked_s = self._blocked_s + self._clock.now - self._still_since + took_s
        done = self.local_step if self._is_ahead and answer.epoch == self.epoch else 0
        self._still_since, self._ahead_to, self._is_ahead = None, None, False
        # What does not count yet rides along to the next time.
        self._pending.steps += self._handed.steps
        self._pending.seconds += self._handed.seconds
        self._handed = Work()
        self._after(took_s, lambda: self.begin(answer.epoch, max(answer.local_step, done)))
        self._merged(self._clock.now + took_s, blocked_s)

    @property
    def _bytes(self) -> float:
        return self._fragment_bytes(self.epoch)

    def _train(self, num_steps: int) -> None:
        self._pending.add(num_steps, self._pace)
        self.trained.add(num_steps, self._pace)

    def _after(self, seconds: float, event: Callable[[], object]) -> None:
        self._clock.after(seconds, lambda: event() if self.is_running else None)
