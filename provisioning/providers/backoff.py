"""Retries with exponential backoff, for requests that change nothing or may be repeated; and their pace."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from provisioning.errors import ProviderError, ProvisioningError, TooManyRequests, Unavailable

T = TypeVar("T")

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 20.0
MAX_ATTEMPTS = 7
_MAX_RETRY_AFTER_S = 60.0
_RECOVERY = 0.9


def delay_s(attempt: int, retry_after_s: float | None, seed: float) -> float:
    """Seconds to wait after attempt `attempt` (from 1 on): doubling, with jitter from `seed`, a number in 0..1.

    At least `retry_after_s`, up to a minute.
    """
    own = min(FIRST_DELAY_S * 2 ** (attempt - 1), MAX_DELAY_S) * (0.5 + 0.5 * seed)
    return max(own, min(retry_after_s or 0.0, _MAX_RETRY_AFTER_S))


class Pace:
    """Sends requests to one provider one at a time, and so slowly that it refuses few.

    The time between two requests doubles with each TooManyRequests, and shrinks slowly, down to `least_s`: if only the
    refused request waited, those of other pods would have it refused again.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = self._interval_s = least_s
        self._lock, self._next_at = asyncio.Lock(), 0.0

    @contextlib.asynccontextmanager
    async def turn(self, begin_at: float = 0.0) -> AsyncIterator[None]:
        """Send one request in this context, not before `begin_at`, a time of `time.monotonic`."""
        async with self._lock:
            await asyncio.sleep(max(self._next_at, begin_at) - time.monotonic())
            wait_s = 0.0
            try:
                yield
                self._interval_s = max(_RECOVERY * self._interval_s, self._least_s)
            except TooManyRequests as error:
                self._interval_s = min(max(2 * self._interval_s, FIRST_DELAY_S), MAX_DELAY_S)
                wait_s = min(error.retry_after_s or 0.0, _MAX_RETRY_AFTER_S)
                raise
            finally:
                self._next_at = time.monotonic() + max(self._interval_s, wait_s)


async def repeated(
    request: Callable[[], Awaitable[T]],
    *,
    tell: Callable[[str], None] = lambda text: None,
    unexpected: type[ProviderError] = ProviderError,
) -> T:
    """The request's answer. The request is sent up to MAX_ATTEMPTS times while it raises Unavailable.

    `tell` gets one message, after the first failure. Errors outside ProvisioningError are raised as `unexpected`.
    """
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return await request()
        except ProvisioningError as error:
            if not isinstance(error, Unavailable) or attempt == MAX_ATTEMPTS:
                raise
            if attempt == 1:
                tell(f"{error}; asking again for up to a minute")
            await asyncio.sleep(delay_s(attempt, error.retry_after_s, random.random()))
        except Exception as error:
            # No answer of one provider may keep the pods of other providers from being given back.
            raise unexpected(f"its answer has an unknown form ({type(error).__name__}: {error})") from error
    raise AssertionError("unreachable")
