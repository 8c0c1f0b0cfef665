"""Ask several peers at once for something that each may offer or decline; one that does not answer delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from peers.errors import PeersError
from peers.net.socket_io import Closable
from peers.tasks import cancelled
from peers.timing import GRACE_S, PROBE_S

T = TypeVar("T", bound=Closable)


async def collect_offers(asked: Mapping[str, Coroutine[Any, Any, T]]) -> tuple[dict[str, T], dict[str, str]]:
    """By peer id: the offers, which the caller closes, and why other peers offer nothing (they raise PeersError)."""
    tasks = {asyncio.create_task(ask): peer_id for peer_id, ask in asked.items()}
    pending: set[asyncio.Task[T]] = set(tasks)
    patience_s: float | None = None
    offers, refusals = dict[str, T](), dict[str, str]()
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            for task in done:
                try:
                    offers[tasks[task]] = task.result()
                except PeersError as error:
                    refusals[tasks[task]] = str(error)
            patience_s = GRACE_S if offers else PROBE_S
    except BaseException:
        for offer in offers.values():
            offer.close()
        await _withdraw(pending)
        raise
    await _withdraw(pending)
    return offers, refusals | {tasks[task]: "no answer" for task in pending}


async def _withdraw(pending: Iterable[asyncio.Task[Any]]) -> None:
    """Stop asking, and close offers that come too late."""
    for outcome in await cancelled(pending):
        if not isinstance(outcome, BaseException):
            outcome.close()
