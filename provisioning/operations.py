"""What is asked about pods that are there, and what is done with them, whichever providers they are of."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from provisioning.errors import Busy, ProvisioningError, UserError
from provisioning.ledger import Ledger, Row
from provisioning.providers.registry import Access, open_provider
from provisioning.renting import Renter
from provisioning.settling import Patience, Say
from provisioning.states import State

INVENTORY, PYTHON = "inventory", "python"
"""What is remembered of the last command that set pods up."""


def access_of(ledger: Ledger, access: Access) -> Access:
    """The same, with what the pods of this ledger were rented with."""
    remembered = ledger.recall(INVENTORY)
    return access if access.inventory or not remembered else replace(access, inventory=Path(remembered))


def checked_names(ledger: Ledger, names: Sequence[str]) -> list[Row]:
    """The rows of these names, or all. Raises UserError for one that is not there."""
    rows = ledger.rows()
    known = dict.fromkeys(row.name for row in rows)
    for name in names:
        if name not in known:
            raise UserError(
                f"There is no pod {name} in {ledger.path}; there is {', '.join(known) or 'none'}."
            )
    return [row for row in rows if not names or row.name in names]


class Renters(dict[str, Renter]):
    """By the name of their provider. Asking for one that could not be opened raises what was wrong with it."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: dict[str, ProvisioningError] = {}

    def __missing__(self, name: str) -> Renter:
        raise self.failures[name]


@contextlib.asynccontextmanager
async def renters(
    ledger: Ledger,
    access: Access,
    say: Say,
    patience: Patience | None = None,
    *,
    also: Sequence[str] = (),
    without: Sequence[str] = (),
) -> AsyncIterator[Renters]:
    """One for each provider that was ever used, and for those in `also`."""
    found = Renters()
    try:
        for name in dict.fromkeys([*ledger.providers(), *also]):
            if name in without:
                continue
            try:
                provider = open_provider(name, access_of(ledger, access))
            except ProvisioningError as error:
                found.failures[name] = error
                continue
            found[name] = Renter(
                ledger=ledger, provider=provider, public_key="", say=say, patience=patience or Patience()
            )
        yield found
    finally:
        for renter in found.values():
            await renter.close()
            await renter.provider.close()


async def extend(
    ledger: Ledger, access: Access, names: Sequence[str], hours: float, say: Say
) -> dict[str, ProvisioningError]:
    """Let pods live longer: first the provider, then the ledger, so that a pod that failed can be extended again.

    What went wrong, by pod. Raises UserError where one has no end, before any is changed.
    """
    rows = checked_names(ledger, names)
    failures: dict[str, ProvisioningError] = {}
    for row in rows:
        if row.ends_at is None:
            raise UserError(f"{row.name} has no end that could be put off.")
    async with renters(ledger, access, say) as by_provider:
        for row in rows:
            assert row.ends_at is not None
            ends_at = row.ends_at + hours * 3600
            try:
                await by_provider[row.provider].hold_to_end(replace(row, ends_at=ends_at))
            except ProvisioningError as error:
                failures[row.name] = error
                continue
            ledger.advance(row, row.state, ends_at=ends_at)
            say(row.name, f"lives {hours:g} h longer")
    return failures


async def down(
    ledger: Ledger, access: Access, names: Sequence[str], say: Say, patience: Patience | None = None
) -> dict[str, ProvisioningError]:
    """Give pods back, those that no row knows of included; what could not be, by pod."""
    failures: dict[str, ProvisioningError] = {}
    async with renters(ledger, access, say, patience) as by_provider:
        await asyncio.gather(*(_write_down_strays(renter, say) for renter in by_provider.values()))
        rows = checked_names(ledger, names)
        for name, error in by_provider.failures.items():
            say(name, f"cannot be asked whether a pod of ours is there: {error}")

        async def one(row: Row) -> None:
            try:
                await by_provider[row.provider].give_back(row)
            except ProvisioningError as error:
                failures[row.name] = error

        await asyncio.gather(*(one(row) for row in rows))
    return failures


def forget(ledger: Ledger, rows: Sequence[Row]) -> None:
    """Take the word of a person that these pods are gone."""
    for row in rows:
        if row.state != State.PLANNED:
            row = ledger.advance(row, State.DELETING)
        ledger.forget(row, now=time.time())


async def _write_down_strays(renter: Renter, say: Say) -> None:
    try:
        await renter.write_down_strays()
    except ProvisioningError as error:
        # Known pods are given back by their ids all the same.
        say(renter.provider.name, f"does not say what is there: {error}")


async def reconcile(
    ledger: Ledger,
    access: Access,
    providers: Sequence[str],
    say: Say,
    patience: Patience | None = None,
    *,
    without: Sequence[str] = (),
) -> dict[str, ProvisioningError]:
    """Make the ledger true and end orphans, at all providers that were ever used and at these; what was not done, by
    pod, machine or provider.
    """
    async with renters(ledger, access, say, patience, also=providers, without=without) as by_provider:
        failures = dict(by_provider.failures)
        for name, renter in by_provider.items():
            try:
                # Without a check of what renting needs: giving back needs neither money there nor programs here.
                failures |= await renter.settle()
            except ProvisioningError as error:
                failures[name] = error
    return failures


def is_to_be_watched(ledger: Ledger) -> bool:
    """Whether something has to be done about its pods at a time when nobody may type a command."""
    return any(row.ends_at is not None or row.is_in_doubt for row in ledger.rows())


async def watch(
    ledger: Ledger, access: Access, say: Say, *, interval_s: float, stop: Callable[[], bool] = lambda: False
) -> None:
    """Give back pods whose time is over, and those of orders in doubt, until there is nothing to be watched any more.

    Nobody is asked before a time is over, unless an order is in doubt.
    """
    while not stop() and is_to_be_watched(ledger):
        rows = ledger.rows()
        in_doubt = any(row.is_in_doubt for row in rows)
        left_s = min((row.ends_at for row in rows if row.ends_at is not None), default=math.inf) - time.time()
        if left_s > 0 and not in_doubt:
            # In short waits: ends are put off, and pods are added.
            await asyncio.sleep(min(left_s, interval_s))
        elif not await _settled(ledger, access, say) or in_doubt:
            await asyncio.sleep(interval_s)


async def _settled(ledger: Ledger, access: Access, say: Say) -> bool:
    try:
        with ledger.locked():
            failures = await reconcile(ledger, access, (), say)
    except Busy:
        # Whoever holds the lock sees to it.
        return False
    for name, error in failures.items():
        say(name, f"failed: {error}")
    return not failures
