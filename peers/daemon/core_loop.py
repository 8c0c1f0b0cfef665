"""Runs the core on asyncio: one task hands it events, one after the other.

The effects of an event are carried out in their order, before the next event is handed over, so that the state, the
round and the messages do not change under one another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from peers.core import events
from peers.core.effects import Effect
from peers.core.peer import Peer
from peers.timing import FORGET_S

_MOST_EVENTS = 4096
"""Messages that arrive while so many events are waiting are dropped."""

Step = Callable[[], Coroutine[Any, Any, events.Event | None]]
"""Work that has to be done in its turn among the events. Returns the event that it results in, if any."""


class CoreLoop:
    """The loop. A subclass performs the effects, and stops its own tasks when the loop ends."""

    def __init__(self, core: Peer) -> None:
        self.core = core
        self._events: asyncio.Queue[events.Event | Step] = asyncio.Queue()

    def _perform(self, effect: Effect) -> Coroutine[Any, Any, None] | None:
        """Carry out an effect that takes no time; return the coroutine that carries out any other."""
        raise NotImplementedError

    def _event_handled(self) -> None:
        """Called after the effects of each event."""
        raise NotImplementedError

    def post(self, event: events.Event | Step) -> None:
        """Queue an event, or work during which no effect may be carried out.

        Messages of other peers may be dropped, as they may be on the network.
        """
        if (
            not isinstance(event, events.Received | events.StatusesReceived | events.StillHere)
            or self._events.qsize() < _MOST_EVENTS
        ):
            self._events.put_nowait(event)

    async def run(self) -> None:
        """Handle events until cancelled. Raises PeersError where this peer cannot continue."""
        while True:
            event = await self._next_event()
            for effect in self.core.handle(event, time.monotonic()):
                if (work := self._perform(effect)) is not None:
                    await work
            self._event_handled()
            # Taking an event that is already there does not let any other task run.
            await asyncio.sleep(0)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this beside the loop. An error in it ends the loop with that error."""
        task = asyncio.create_task(work)

        def has_ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:

                async def fail() -> None:
                    task.result()

                self.post(fail)

        task.add_done_callback(has_ended)
        return task

    async def _next_event(self) -> events.Event | None:
        """The next event; None at the core's deadline."""
        wait_s = min(max(0.0, self.core.deadline - time.monotonic()), FORGET_S)
        try:
            # In Python 3.11 wait_for loses a cancellation that arrives together with an event.
            async with asyncio.timeout(wait_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        return await event() if callable(event) else event
