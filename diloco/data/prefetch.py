"""Reads batches ahead in a background thread, so that the device does not wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class _End:
    """Stands for the end of the items."""


class Prefetched(Generic[T]):
    """Iterates over `items`, reading up to `depth` + 1 items ahead. An error of `items` is raised to the consumer.

    A context manager: leaving it ends the thread, even if items are left.
    """

    def __init__(self, items: Iterator[T], depth: int = 2) -> None:
        self._items = items
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead = deque(self._submitted() for _ in range(depth + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        # The end, or an error, stays in its place: iterating again meets it again.
        while not isinstance(item := self._ahead[0].result(), _End):
            self._ahead.popleft()
            self._ahead.append(self._submitted())
            yield item

    def close(self) -> None:
        """End the thread; repeating it is safe."""
        self._reader.shutdown(cancel_futures=True)

    def _submitted(self) -> Future[T | _End]:
        return self._reader.submit(next, self._items, _End())
