"""All providers of one ledger at once: orders spread over them, and from one offer to the next, wherever that is."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from provisioning.errors import NoCapacity, ProviderError, ProvisioningError, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row
from provisioning.machines.machine import Machine
from provisioning.pods.choice import candidates
from provisioning.pods.pod import Offer, Pod, PodSpec
from provisioning.providers.backoff import repeated
from provisioning.providers.registry import Access, open_provider
from provisioning.renting.each import Failures, each, gathered
from provisioning.renting.plan import Plan
from provisioning.renting.renter import Renter
from provisioning.renting.settler import Patience, Say

INVENTORY = "inventory"
"""What is remembered of the last command that set pods up on machines of one's own."""
_MAX_OFFERS = 4
# Without a price limit, the next offer may cost so many times what was confirmed.
DEARER = 1.5


class Renters(dict[str, Renter]):
    """By the name of their provider. Asking for one that could not be opened raises what was wrong with it."""

    def __init__(self, ledger: Ledger, say: Say, clock: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.ledger, self.say, self._clock = ledger, say, clock
        self.failures: Failures = {}
        self.on_planned: Callable[[], None] = lambda: None
        """All that is to be ordered is written down, and nothing has been ordered yet."""
        self._taken: Counter[str] = Counter()

    @classmethod
    def only(cls, renter: Renter) -> Renters:
        """Of one provider."""
        found = cls(renter.ledger, renter.say, renter.clock)
        found[renter.provider.name] = renter
        return found

    def __missing__(self, name: str) -> Renter:
        raise self.failures.get(name) or UserError(f"No provider {name} is open.")

    async def close(self) -> None:
        for renter in self.values():
            await renter.close()
            await renter.provider.close()

    @property
    def rows(self) -> list[Row]:
        return self.ledger.rows()

    def of(self, row: Row) -> Renter:
        """Raises ProvisioningError where its provider cannot be opened."""
        return self[row.provider]

    async def machine(self, name: str) -> Machine:
        """As Renter.machine."""
        row = self._row(name)
        return await self.of(row).machine(row)

    async def pod(self, name: str) -> Pod:
        row = self._row(name)
        return await self.of(row).pod_of(row)

    async def offers(self, names: Collection[str]) -> list[Offer]:
        """Of these providers. One that cannot say hides no other. Raises ProviderError where none can."""
        found: list[Offer] = []
        failures: list[ProviderError] = []

        async def ask(renter: Renter) -> None:
            try:
                found.extend(await repeated(renter.provider.offers, tell=renter.tell))
            except ProviderError as error:
                failures.append(error)
                renter.tell(f"offers nothing now: {error}")

        await gathered(ask(self[name]) for name in names)
        if failures and len(failures) == len(names):
            raise failures[0]
        return found

    async def settle(self) -> dict[str, Failures]:
        """Make the ledger and all providers agree; what was not done, by provider, and there by pod or machine."""

        async def one(renter: Renter) -> Failures:
            try:
                return await renter.settle()
            except ProvisioningError as error:
                return {renter.provider.name: error}

        settled = await gathered(one(renter) for renter in self.values())
        return {name: {name: error} for name, error in self.failures.items()} | dict(
            zip(self, settled, strict=True)
        )

    async def apply(self, plan: Plan, offers: Sequence[Offer]) -> Failures:
        """Give back, then rent in parallel, until all answer. What went wrong, by pod; the others are not held up."""
        failures = await self.give_back([removal.row for removal in plan.destroy], failed=self.say)
        creations = [creation for creation in plan.create if creation.spec.name not in failures]
        for creation in creations:
            self._plan(creation.spec, creation.offer)
        self._taken.update(creation.offer.key for creation in creations)
        self.on_planned()
        specs = [*(creation.spec for creation in creations), *(row.spec for row in plan.keep)]
        failures |= await each(
            specs, lambda spec: spec.name, lambda spec: self._until_reachable(spec, offers), self.say
        )
        for renter in self.values():
            if renter.has_unclear:
                # A pod of an order that was given up may have come after all.
                failures = await renter.settle() | failures
        return failures

    async def give_back(
        self,
        rows: Sequence[Row] | None = None,
        *,
        loses_results: bool = False,
        failed: Say = lambda name, text: None,
    ) -> Failures:
        """These pods, or all; each as far as it goes, whatever becomes of the others."""

        async def one(row: Row) -> None:
            await self.of(row).give_back(row, loses_results=loses_results)

        return await each(self.rows if rows is None else rows, lambda row: row.name, one, failed)

    def _plan(self, spec: PodSpec, offer: Offer) -> Row:
        now = self._clock()
        ends_at = now + spec.ttl_hours * 3600 if spec.ttl_hours is not None else None
        return self.ledger.plan(spec, offer, now=now, ends_at=ends_at)

    async def _until_reachable(self, spec: PodSpec, offers: Sequence[Offer]) -> None:
        """Try offers until one of them answers. Raises the last reason."""
        confirmed = self._row(spec.name).offer.price_per_hour
        tried: set[str] = set()
        for _ in range(_MAX_OFFERS):
            row = self._row(spec.name)
            tried.add(row.offer.key)
            try:
                await self.of(row).until_reachable(row)
                return
            except NoCapacity as error:
                reason = str(error)
            current = self.ledger.row(spec.name)
            if current and not current.is_in_doubt:
                await self.of(current).give_back(current)
            limit = spec.max_price if spec.max_price is not None else confirmed * DEARER
            left = [
                offer
                for offer in candidates(spec, offers, without=tried)
                if offer.price_per_hour <= limit and self._taken[offer.key] < offer.num_available
            ]
            if not left:
                raise NoCapacity(f"{reason}; no other offer fits")
            self.say(
                spec.name, f"{reason}; the next offer is {left[0].key} for {left[0].price_per_hour:.2f} $/h"
            )
            self._taken[left[0].key] += 1
            self._plan(spec, left[0])
        raise NoCapacity(f"{_MAX_OFFERS} offers in turn came to nothing, the last one because {reason}")

    def _row(self, name: str) -> Row:
        row = self.ledger.row(name)
        if row is None:
            raise UserError(f"There is no pod {name}; `diloco pods status` lists them.")
        return row


def access_of(ledger: Ledger, access: Access) -> Access:
    """The same, with what the pods of this ledger were rented with."""
    remembered = ledger.recall(INVENTORY)
    return access if access.inventory or not remembered else replace(access, inventory=Path(remembered))


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
    """One for each provider that was ever used, those in `also`, and those in `to_rent`, which have to be usable.

    Raises UserError. `fetches`: as for a Renter.
    """
    found, access = Renters(ledger, say), access_of(ledger, access)
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
