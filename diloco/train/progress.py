"""What a trainer does beside its steps, told to its daemon and to whoever reads its output.

Rank 0 of a peer tells; on the others, nothing happens. A thread does it: whoever does not listen costs no step any
time, and a daemon that is gone is noticed by those who need it.
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

from diloco.train.lines import LINE_INTERVAL_S, PhaseLines
from peers.daemon.link import WorkerLink
from peers.errors import LinkLost
from peers.monitor.phases import Doing, PhaseClock

_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 2.0
_CONNECT_TIMEOUT_S = 5.0


class Progress:
    """Used from one thread, but for `waits_for`."""

    def __init__(self, link_path: Path | None = None, *, tells: bool = True) -> None:
        """`link_path` is the daemon's, if there is one."""
        self._link_path = link_path
        self._doing: Doing | None = None
        self._clock, self._lines = PhaseClock(), PhaseLines()
        self._news: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._is_over, self._waited = threading.Event(), ("", float("-inf"))
        self._thread: threading.Thread | None = None
        if tells:
            self._thread = threading.Thread(target=self._tell_forever, name="progress", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def phase(
        self, name: str, detail: str = "", *, total: float = 0.0, unit: str = ""
    ) -> Iterator[Callable[[float], None]]:
        """While the block runs, this is what the trainer does. Gives what to call with how much of it is done."""
        before, doing = self._doing, Doing(name, detail, 0.0, total, unit)
        self._doing = doing

        def reached(done: float) -> None:
            self._doing = replace(doing, done=done)

        try:
            yield reached
        finally:
            self._doing = before

    def evaluated(self, step: int, loss: float) -> None:
        """The weights of this step have been scored."""
        self._news.put(("evaluated", {"step": step, "loss": loss}))

    def is_in_trouble(self, what: str, text: str) -> None:
        """Something is wrong with `what`; no text: not any more."""
        self._news.put(("trouble", {"what": what, "text": text}))

    def waits_for(self, reason: str) -> None:
        """What the daemon does while this rank waits for it: printed where it changes, now and then."""
        said, said_at = self._waited
        now = time.monotonic()
        if self._thread is not None and reason != said and now - said_at > LINE_INTERVAL_S:
            self._waited = reason, now
            print(reason, flush=True)

    def close(self) -> None:
        """Tell what is left to be told, by a deadline. Repeating it is safe."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _tell_forever(self) -> None:
        link: WorkerLink | None = None
        sent: Doing | None = None
        with contextlib.ExitStack() as stack, contextlib.suppress(LinkLost):
            if self._link_path is not None:
                link = WorkerLink.connect(self._link_path, timeout_s=_CONNECT_TIMEOUT_S)
                stack.callback(link.close)
            while True:
                is_over = self._is_over.wait(_INTERVAL_S)
                doing = self._doing
                if link is not None:
                    self._send_news(link)
                    if doing != sent:
                        link.send("doing", **(asdict(doing) if doing else {"name": ""}))
                        sent = doing
                if doing is not None and (line := self._line(doing)):
                    print(line, flush=True)
                if is_over:
                    return

    def _send_news(self, link: WorkerLink) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                kind, fields = self._news.get_nowait()
                link.send(kind, **fields)

    def _line(self, doing: Doing) -> str | None:
        now = time.monotonic()
        return self._lines.of(self._clock.at(doing, now), now)
