"""All pods of one ledger, at all providers: planned, rented, set up, extended, and given back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from provisioning.errors import NoCapacity, ProviderError, ProvisioningError, UserError
from provisioning.ledger.keys import BOOT_S, INVENTORY, PYTHON
from provisioning.ledger.ledger import Ledger
from provisioning.machines import jobs
from provisioning.machines.setup import Setup, make_environment, send
from provisioning.pods.pod import Offer, PodSpec, Row, State, providers_of
from provisioning.providers.backoff import repeated
from provisioning.providers.cloud import Cloud
from provisioning.providers.protocol import Provider
from provisioning.providers.registry import Access, open_provider
from provisioning.renting.each import Failures, each, gathered
from provisioning.renting.plan import Plan, candidates, plan
from provisioning.renting.reconcile import record_strays, settle
from provisioning.renting.renter import MAX_TRANSFERS, Patience, Renter, Say

_MAX_OFFERS = 4


class Renters(dict[str, Renter]):
    """Renters by the name of their provider. For a provider that could not be opened, a lookup raises the reason."""

    def __init__(self, ledger: Ledger, say: Say, opened: Sequence[Renter] = ()) -> None:
        super().__init__((renter.provider.name, renter) for renter in opened)
        self.ledger, self.say = ledger, say
        self.failures: Failures = {}
        self.set_up_here: set[str] = set()
        """Labels of the pods that were set up through this object."""

    def __missing__(self, name: str) -> Renter:
        raise self.failures.get(name) or UserError(f"No provider {name} is open.")

    async def close(self) -> None:
        for renter in self.values():
            await renter.close()

    @property
    def rows(self) -> list[Row]:
        return self.ledger.rows()

    def leave_booting(self) -> None:
        """Have `apply` no longer wait for pods that boot. They count as failed, but stay."""
        for renter in self.values():
            renter.has_other_work = True

    async def settle(self) -> dict[str, Failures]:
        """Make the ledger and all providers agree. Returns the errors by provider, then by pod or machine."""

        async def one(renter: Renter) -> Failures:
            try:
                return await settle(renter)
            except ProvisioningError as error:
                return {renter.provider.name: error}

        settled = await gathered(one(renter) for renter in self.values())
        return {name: {name: error} for name, error in self.failures.items()} | dict(
            zip(self, settled, strict=True)
        )

    async def plan(self, specs: Sequence[PodSpec]) -> Plan:
        """The plan for these pods, after `settle`. Raises UserError if a provider does not support what is requested.

        A cloud whose check fails is left out where a spec also allows another provider.
        """
        names = providers_of(specs)
        asked = [self[name] for name in names]
        for spec in specs:
            for wish in (field for field in ("image", "volume_id") if getattr(spec, field) is not None):
                if lacking := [name for name in spec.providers if wish not in self[name].provider.takes]:
                    raise UserError(f"{lacking[0]} takes no --{wish.replace('_', '-')}; leave it out.")
        unfit = await each(
            asked,
            lambda renter: repeated(renter.provider.check, tell=renter.tell),
            name=lambda renter: renter.provider.name,
        )
        for name, error in unfit.items():
            self.say(name, f"offers nothing now: {error}")
        unsafe = await self._unsafe(unfit)
        # Only the user can correct own machines; renting others in their place would cost money.
        unsafe |= {name: unfit[name] for name in unfit if not isinstance(self[name].provider, Cloud)}
        barred = {
            spec.name: unfit[spec.providers[0]] for spec in specs if unfit.keys() >= set(spec.providers)
        }
        barred |= {spec.name: unsafe[name] for spec in specs for name in spec.providers if name in unsafe}
        try:
            fit = [renter.provider for renter in asked if renter.provider.name not in unfit]
            offers = await offers_of(fit, self.say)
        except ProvisioningError as error:
            offers, barred = [], {spec.name: error for spec in specs} | barred
        return plan(specs, self.rows, offers, barred)

    async def _unsafe(self, unfit: Failures) -> Failures:
        """Settle. Returns why nothing must be rented at a provider, by its name: it may have pods of earlier orders."""
        settled = await self.settle()
        # An order that is not repeatable must not be sent again before its pod has been looked for everywhere.
        repeat = {name for name, renter in self.items() if renter.provider.repeatable}
        in_doubt = {row.provider for row in self.rows if row.is_in_doubt} - repeat
        unsafe: Failures = {}
        for provider, failures in settled.items():
            for name, error in failures.items():
                # In all other cases a pod or machine that does not answer does not hold up the others.
                if provider in in_doubt or (provider == name and provider not in unfit):
                    unsafe[provider] = ProviderError(f"{name}: {error}")
                self.say(provider, f"cannot be searched for pods that the state file lacks: {name}: {error}")
        return unsafe

    async def apply(self, agreed: Plan, watch: Callable[[], None] = lambda: None) -> Failures:
        """Carry out a plan: give back pods, then rent pods in parallel until all answer.

        Returns the errors by pod, also of pods that the plan lacks.

        `watch` starts a watcher if the ledger needs one: it is called after all orders are in the ledger, before the
        first is sent, and again at the end, since the answer to an order may be lost, and a deletion may fail.
        """
        failures = await self.give_back([removal.row for removal in agreed.destroy], failed=self.say)
        new = [creation for creation in agreed.create if creation.spec.name not in failures]
        rows = [self.ledger.add(one.spec, one.offer, now=self[one.offer.provider].clock()) for one in new]
        taken = Counter(row.offer.key for row in rows)
        watch()
        try:
            failures |= await each(
                [*rows, *agreed.keep], lambda row: self._until_reachable(row, agreed.offers, taken), self.say
            )
            if failures or taken.total() > len(rows):
                # An order that failed may have made a pod nevertheless, or its pod may have appeared since.
                settled = await self.settle()
                for name in {row.provider for row in self.rows}:
                    failures = settled.get(name, {}) | failures
            return {**agreed.lacking, **failures}
        finally:
            watch()

    async def set_up(
        self, setup: Setup, failures: Failures, *, again: bool = False, with_environment: bool = True
    ) -> Failures:
        """Send code and make the environment on pods that lack them; `again`: on all where no job runs.

        Skips the pods in `failures`. Returns these and the new errors by pod.
        """

        async def one(row: Row) -> None:
            machine = await self[row.provider].machine(row)
            if row.state == State.SYNCED and await jobs.any_runs(machine, row.label):
                return
            await self.set_up_one(row, setup, with_environment=with_environment)
            self.ledger.advance(row, State.SYNCED)

        states = {State.REACHABLE, State.SYNCED} if again else {State.REACHABLE}
        rows = [row for row in self.rows if row.state in states and row.name not in failures]
        return failures | await each(rows, one, self.say)

    async def set_up_one(self, row: Row, setup: Setup, *, with_environment: bool = True) -> None:
        """Send code and make the environment on this pod. May be repeated. Raises MachineError or UserError."""
        renter = self[row.provider]
        machine = await renter.machine(row)
        self.say(row.name, "sending code, making its environment")
        num_gpus = None if row.offer.is_cpu else row.offer.gpu_count
        async with renter.transfers:
            await send(machine, row.label, setup, num_gpus=num_gpus)
        if with_environment:
            await make_environment(machine, row.label, setup, num_gpus=num_gpus)
        self.set_up_here.add(row.label)

    def completed(self, setup: Setup, specs: Sequence[PodSpec]) -> Setup:
        """The set-up for these pods: with their providers' Python, and with the extras that all peers need."""
        pythons = {self[name].provider.python() for name in providers_of(specs)}
        wandb = ["wandb"] if "WANDB_API_KEY" in (setup.secrets or {}) else []
        setup = replace(
            setup,
            # If providers have different Pythons, each pod gets its own environment.
            python=setup.python or (pythons.pop() if len(pythons) == 1 else None),
            extras=list(dict.fromkeys(["data", *setup.extras, *wandb])),
        )
        self.ledger.remember(PYTHON, setup.python or "")
        return setup

    async def extend(self, rows: Sequence[Row], hours: float) -> Failures:
        """Extend rentals: at the provider first, then in the ledger, so that a failed extension can be repeated.

        Needs no lock: the pods may be used, or others replaced, meanwhile.
        """

        async def one(row: Row) -> None:
            if row.ends_at is None:
                raise UserError(f"{row.name} has no rental end that could be extended.")
            extra_s, renter = hours * 3600, self[row.provider]

            async def schedule(ends_at: float) -> None:
                current = self.ledger.current(row)
                # As long as there is no pod, the command that orders it will schedule the end in the ledger.
                if renter.provider.keeps_time and current is not None and current.provider_id is not None:
                    await renter.schedule_end(replace(current, ends_at=ends_at), await renter.pod_of(current))

            await schedule(row.ends_at + extra_s)
            # Again: another command may have extended it, or scheduled the end that it had before.
            await schedule(self.ledger.extend(row, extra_s))
            self.say(row.name, f"lives {hours:g} h longer")

        return await each(rows, one)

    async def fetch_results(self, rows: Sequence[Row]) -> Failures:
        """Fetch the results of pods, which are kept. Returns the errors by pod."""
        return await each(rows, lambda row: self[row.provider].fetch_results(row))

    async def down(self, names: Sequence[str], *, discard_results: bool = False) -> Failures:
        """Give back the pods of these names, or all, and all strays. Returns the errors by pod."""
        known = {row.label for row in self.rows}
        unseen = await each(self.values(), record_strays, name=lambda one: one.provider.name)
        # The pods of the ledger are given back anyway, by their ids.
        for name, error in (unseen | self.failures).items():
            self.say(name, f"cannot be searched for pods that the state file lacks: {error}")
        rows = self.ledger.named(names)
        rows += [row for row in self.rows if row.label not in known and row not in rows]
        return await self.give_back(rows, discard_results=discard_results)

    async def give_back(
        self,
        rows: Sequence[Row],
        *,
        discard_results: bool = False,
        fetched: bool = False,
        failed: Say = lambda name, text: None,
    ) -> Failures:
        """Give back these pods. Returns the errors by pod.

        `discard_results`: also those whose results cannot be fetched. `fetched`: their results are here already.
        """

        async def one(row: Row) -> None:
            renter = self[row.provider]
            if await renter.give_back(row, discard_results=discard_results, fetched=fetched):
                return
            failures = await settle(renter)
            if self.ledger.current(row) is not None:
                raise failures.get(row.name) or ProviderError(
                    f"IT IS NOT KNOWN YET WHETHER THE ORDER {row.label} MADE A POD AT {row.provider.upper()} THAT "
                    "COSTS MONEY: its answer was lost, and no list has shown one. `diloco pods reconcile` looks again, "
                    "and gives it back if it comes."
                )

        return await each(rows, one, failed)

    async def _until_reachable(self, row: Row, offers: Sequence[Offer], taken: Counter[str]) -> None:
        """Try offers until a pod answers. `taken` counts the uses of each offer. Raises the last failure."""
        spec = row.spec
        limit = spec.price_limit(row.offer.price_per_hour)
        tried, refusing = set[str](), set[str]()
        while True:
            tried.add(row.offer.key)
            # A concurrent `settle` may have found the pod, or that there is none.
            current = self.ledger.current(row)
            if current is None:
                raise ProviderError(f"{row.name} does not exist any more; the same command rents it again")
            try:
                await self[current.provider].until_reachable(current)
                return
            except ProvisioningError as error:
                if not isinstance(error, NoCapacity):
                    if self.ledger.current(row) is not None:
                        raise
                    # The order was refused, and the provider would refuse its other offers, too.
                    refusing.add(current.provider)
                failure = error
            current = self.ledger.current(row)
            if current and current.ends_at and row.ends_at and spec.ttl_hours is not None:
                # Its rental may have been extended meanwhile, which holds for the next offer, too.
                extra_s = max(current.ends_at - row.ends_at, 0.0)
                spec = replace(spec, ttl_hours=spec.ttl_hours + extra_s / 3600)
            if current and not current.is_in_doubt:
                await self[current.provider].give_back(current)
            if len(tried) == _MAX_OFFERS:
                raise NoCapacity(f"{_MAX_OFFERS} offers failed in turn, the last one: {failure}")
            left = [
                offer
                for offer in candidates(spec, offers, without=tried)
                if offer.provider not in refusing
                and offer.price_per_hour <= limit
                and taken[offer.key] < offer.num_available
            ]
            if not left:
                if refusing.issuperset(spec.providers):
                    raise failure
                raise NoCapacity(f"{failure}; no other offer fits")
            self.say(
                row.name, f"{failure}; the next offer is {left[0].key} for {left[0].price_per_hour:.2f} $/h"
            )
            taken[left[0].key] += 1
            row = self.ledger.add(spec, left[0], now=self[left[0].provider].clock())


