"""Runs coroutines in virtual time, which jumps to whatever is waited for next: hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """Advances the clock where another selector would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits, and nothing will happen"
            self.now += max(timeout, 0.0)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self, now: float) -> None:
        self._jumping = _Jumping()
        self._jumping.now = now
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, T], *, now: float) -> tuple[T | BaseException, float]:
    """What `main` returns or raises, and the time at its end. Tasks that it leaves behind are cancelled."""
    loop = VirtualTimeLoop(now)
    loop.set_exception_handler(lambda loop, context: None)
    try:
        return loop.run_until_complete(_to_its_end(main)), loop.time()
    finally:
        loop.close()


async def _to_its_end(main: Coroutine[Any, Any, T]) -> T | BaseException:
    (result,) = await asyncio.gather(main, return_exceptions=True)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for one in left:
        one.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return result
