"""Retries with exponential backoff, for requests that change nothing or may be repeated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from provisioning.errors import ProviderError, ProvisioningError, Unavailable

T = TypeVar("T")

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 20.0
MAX_ATTEMPTS = 7


def delay_s(attempt: int, retry_after_s: float | None, seed: float) -> float:
    """Seconds to wait after attempt `attempt` (from 1 on): doubling, with jitter from `seed`, a number in 0..1.

    At least `retry_after_s`, up to a minute.
    """
    own = min(FIRST_DELAY_S * 2 ** (attempt - 1), MAX_DELAY_S) * (0.5 + 0.5 * seed)
    return max(own, min(retry_after_s or 0.0, 60.0))


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
