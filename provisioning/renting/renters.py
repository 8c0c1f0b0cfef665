"""Renting and giving back at all providers of one ledger."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from provisioning.errors import NoCapacity, ProviderError, ProvisioningError, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row
from provisioning.pods.pod import Offer
from provisioning.pods.spec import PodSpec, providers_of
from provisioning.providers.backoff import repeated
from provisioning.providers.registry import Access, open_provider
from provisioning.renting.account import Patience, Say
from provisioning.renting.each import Failures, each, gathered
from provisioning.renting.plan import Plan, candidates, plan
from provisioning.renting.renter import Renter

INVENTORY = "inventory"
"""Key in the ledger: the inventory of the last command that used the user's own machines."""
_MAX_OFFERS = 4
# Without a price limit, a replacement offer may cost up to this multiple of the confirmed price.
MAX_PRICE_RATIO = 1.5


class Renters(dict[str, Renter]):
    """Renters by the name of their provider. For a provider that could not be opened, a lookup raises the reason."""

    def __init__(self, ledger: Ledger, say: Say, opened: Sequence[Renter] = ()) -> None:
        super().__init__((renter.provider.name, renter) for renter in opened)
        self.ledger, self.say = ledger, say
        self.failures: Failures = {}

    def __missing__(self, name: str) -> Renter:
        raise self.failures.get(name) or UserError(f"No provider {name} is open.")

    async def close(self) -> None:
        for renter in self.values():
            await renter.close()

    @property
    def rows(self) -> list[Row]:
        return self.ledger.rows()

    async def settle(self) -> dict[str, Failures]:
        """Make the ledger and all providers agree. Returns the errors by provider, then by pod or machine."""

        async def one(renter: Renter) -> Failures:
            try:
                return await renter.settle()
            except ProvisioningError as error:
                return {renter.provider.name: error}

        settled = await gathered(one(renter) for renter in self.values())
        return {name: {name: error} for name, error in self.failures.items()} | dict(
            zip(self, settled, strict=True)
        )

    async def plan(self, specs: Sequence[PodSpec]) -> Plan:
        """The plan for these pods, after `settle`. Raises ProvisioningError."""
        names = providers_of(specs)
        asked = [self[name] for name in names]
        for spec in specs:
            for wish in (field for field in ("image", "volume_id") if getattr(spec, field) is not None):
                if lacking := [name for name in spec.providers if wish not in self[name].provider.takes]:
                    raise UserError(f"{lacking[0]} takes no --{wish.replace('_', '-')}; leave it out.")
        for renter in asked:
            await repeated(renter.provider.check, tell=renter.tell)
        settled = await self.settle()
        # Such an order must not be sent again before its pod has been looked for everywhere.
        in_doubt = {row.provider for row in self.rows if row.is_in_doubt and not _is_repeatable(self, row)}
        for provider, failures in settled.items():
            for name, error in failures.items():
                # Otherwise a known pod or machine that is silent holds up no other one.
                if provider in names and (provider == name or provider in in_doubt):
                    raise ProviderError(f"{name}: {error}. Nothing was rented.")
                self.say(provider, f"cannot be asked for further pods: {name}: {error}")
        return plan(specs, self.rows, await _offers(asked))

    async def apply(self, agreed: Plan, watch: Callable[[], None] = lambda: None) -> Failures:
        """Carry out a plan: give back pods, then rent pods in parallel until all answer. Returns the errors by pod.

        `watch` starts a watcher if the ledger needs one: it is called after all orders are in the ledger, before the
        first is sent, and again if the answer to one was lost, however this ends.
        """
        failures = await self.give_back([removal.row for removal in agreed.destroy], failed=self.say)
        creations = [creation for creation in agreed.create if creation.spec.name not in failures]
        rows = [self._write_down(creation.spec, creation.offer) for creation in creations]
        taken = Counter(row.offer.key for row in rows)
        watch()
        try:
            failures |= await each(
                [*rows, *agreed.keep], lambda row: self._until_reachable(row, agreed.offers, taken), self.say
            )
            if failures or taken.total() > len(rows):
                # An order that failed may have made a pod nevertheless, or its pod may have appeared since.
                for name in {row.provider for row in self.rows}:
                    failures = await self[name].settle() | failures
            return failures
        finally:
            if any(row.is_in_doubt for row in self.rows):
                watch()

    async def give_back(
        self,
        rows: Sequence[Row] | None = None,
        *,
        discard_results: bool = False,
        failed: Say = lambda name, text: None,
    ) -> Failures:
        """Give back these pods, or all if `rows` is None. Returns the errors by pod."""
        return await each(
            self.rows if rows is None else rows,
            lambda row: self[row.provider].give_back(row, discard_results=discard_results),
            failed,
        )

    def _write_down(self, spec: PodSpec, offer: Offer) -> Row:
        now = self[offer.provider].clock()
        ends_at = now + spec.ttl_hours * 3600 if spec.ttl_hours is not None else None
        return self.ledger.add(spec, offer, now=now, ends_at=ends_at)

    async def _until_reachable(self, row: Row, offers: Sequence[Offer], taken: Counter[str]) -> None:
        """Try offers until a pod answers. `taken` counts the uses of each offer. Raises the last failure."""
        spec = row.spec
        limit = spec.max_price if spec.max_price is not None else row.offer.price_per_hour * MAX_PRICE_RATIO
        tried: set[str] = set()
        while True:
            tried.add(row.offer.key)
            # A concurrent `settle` may have found the pod, or that there is none.
            current = self.ledger.current(row)
            if current is None:
                raise ProviderError(f"{row.name} does not exist any more; the same command rents it again")
            try:
                await self[current.provider].until_reachable(current)
                return
            except NoCapacity as error:
                reason = str(error)
            current = self.ledger.current(row)
            if current and not current.is_in_doubt:
                await self[current.provider].give_back(current)
            if len(tried) == _MAX_OFFERS:
                raise NoCapacity(f"{_MAX_OFFERS} offers failed in turn, the last one because {reason}")
            left = [
                offer
                for offer in candidates(spec, offers, without=tried)
                if offer.price_per_hour <= limit and taken[offer.key] < offer.num_available
            ]
            if not left:
                raise NoCapacity(f"{reason}; no other offer fits")
            self.say(
                row.name, f"{reason}; the next offer is {left[0].key} for {left[0].price_per_hour:.2f} $/h"
            )
            taken[left[0].key] += 1
            row = self._write_down(spec, left[0])


