"""What is asked about pods that are there, and what is done with them, whichever providers they are of."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from provisioning.errors import Busy, ProvisioningError, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row, State
from provisioning.providers.registry import Access
from provisioning.renting.renter import Renter
from provisioning.renting.renters import renters
from provisioning.renting.settler import Patience, Say

_HOME_BEFORE_END_S = 300.0
PYTHON, WANTED = "python", "wanted"
"""What is remembered of the last command that set pods up: their Python, and the swarm that is to be there."""


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
    ledger: Ledger,
    access: Access,
    names: Sequence[str],
    say: Say,
    patience: Patience | None = None,
    *,
    fetches: Sequence[str] | None = None,
    loses_results: bool = False,
) -> dict[str, ProvisioningError]:
    """Give pods back, those that no row knows of included; what could not be, by pod.

    `fetches`: as for a Renter. `loses_results`: also those whose results cannot be fetched.
    """
    failures: dict[str, ProvisioningError] = {}
    async with renters(ledger, access, say, patience, fetches=fetches) as by_provider:
        await asyncio.gather(*(_looked(renter, say) for renter in by_provider.values()))
        rows = checked_names(ledger, names)
        for name, error in by_provider.failures.items():
            say(name, f"cannot be asked whether a pod of ours is there: {error}")

        async def one(row: Row) -> None:
            try:
                await by_provider.of(row).give_back(row, loses_results=loses_results)
            except ProvisioningError as error:
                failures[row.name] = error

        await asyncio.gather(*(one(row) for row in rows))
    return failures


async def bring_home(
    ledger: Ledger, access: Access, names: Sequence[str], say: Say, fetches: Sequence[str] | None = None
) -> dict[str, ProvisioningError]:
    """Fetch what was made on pods, which stay; what could not be, by pod."""
    failures: dict[str, ProvisioningError] = {}
    rows = checked_names(ledger, names)
    async with renters(ledger, access, say, fetches=fetches) as by_provider:

        async def one(row: Row) -> None:
            try:
                await by_provider[row.provider].bring_home(row)
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


async def _looked(renter: Renter, say: Say) -> None:
    try:
        await renter.look()
    except ProvisioningError as error:
        # Known pods are given back by their ids all the same.
        say(renter.provider.name, f"does not say what is there: {error}")


async def reconcile(
    ledger: Ledger, access: Access, providers: Sequence[str], say: Say, patience: Patience | None = None
) -> dict[str, ProvisioningError]:
    """Make the ledger true and end orphans, at all providers that were ever used and at these; what was not done, by
    pod, machine or provider. Without a check of what renting needs: giving back needs neither money nor programs.
    """
    async with renters(ledger, access, say, patience, also=providers) as by_provider:
        settled = await by_provider.settle()
    return {name: error for failures in settled.values() for name, error in failures.items()}


def is_to_be_watched(ledger: Ledger) -> bool:
    """Whether something has to be done about its pods at a time when nobody may type a command."""
    rows = ledger.rows()
    return bool(ledger.recall(WANTED)) or any(row.ends_at is not None or row.is_in_doubt for row in rows)


@dataclass
class Overseer:
    """Gives back pods whose time is over, and those of orders in doubt, whenever it looks."""

    ledger: Ledger
    access: Access
    say: Say

    def __post_init__(self) -> None:
        self._at_home: set[str] = set()

    async def look(self, interval_s: float) -> float:
        """How long to wait until the next look: ends may be put off, so no longer than this interval.

        Nobody is asked before a time is over, unless an order is in doubt; but what was made on pods is fetched
        shortly before, since some providers take them back to the minute.
        """
        rows, now = self.ledger.rows(), time.time()
        in_doubt = any(row.is_in_doubt for row in rows)
        left_s = min((row.ends_at for row in rows if row.ends_at is not None), default=math.inf) - now
        if left_s > 0 and not in_doubt:
            ending = [row for row in rows if (row.ends_at or math.inf) - now <= _HOME_BEFORE_END_S]
            await self._bring_home([row for row in ending if row.label not in self._at_home])
            return min(left_s if ending else left_s - _HOME_BEFORE_END_S, interval_s)
        return interval_s if not await self._settled() or in_doubt else 0.0

    async def _bring_home(self, rows: Sequence[Row]) -> None:
        if rows:
            self._at_home |= {row.label for row in rows}
            await bring_home(self.ledger, self.access, [row.name for row in rows], self.say)

    async def _settled(self) -> bool:
        try:
            with self.ledger.locked():
                failures = await reconcile(self.ledger, self.access, (), self.say)
        except Busy:
            # Whoever holds the lock sees to it.
            return False
        for name, error in failures.items():
            self.say(name, f"failed: {error}")
        return not failures
