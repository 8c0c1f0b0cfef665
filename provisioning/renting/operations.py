"""What is asked about pods that are there, and what is done with them, whichever providers they are of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from provisioning.errors import ProvisioningError, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row, State
from provisioning.providers.registry import Access, open_provider
from provisioning.renting.account import Patience, Say
from provisioning.renting.each import Failures, each
from provisioning.renting.renters import renters

_FETCH_BEFORE_END_S = 300.0
# Whoever holds the ledger may be putting the end off just now.
_OVERDUE_S = 60.0
PYTHON, WANTED = "python", "wanted"
"""What is remembered of the last command that set pods up: their Python, and the swarm that is to be there."""
UNWATCHED = "unwatched"
"""Providers that the process that watches could not open."""


async def extend(ledger: Ledger, access: Access, names: Sequence[str], hours: float, say: Say) -> Failures:
    """Let pods live longer: first the provider, then the ledger, so that a pod that failed can be extended again.

    What went wrong, by pod. Raises UserError where one has no end, before any is changed.
    """
    rows = ledger.named(names)
    for row in rows:
        if row.ends_at is None:
            raise UserError(f"{row.name} has no end that could be put off.")
    async with renters(ledger, access, say) as found:

        async def one(row: Row) -> None:
            ends_at = (row.ends_at or 0.0) + hours * 3600
            await found[row.provider].schedule_end(replace(row, ends_at=ends_at))
            ledger.advance(row, row.state, ends_at=ends_at)
            say(row.name, f"lives {hours:g} h longer")

        return await each(rows, one)


async def fetch_results(
    ledger: Ledger, access: Access, names: Sequence[str], say: Say, fetches: Sequence[str] | None = None
) -> Failures:
    """Fetch what was made on pods, which stay; what could not be, by pod."""
    rows = ledger.named(names)
    async with renters(ledger, access, say, fetches=fetches) as found:
        return await each(rows, lambda row: found[row.provider].fetch_results(row))


async def down(
    ledger: Ledger,
    access: Access,
    names: Sequence[str],
    say: Say,
    patience: Patience | None = None,
    *,
    fetches: Sequence[str] | None = None,
    discard_results: bool = False,
) -> Failures:
    """Give pods back, those that no row knows of included; what could not be, by pod.

    `fetches`: as for a Renter. `discard_results`: also those whose results cannot be fetched.
    """
    async with renters(ledger, access, say, patience, fetches=fetches) as found:
        unseen = await each(
            found.values(), lambda one: one.record_strays(), name=lambda one: one.provider.name
        )
        # Known pods are given back by their ids all the same.
        for name, error in (unseen | found.failures).items():
            say(name, f"cannot be asked whether a pod of ours is there: {error}")
        return await found.give_back(ledger.named(names), discard_results=discard_results)


def forget(ledger: Ledger, rows: Sequence[Row]) -> None:
    """Take the word of a person that these pods are gone."""
    for row in rows:
        if row.state != State.PLANNED:
            row = ledger.advance(row, State.DELETING)
        ledger.forget(row, now=time.time())


async def reconcile(
    ledger: Ledger, access: Access, providers: Sequence[str], say: Say, patience: Patience | None = None
) -> Failures:
    """Make the ledger true and end orphans, at all providers that were ever used and at these; what was not done, by
    pod, machine or provider. Without a check of what renting needs: giving back needs neither money nor programs.
    """
    async with renters(ledger, access, say, patience, also=providers) as found:
        settled = await found.settle()
    return {name: error for failures in settled.values() for name, error in failures.items()}


def watcher_lacks_key(ledger: Ledger, access: Access) -> bool:
    """Whether the process that watches lacks a key that this command has."""
    for name in ledger.recall(UNWATCHED).split():
        with contextlib.suppress(ProvisioningError):
            open_provider(name, access)
            return True
    return False


def needs_watcher(ledger: Ledger) -> bool:
    """Whether something has to be done about its pods at a time when nobody may type a command."""
    rows = ledger.rows()
    return bool(ledger.recall(WANTED)) or any(row.ends_at is not None or row.is_in_doubt for row in rows)


async def keep_time(
    ledger: Ledger, access: Access, say: Say, fetched: set[str], interval_s: float, clock: Callable[[], float]
) -> float:
    """Give back pods whose time is over, and those of orders in doubt; how long to wait until the next look.

    What was made on a pod is fetched shortly before its end, once, since some providers take it back to the minute;
    `fetched` holds the labels of those of which it was. Ends may be put off, so nobody waits longer than `interval_s`.
    """
    rows, now = ledger.rows(), clock()
    ends_in_s = [(row, row.ends_at - now) for row in rows if row.ends_at is not None]
    if any(row.is_in_doubt for row in rows) or any(seconds <= 0 for _, seconds in ends_in_s):
        try:
            with ledger.locked():
                failures = await reconcile(ledger, access, (), say)
        except UserError:
            # It is another command's for now, which may wait for hours, or be stopped itself; or its disk is full.
            failures = {}
        if any(row.ends_at is not None and row.ends_at < now - _OVERDUE_S for row in ledger.rows()):
            async with renters(ledger, access, say) as found:
                for renter in found.values():
                    failures |= await renter.end_overdue(now - _OVERDUE_S)
        for name, error in failures.items():
            say(name, f"failed: {error}")
        return interval_s
    ending = [
        row for row, seconds in ends_in_s if seconds <= _FETCH_BEFORE_END_S and row.label not in fetched
    ]
    if ending:
        fetched |= {row.label for row in ending}
        await fetch_results(ledger, access, [row.name for row in ending], say)
    left_s = (s if s <= _FETCH_BEFORE_END_S else s - _FETCH_BEFORE_END_S for _, s in ends_in_s)
    return min([interval_s, *left_s])
