"""Runs a sink behind a queue in a thread of its own, so that a slow or failing sink never delays training."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any, Protocol

log = logging.getLogger(__name__)

CAPACITY = 1000
"""Queued records: minutes' worth, to bridge a short outage of the sink's service."""
CLOSE_TIMEOUT_S = 15.0
"""Time for a sink to write its queued records at the end."""


class Sink(Protocol):
    """A receiver of records, used from one thread."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class QueuedSink:
    """Passes records to a sink in order. Records are dropped while the queue is full, with one warning."""

    def __init__(self, sink: Sink, *, capacity: int = CAPACITY) -> None:
        self._sink, self._name = sink, type(sink).__name__
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(capacity)
        self._has_failed = threading.Event()
        self._num_dropped = 0
        # A daemon thread, so that a sink that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        """Queue a record; never blocks."""
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
        """Wait at most `timeout_s` for the sink to write the queued records."""
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
            except Exception as error:  # noqa: BLE001 - no failure of a sink may end the training
                log.warning("%s failed and gets no more metrics: %s", self._name, error)
                self._has_failed.set()
        try:
            self._sink.close()
        except Exception as error:  # noqa: BLE001
            log.warning("%s did not close: %s", self._name, error)
