"""Reads batches ahead in a background thread, so that the device does not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Prefetched(Generic[T]):
    """Iterates over `items`, reading up to `depth` items ahead. An error of `items` is raised to the consumer.

    A context manager: leaving it ends the thread, even if items are left.
    """

    def __init__(self, items: Iterator[T], depth: int = 2) -> None:
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(items,), name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        while True:
            item, error = self._queue.get()
            if error is not None:
                # Put back, so that iterating again after the end does not block for ever.
                self._queue.put((None, error))
                if isinstance(error, StopIteration):
                    return
                raise error
            yield item  # type: ignore[misc]

    def close(self) -> None:
        """End the thread; repeating it is safe."""
        self._stopped.set()
        while self._thread.is_alive():
            # The thread may be blocked on a full queue.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _read(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if self._stopped.is_set():
                    return
                self._queue.put((item, None))
        except BaseException as error:  # noqa: BLE001 - re-raised in the consumer
            self._queue.put((None, error))
        else:
            self._queue.put((None, StopIteration()))
