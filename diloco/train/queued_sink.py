"""A sink behind a queue and a thread: whatever becomes of it, training goes on at its own pace."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any, Protocol

log = logging.getLogger(__name__)

CAPACITY = 1000
"""Records that wait: minutes of them, for a service that is away for a moment."""
CLOSE_TIMEOUT_S = 15.0
"""What a sink gets at the end for the records that it has left."""


class Sink(Protocol):
    """Somewhere else that records go. Used from one thread."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class QueuedSink:
    """Hands records to a sink in their order. What does not fit any more is dropped, which is said once."""

    def __init__(self, sink: Sink, *, capacity: int = CAPACITY) -> None:
        self._sink, self._name = sink, type(sink).__name__
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(capacity)
        self._has_failed = threading.Event()
        self._num_dropped = 0
        # A daemon: one that hangs for ever does not keep the process.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Never waits."""
        if self._has_failed.is_set():
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            if self._num_dropped == 0:
                log.warning(
                    "%s takes no metrics at the moment; what it misses is in metrics.jsonl", self._name
                )
            self._num_dropped += 1

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Give the sink its last records, but no more than this time."""
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            log.warning("%s hangs; its last %d records are lost", self._name, self._queue.qsize())
        elif self._num_dropped:
            log.warning("%s has missed %d records", self._name, self._num_dropped)

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            if self._has_failed.is_set():
                continue
            try:
                self._sink.write(record)
            except Exception as error:  # noqa: BLE001 - whatever it is, it must not take the training down
                log.warning("no more metrics to %s: %s", self._name, error)
                self._has_failed.set()
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001
            log.warning("%s did not close: %s", self._name, error)