async def offers_of(providers: Sequence[Provider], say: Say) -> list[Offer]:
    """All offers of these providers. Raises ProvisioningError only if all of them fail."""
    found: list[Offer] = []
    failures: list[ProvisioningError] = []

    async def ask(provider: Provider) -> None:
        tell = functools.partial(say, provider.name)
        try:
            found.extend(await repeated(provider.offers, tell=tell))
        except ProvisioningError as error:
            failures.append(error)
            tell(f"offers nothing now: {error}")

    await gathered(ask(provider) for provider in providers)
    if failures and len(failures) == len(providers):
        raise failures[0]
    return found


@contextlib.asynccontextmanager
async def renters(
    ledger: Ledger,
    access: Access,
    say: Say,
    patience: Patience | None = None,
    *,
    to_rent: Sequence[PodSpec] = (),
    fetches: Sequence[str] | None = None,
) -> AsyncIterator[Renters]:
    """Renters for all providers that were ever used, and those of `to_rent`.

    Raises UserError if one of `to_rent` cannot be opened; errors of others are in `Renters.failures`. `patience` None:
    a pod may take as long to boot as when pods were last rented. `fetches`: see Renter.
    """
    found, remembered = Renters(ledger, say), ledger.recall(INVENTORY)
    patience = patience or Patience(boot_s=float(ledger.recall(BOOT_S) or Patience.boot_s))
    transfers = asyncio.Semaphore(MAX_TRANSFERS)
    needed = providers_of(to_rent)
    if remembered and not access.inventory:
        # The inventory with which the pods were rented.
        access = replace(access, inventory=Path(remembered))
    try:
        for name in dict.fromkeys([*needed, *ledger.providers()]):
            try:
                provider = open_provider(name, access)
            except ProvisioningError as error:
                if name in needed:
                    raise
                found.failures[name] = error
                continue
            found[name] = Renter(
                ledger=ledger,
                provider=provider,
                say=say,
                patience=patience,
                fetches=fetches,
                transfers=transfers,
            )
        if to_rent and access.inventory:
            ledger.remember(INVENTORY, str(access.inventory))
        yield found
    finally:
        await asyncio.shield(found.close())
