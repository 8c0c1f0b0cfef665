"""Reports what a trainer does outside its steps, such as loading or evaluating, to its daemon and on stdout.

Only rank 0 reports. It does so from a thread, so that a daemon that does not read never delays a step. If the daemon is
gone the thread ends silently: the outer step detects that by itself.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from diloco.train.metrics_file import LEAST_PHASE_S, LINE_INTERVAL_S, PhaseLines
from peers.daemon.link import WorkerLink
from peers.errors import LinkLost
from peers.monitor.phases import Doing, PhaseClock

LONG_STEP_S = 10.0
"""The trainer reports the micro-batches of steps that will take this long; at the first, also what shortens steps."""
_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 2.0
_CONNECT_TIMEOUT_S = 5.0


class Progress:
    """Not thread-safe, except for `waits_for`."""

    def __init__(self, link_path: Path | None = None, *, tells: bool = True) -> None:
        """`link_path` is the daemon's socket, if there is a daemon; `tells` is true on the rank that reports."""
        self._link_path = link_path
        self._doing: Doing | None = None
        self._has_told_of_long_steps = False
        self._clock, self._lines = PhaseClock(), PhaseLines()
        self._queued: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._is_closed, self._waited = threading.Event(), ("", float("-inf"))
        self._thread: threading.Thread | None = None
        if tells:
            self._thread = threading.Thread(target=self._report_forever, name="progress", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def phase(
        self, name: str, detail: str = "", *, total: float = 0.0, unit: str = ""
    ) -> Iterator[Callable[[float], None]]:
        """Report this phase while the block runs. Yields a function to call with the amount done, out of `total`."""
        before, doing = self._doing, Doing(name, detail, 0.0, total, unit)
        self._doing = doing

        def reached(done: float) -> None:
            self._doing = replace(doing, done=done)

        try:
            yield reached
        finally:
            self._doing = before

    @contextlib.contextmanager
    def step(self, number: int, on_long: Callable[[float], None]) -> Iterator[Callable[[int, int], None]]:
        """While the block runs, report the progress of an inner step that takes long.

        Yields a function to call with the number of micro-batches done, and of all. For the first step that will take
        LONG_STEP_S or more, `on_long` is called with its estimated duration in seconds.
        """
        before, began_at = self._doing, time.monotonic()

        def reached(done: int, total: int) -> None:
            took_s = time.monotonic() - began_at
            if done == total or took_s * total / done < LONG_STEP_S:
                return
            if took_s > LEAST_PHASE_S:
                self._doing = Doing("training", f"step {number}", done, total, "micro-batches")
            if not self._has_told_of_long_steps:
                self._has_told_of_long_steps = True
                on_long(took_s * total / done)

        try:
            yield reached
        finally:
            self._doing = before

    def evaluated(self, step: int, loss: float) -> None:
        """Report the loss of an evaluation."""
        self._queued.put(("evaluated", {"step": step, "loss": loss}))

    def is_in_trouble(self, what: str, text: str) -> None:
        """Report a problem that concerns `what`; an empty text reports that it is over."""
        self._queued.put(("trouble", {"what": what, "text": text}))

    def waits_for(self, reason: str) -> None:
        """Print what the daemon does while this rank waits for it: changes only, at most one per LINE_INTERVAL_S."""
        said, said_at = self._waited
        now = time.monotonic()
        if self._thread is not None and reason != said and now - said_at > LINE_INTERVAL_S:
            self._waited = reason, now
            print(reason, flush=True)

    def close(self) -> None:
        """Send the remaining reports, for at most `_CLOSE_TIMEOUT_S`. Repeating it is safe."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _report_forever(self) -> None:
        link: WorkerLink | None = None
        sent: Doing | None = None
        with contextlib.ExitStack() as stack, contextlib.suppress(LinkLost):
            if self._link_path is not None:
                link = WorkerLink.connect(self._link_path, timeout_s=_CONNECT_TIMEOUT_S)
                stack.callback(link.close)
            while True:
                is_over = self._is_closed.wait(_INTERVAL_S)
                doing = self._doing
                if link is not None:
                    self._send_queued(link)
                    if doing != sent:
                        link.send("doing", **(asdict(doing) if doing else {"name": ""}))
                        sent = doing
                if doing is not None and (line := self._line(doing)):
                    print(line, flush=True)
                if is_over:
                    return

    def _send_queued(self, link: WorkerLink) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                kind, fields = self._queued.get_nowait()
                link.send(kind, **fields)

    def _line(self, doing: Doing) -> str | None:
        now = time.monotonic()
        return self._lines.of(self._clock.at(doing, now), now)
