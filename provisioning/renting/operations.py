"""Commands on rented pods at all providers: extend, fetch results, give back, reconcile, watch the time."""

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
from provisioning.renting.renter import Renter
from provisioning.renting.renters import renters

_FETCH_AHEAD_S = 300.0
# The command that holds the lock may be extending the rental.
_OVERDUE_S = 60.0
PYTHON, WANTED = "python", "wanted"
"""Keys in the ledger, written by the last command that set up pods: their Python, and the requested swarm."""
UNWATCHED = "unwatched"
"""Key in the ledger: providers that the watcher could not open."""


async def extend(ledger: Ledger, access: Access, names: Sequence[str], hours: float, say: Say) -> Failures:
    """Extend rentals: at the provider first, then in the ledger, so that a failed extension can be repeated.

    Returns the errors by pod. Raises UserError, before any change, if a pod has no end.
    """
    rows = ledger.named(names)
    for row in rows:
        if row.ends_at is None:
            raise UserError(f"{row.name} has no rental end that could be extended.")
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
    """Fetch the results of pods, which are kept. Returns the errors by pod."""
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
    """Give back the pods of these names, or all, and all strays. Returns the errors by pod.

    `fetches`: see Account. `discard_results`: also give back pods whose results cannot be fetched.
    """
    async with renters(ledger, access, say, patience, fetches=fetches) as found:
        unseen = await each(found.values(), Renter.record_strays, name=lambda one: one.provider.name)
        # The pods of the ledger are given back anyway, by their ids.
        for name, error in (unseen | found.failures).items():
            say(name, f"cannot be asked for further pods: {error}")
        return await found.give_back(ledger.named(names), discard_results=discard_results)


def forget(ledger: Ledger, rows: Sequence[Row]) -> None:
    """Mark these rows as gone, because the user says so."""
    for row in rows:
        if row.state != State.PLANNED:
            row = ledger.advance(row, State.DELETING)
        ledger.forget(row, now=time.time())


async def reconcile(
    ledger: Ledger, access: Access, providers: Sequence[str], say: Say, patience: Patience | None = None
) -> Failures:
    """Make the ledger agree with all providers ever used and with `providers`, and give back strays.

    Returns the errors by pod, machine or provider. Skips the checks for renting: giving back needs neither money nor
    programs.
    """
    async with renters(ledger, access, say, patience, also=providers) as found:
        settled = await found.settle()
    return {name: error for failures in settled.values() for name, error in failures.items()}


def watcher_lacks_key(ledger: Ledger, access: Access) -> bool:
    """Whether this command can open a provider that the watcher could not: its environment has the API key."""
    for name in ledger.recall(UNWATCHED).split():
        with contextlib.suppress(ProvisioningError):
            open_provider(name, access)
            return True
    return False


def needs_watcher(ledger: Ledger) -> bool:
    """Whether pods need care without a command: a requested swarm, a rental end, or an order in doubt."""
    rows = ledger.rows()
    return bool(ledger.recall(WANTED)) or any(row.ends_at is not None or row.is_in_doubt for row in rows)


async def end_overdue(ledger: Ledger, access: Access, say: Say, now: float) -> Failures:
    """Request the deletion of pods whose time is well over, by their ids. Needs no lock. Returns the errors by pod."""
    failures: Failures = {}
    async with renters(ledger, access, say) as found:
        for renter in found.values():
            failures |= await renter.end_overdue(now - _OVERDUE_S)
    return failures


async def keep_time(
    ledger: Ledger, access: Access, say: Say, fetched: set[str], interval_s: float, clock: Callable[[], float]
) -> float:
    """Give back pods after their rental end, and settle orders in doubt. Returns the seconds until the next call.

    Results are fetched once, some minutes before the end, since some providers end rentals exactly on time; `fetched`
    contains the labels of these pods. Rentals may be extended, so the wait is at most `interval_s`.
    """
    rows, now = ledger.rows(), clock()
    ends_in_s = [(row, row.ends_at - now) for row in rows if row.ends_at is not None]
    if any(row.is_in_doubt for row in rows) or any(seconds <= 0 for _, seconds in ends_in_s):
        try:
            with ledger.locked():
                failures = await reconcile(ledger, access, (), say)
        except UserError:
            # Another command holds the lock, perhaps for hours, or the disk is full. Overdue pods are deleted below.
            failures = {}
        if any(row.ends_at is not None and row.ends_at < now - _OVERDUE_S for row in ledger.rows()):
            failures |= await end_overdue(ledger, access, say, now)
        for name, error in failures.items():
            say(name, f"failed: {error}")
        return interval_s
    ending = [row for row, seconds in ends_in_s if seconds <= _FETCH_AHEAD_S and row.label not in fetched]
    if ending:
        fetched |= {row.label for row in ending}
        await fetch_results(ledger, access, [row.name for row in ending], say)
    left_s = (s if s <= _FETCH_AHEAD_S else s - _FETCH_AHEAD_S for _, s in ends_in_s)
    return min([interval_s, *left_s])
