"""The whole way: settle what a crash left, rent, set up, start a swarm; and back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from provisioning import jobs
from provisioning.backoff import repeated
from provisioning.errors import ProviderError, ProvisioningError, UserError
from provisioning.keys import public_key
from provisioning.ledger import Ledger, Row
from provisioning.operations import INVENTORY, PYTHON, access_of, reconcile
from provisioning.plan import Plan, plan
from provisioning.pod_paths import VENV
from provisioning.pods import Offer, PodSpec
from provisioning.providers.registry import Access, needs_key, open_provider
from provisioning.renting import Renter
from provisioning.settling import Patience, Say, gathered
from provisioning.setup import Progress, Setup, secrets_of, set_up, source_directory
from provisioning.states import State
from provisioning.swarm import Swarm, SwarmOptions


@dataclass
class Outcome:
    """What became of each pod."""

    failures: dict[str, ProvisioningError] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.failures


@dataclass
class Fleet:
    """The pods of one state file at one provider. The caller holds the ledger's lock."""

    renter: Renter
    setup: Setup
    progress_of: Callable[[str], Progress] | None = None
    """Who is told how far the set-up of a pod is."""

    settle_elsewhere: Callable[[], Awaitable[None]] | None = None
    """Ends what orders at other providers may have made since."""

    async def planned(self, desired: Sequence[PodSpec]) -> tuple[Plan, list[Offer]]:
        """What is to be done, after making the ledger true. Buys nothing. Raises ProvisioningError."""
        await repeated(self.renter.provider.check, tell=self.renter.tell)
        if self.settle_elsewhere:
            await self.settle_elsewhere()
        for name, error in (await self.renter.settle()).items():
            raise ProviderError(f"{name}: {error}. Nothing was rented.")
        offers = await repeated(self.renter.provider.offers, tell=self.renter.tell)
        return plan(desired, self.renter.rows, offers), offers

    async def rent(self, agreed: Plan, offers: Sequence[Offer]) -> Outcome:
        return Outcome(await self.renter.apply(agreed, offers))

    async def set_up(
        self, outcome: Outcome, *, again: bool = False, with_environment: bool = True
    ) -> Outcome:
        """Code and environment onto all pods that answer and lack them; `again`: also where nothing runs on them."""

        async def one(row: Row) -> None:
            try:
                machine = await self.renter.machine(row.name)
                if row.state == State.SYNCED and await jobs.any_runs(machine, row.label):
                    return
                self.renter.say(row.name, "sending code, making its environment")
                num_gpus = None if row.offer.is_cpu else row.offer.gpu_count
                await set_up(
                    machine,
                    row.label,
                    self.setup,
                    num_gpus=num_gpus,
                    with_environment=with_environment,
                    progress=self.progress_of(row.name) if self.progress_of else None,
                )
                self.renter.ledger.advance(row, State.SYNCED)
                self.renter.on_state(row.name, State.SYNCED)
            except ProvisioningError as error:
                outcome.failures[row.name] = error
                self.renter.say(row.name, f"failed: {error}")

        states = {State.REACHABLE, State.SYNCED} if again else {State.REACHABLE}
        rows = [row for row in self.renter.rows if row.state in states]
        await gathered(one(row) for row in rows if row.name not in outcome.failures)
        return outcome

    async def train(self, outcome: Outcome, options: SwarmOptions) -> Outcome:
        """A peer on each pod, all in epoch 1. Starts nothing unless all pods are there."""
        if outcome.is_good and self.renter.rows:
            try:
                outcome.failures.update(await Swarm(self.renter, options, self.python_of).start())
            except ProvisioningError as error:
                outcome.failures[self.renter.rows[0].name] = error
        return outcome

    def python_of(self, name: str) -> str:
        return self.setup.python or f"{VENV}/bin/python"

    async def give_back(self, names: Sequence[str] | None = None) -> Outcome:
        """These pods, or all; each as far as it goes, whatever becomes of the others."""
        outcome = Outcome()

        async def one(row: Row) -> None:
            try:
                await self.renter.give_back(row)
            except ProvisioningError as error:
                outcome.failures[row.name] = error

        await gathered(one(row) for row in self.renter.rows if names is None or row.name in names)
        return outcome


@contextlib.asynccontextmanager
async def opened_fleet(
    ledger: Ledger,
    specs: Sequence[PodSpec],
    access: Access,
    say: Say,
    *,
    python: str | None = None,
    source: Path | None = None,
    boot_timeout_s: float = 900.0,
    extras: Sequence[str] = (),
) -> AsyncIterator[Fleet]:
    """The fleet for these specs, of one provider, with what its pods are to be given. Raises UserError."""
    names = {spec.provider for spec in specs}
    others = {row.provider for row in ledger.rows()} - names
    if len(names) > 1 or others:
        raise UserError(
            f"{ledger.path} would hold pods of {', '.join(sorted(names | others))}; those of one state file are of one "
            "provider. Give each its own --state-file, or `diloco pods down` first."
        )
    (name,) = names
    checked_source = source_directory(source)
    access = access_of(ledger, access)
    provider = open_provider(name, access)
    try:
        if access.inventory:
            ledger.remember(INVENTORY, str(access.inventory))
        secrets = secrets_of(access.environment)
        renter = Renter(
            ledger=ledger,
            provider=provider,
            public_key=public_key(access.ssh_key) if needs_key(name) else "",
            say=say,
            patience=Patience(boot_s=boot_timeout_s),
        )
        extras = ["data", *extras, *(["wandb"] if "WANDB_API_KEY" in secrets else [])]
        try:
            setup = Setup(
                source=checked_source, python=python or provider.python(), extras=extras, secrets=secrets
            )

            async def settle_elsewhere() -> None:
                for other, error in (await reconcile(ledger, access, (), say, without=[name])).items():
                    say(other, f"it is not known whether a pod of ours is there: {error}")

            ledger.remember(PYTHON, setup.python or "")
            yield Fleet(renter, setup, settle_elsewhere=settle_elsewhere)
        finally:
            await renter.close()
    finally:
        await provider.close()
