"""Feeds one peer's rounds: messages, news and deadlines as events in order, and what follows from them as actions.

As peers/averaging.py does it: one thing after the other, and while an action takes time all others wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from diloco.sim.clock import Clock
from peers.membership import View
from peers.round.actions import Action, Send
from peers.round.messages import Ask, Join, RoundMessage
from peers.round.recent_commits import RecentCommits
from peers.rounds import Phase, Round

_LEAST_TICK_S = 0.02

Event = Callable[[float], list[Action]]


class RoundDriver:
    """`view` and `quiet` tell how the swarm looks now; `perform` carries an action out, and may set `is_busy`.

    `before_message` is called before each message to the open round.
    """

    def __init__(
        self,
        clock: Clock,
        view: Callable[[], View],
        quiet: Callable[[], frozenset[int]],
        perform: Callable[[Action], object],
        before_message: Callable[[], None],
    ) -> None:
        self._before_message = before_message
        self._clock, self._view, self._quiet, self._perform = clock, view, quiet, perform
        self.round: Round | None = None
        self.commits = RecentCommits()
        self.is_busy = False
        """An action is being carried out: nothing else happens until that is over and `drain` is called."""
        self._is_running = True
        self._events: deque[Event] = deque()
        self._actions: deque[Action] = deque()
        self._early: deque[tuple[int, RoundMessage]] = deque()
        self._has_stale_view = self._has_been_asked = False
        self._tick_at = float("inf")

    def stop(self) -> None:
        """Nothing happens here any more."""
        self._is_running = False

    def open(self, round_: Round) -> None:
        """The next one; who was ready for it before is heard now."""
        self.round = round_
        self._has_stale_view = self._has_been_asked = False
        for _ in range(len(self._early)):
            self.received(*self._early.popleft())

    def received(self, sender: int, message: RoundMessage) -> None:
        self._has_been_asked = True
        self.post(lambda now: self._route(sender, message, now))

    def view_changed(self, causes: frozenset[str]) -> None:
        """Others stand elsewhere by now. A peer that has no part in a round yet looks when it has."""
        newest = self.commits.newest
        if newest is not None and causes == {newest.group.attempt}:
            return
        self._has_stale_view = True
        if self.round is not None and (self.round.phase is not Phase.IDLE or self._has_been_asked):
            self.post(lambda now: [])

    def post(self, event: Event) -> None:
        if self._is_running:
            self._events.append(event)
            self.drain()

    def drain(self) -> None:
        """Work off events and what follows from them, in order, until something takes time."""
        while not self.is_busy and self._is_running:
            if self._actions:
                self._perform(self._actions.popleft())
            elif self._events:
                self._actions.extend(self._look())
                self._actions.extend(self._happen(self._events.popleft()))
            else:
                break
        self._plan_tick()

    def _route(self, sender: int, message: RoundMessage, now: float) -> list[Action]:
        if self.round is None:
            return []
        if message.lineage == self.round.lineage:
            self._before_message()
            return self.round.on_message(sender, message, now)
        if (commit := self.commits.on(message.lineage)) is not None:
            return [Send(sender, commit)] if isinstance(message, (Join, Ask)) else []
        if isinstance(message, Join):
            self._early.append((sender, message))
        return []

    def _look(self) -> list[Action]:
        if not self._has_stale_view or self.round is None:
            return []
        self._has_stale_view = False
        return self.round.on_view(self._view(), self._clock.now, self._quiet())

    def _happen(self, event: Event) -> list[Action]:
        now = self._clock.now
        actions = event(now)
        if self.round is not None and now >= self.round.deadline:
            actions = actions + self.round.on_tick(now)
        return actions

    def _plan_tick(self) -> None:
        if self.round is None or self.is_busy or not self._is_running:
            return
        due = max(self.round.deadline, self._clock.now + _LEAST_TICK_S)
        if due < self._tick_at:
            self._tick_at = due
            self._clock.at(due, self._tick)

    def _tick(self) -> None:
        self._tick_at = float("inf")
        if self.round is not None and self._clock.now >= self.round.deadline:
            self.post(lambda now: [])
        else:
            self._plan_tick()
