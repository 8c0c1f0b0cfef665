"""One piece of work for each of several pods, all at once: what fails for one does not keep the others from theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from operator import attrgetter
from typing import TypeVar

from provisioning.errors import ProvisioningError

T = TypeVar("T")
Failures = dict[str, ProvisioningError]
"""What went wrong, by the name of a pod."""


async def gathered(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results; if one fails, the others are finished first."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def each(
    items: Iterable[T],
    work: Callable[[T], Awaitable[object]],
    failed: Callable[[str, str], None] = lambda name, text: None,
    *,
    name: Callable[[T], str] = attrgetter("name"),
) -> Failures:
    """What went wrong, by the item's name; `failed` is told at once."""
    failures: Failures = {}

    async def one(item: T) -> None:
        try:
            await work(item)
        except ProvisioningError as error:
            failures[name(item)] = error
            failed(name(item), f"failed: {error}")

    await gathered(one(item) for item in items)
    return failures
