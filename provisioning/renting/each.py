"""Runs the same work for several pods in parallel; a failure of one does not stop the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from operator import attrgetter
from typing import TypeVar

from provisioning.errors import ProvisioningError, in_words

T = TypeVar("T")
Failures = dict[str, ProvisioningError]
"""Errors by the name of a pod, machine or provider."""


async def gathered(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results. Raises the first error, after all work has ended."""
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
    """Run `work` for all items. Returns the errors by item name, and calls `failed(name, text)` at once for each."""
    failures: Failures = {}

    async def one(item: T) -> None:
        try:
            await work(item)
        except Exception as error:  # noqa: BLE001 - what one pod or provider answers must not stop the others
            failures[name(item)] = (
                error if isinstance(error, ProvisioningError) else ProvisioningError(in_words(error))
            )
            failed(name(item), f"failed: {failures[name(item)]}")

    await gathered(one(item) for item in items)
    return failures