def _is_repeatable(found: Mapping[str, Renter], row: Row) -> bool:
    renter = found.get(row.provider)
    return renter is not None and renter.provider.repeatable


async def _offers(asked: Sequence[Renter]) -> list[Offer]:
    """The offers of these providers. Raises ProviderError only if all of them fail."""
    found: list[Offer] = []
    failures: list[ProviderError] = []

    async def ask(renter: Renter) -> None:
        try:
            found.extend(await repeated(renter.provider.offers, tell=renter.tell))
        except ProviderError as error:
            failures.append(error)
            renter.tell(f"offers nothing now: {error}")

    await gathered(ask(renter) for renter in asked)
    if failures and len(failures) == len(asked):
        raise failures[0]
    return found


@contextlib.asynccontextmanager
async def renters(
    ledger: Ledger,
    access: Access,
    say: Say,
    patience: Patience | None = None,
    *,
    also: Collection[str] = (),
    to_rent: Collection[str] = (),
    fetches: Sequence[str] | None = None,
) -> AsyncIterator[Renters]:
    """Renters for all providers that were ever used, those in `also`, and those in `to_rent`.

    Raises UserError if one of `to_rent` cannot be opened; others that cannot are in `Renters.failures`. `fetches`: see
    Account.
    """
    found, remembered = Renters(ledger, say), ledger.recall(INVENTORY)
    if remembered and not access.inventory:
        # The inventory with which the pods were rented.
        access = replace(access, inventory=Path(remembered))
    try:
        for name in dict.fromkeys([*to_rent, *ledger.providers(), *also]):
            try:
                provider = open_provider(name, access)
            except ProvisioningError as error:
                if name in to_rent:
                    raise
                found.failures[name] = error
                continue
            found[name] = Renter(
                ledger=ledger,
                provider=provider,
                say=say,
                patience=patience or Patience(),
                fetches=fetches,
            )
        yield found
    finally:
        await asyncio.shield(found.close())
