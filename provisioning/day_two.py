"""What is asked about pods that are there, and what is done with them, whichever providers they are of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from provisioning.errors import Busy, ProvisioningError, UserError
from provisioning.ledger import Ledger, Row
from provisioning.peer_looks import look_at_peer
from provisioning.providers.registry import Access, open_provider
from provisioning.renting import Patience, Renter, Say
from provisioning.states import State

_LOOK_TIMEOUT_S = 20.0
INVENTORY = "inventory"


@dataclass(frozen=True)
class Status:
    """One pod, as far as it can be said now."""

    row: Row
    is_listed: bool | None
    """None: its provider does not answer."""
    peer: str
    """What its peer does, in words."""
    epoch: int | None = None
    step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "state": str(self.row.state),
            "provider": self.row.provider,
            "provider_id": self.row.provider_id,
            "gpu_type": self.row.offer.gpu_type,
            "gpu_count": self.row.offer.gpu_count,
            "price_per_hour": self.row.offer.price_per_hour,
            "ends_at": self.row.ends_at,
            "is_listed": self.is_listed,
            "peer": self.peer,
            "epoch": self.epoch,
            "step": self.step,
        }


def access_of(ledger: Ledger, access: Access) -> Access:
    """The same, with what the pods of this ledger were rented with."""
    remembered = ledger.recall(INVENTORY)
    return access if access.inventory or not remembered else replace(access, inventory=Path(remembered))


def checked_names(ledger: Ledger, names: Sequence[str]) -> list[Row]:
    """The rows of these names, or all. Raises UserError for one that is not there."""
    rows = {row.name: row for row in ledger.rows()}
    for name in names:
        if name not in rows:
            known = ", ".join(rows) or "none"
            raise UserError(f"There is no pod {name} in {ledger.path}; there is {known}.")
    return [rows[name] for name in names] if names else list(rows.values())


@contextlib.asynccontextmanager
async def renters(
    ledger: Ledger, access: Access, say: Say, patience: Patience | None = None, **more: Any
) -> AsyncIterator[dict[str, Renter]]:
    """One for each provider that has rows, by its name."""
    found: dict[str, Renter] = {}
    try:
        for name in dict.fromkeys(row.provider for row in ledger.rows()):
            provider = open_provider(name, access_of(ledger, access))
            found[name] = Renter(
                ledger=ledger,
                provider=provider,
                public_key="",
                say=say,
                patience=patience or Patience(),
                **more,
            )
        yield found
    finally:
        for renter in found.values():
            await renter.close()
            await renter.provider.close()


async def statuses(ledger: Ledger, access: Access) -> list[Status]:
    """Of all pods; a provider or pod that does not answer hides no other."""

    async def look(renter: Renter, row: Row) -> Status:
        try:
            listed = await asyncio.wait_for(renter.listed(), _LOOK_TIMEOUT_S)
        except (ProvisioningError, TimeoutError) as error:
            return Status(row, None, f"unknown: {str(error) or 'no answer in time'}")
        if not any(row.is_pod(pod) for pod in listed):
            return Status(row, False, "–" if row.state == State.PLANNED else "not listed by the provider")
        if row.state not in (State.REACHABLE, State.SYNCED, State.RUNNING):
            return Status(row, True, "–")
        try:
            machine = await asyncio.wait_for(renter.machine(row.name), _LOOK_TIMEOUT_S)
            peer = await asyncio.wait_for(look_at_peer(machine, row.label), _LOOK_TIMEOUT_S)
        except (ProvisioningError, TimeoutError) as error:
            return Status(row, True, f"unknown: {str(error) or 'no answer in time'}")
        if peer.job.is_running:
            words = "trains" if peer.epoch or peer.step else "starts"
        elif peer.job.code is not None:
            words = "finished" if peer.has_finished else f"ended with {peer.job.code}: {peer.last_lines}"
        else:
            words = "does not run" if row.state == State.RUNNING else "–"
        return Status(row, True, words, peer.epoch, peer.step)

    async with renters(ledger, access, lambda name, text: None) as by_provider:
        return list(await asyncio.gather(*(look(by_provider[row.provider], row) for row in ledger.rows())))


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
            ledger.advance(row.name, row.state, ends_at=ends_at)
            say(row.name, f"lives {hours:g} h longer")
    return failures


async def down(
    ledger: Ledger,
    access: Access,
    names: Sequence[str],
    say: Say,
    patience: Patience | None = None,
    **more: Any,
) -> dict[str, ProvisioningError]:
    """Give pods back; what could not be, by pod."""
    rows = checked_names(ledger, names)
    failures: dict[str, ProvisioningError] = {}
    async with renters(ledger, access, say, patience, **more) as by_provider:

        async def one(row: Row) -> None:
            try:
                await by_provider[row.provider].give_back(row)
            except ProvisioningError as error:
                failures[row.name] = error

        await asyncio.gather(*(one(row) for row in rows))
    return failures


async def reconcile(
    ledger: Ledger, access: Access, providers: Sequence[str], say: Say, patience: Patience | None = None
) -> dict[str, ProvisioningError]:
    """Make the ledger true and end orphans, at these providers beside those that have rows; failures by provider."""
    failures: dict[str, ProvisioningError] = {}
    for name in dict.fromkeys([*(row.provider for row in ledger.rows()), *providers]):
        provider = open_provider(name, access_of(ledger, access))
        renter = Renter(
            ledger=ledger, provider=provider, public_key="", say=say, patience=patience or Patience()
        )
        try:
            # Without a check of what renting needs: giving back needs neither money there nor programs here.
            await renter.settle()
        except ProvisioningError as error:
            failures[name] = error
        finally:
            await renter.close()
            await provider.close()
    return failures


async def watch(
    ledger: Ledger, access: Access, say: Say, *, interval_s: float, stop: Callable[[], bool] = lambda: False
) -> None:
    """Give back pods whose time is over, until none has an end any more. Nobody is asked before a time is over."""
    while not stop():
        ends = [row.ends_at for row in ledger.rows() if row.ends_at is not None]
        if not ends:
            return
        left_s = min(ends) - time.time()
        if left_s > 0:
            # In short waits: ends are put off, and pods are added.
            await asyncio.sleep(min(left_s, interval_s))
        elif not await _settled(ledger, access, say):
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
