"""The whole way: settle what a crash left, rent, set up, start a swarm; and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from provisioning.backoff import repeated
from provisioning.errors import ProvisioningError
from provisioning.ledger import Row
from provisioning.plan import Plan, plan
from provisioning.pod_paths import VENV
from provisioning.pods import Offer, PodSpec
from provisioning.renting import Renter, gathered
from provisioning.setup import Setup, set_up
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

    async def planned(self, desired: Sequence[PodSpec]) -> tuple[Plan, list[Offer]]:
        """What is to be done, after making the ledger true. Buys nothing. Raises ProvisioningError."""
        await repeated(self.renter.provider.check)
        await self.renter.settle()
        offers = await repeated(self.renter.provider.offers)
        return plan(desired, self.renter.rows, offers), offers

    async def rent(self, agreed: Plan, offers: Sequence[Offer]) -> Outcome:
        return Outcome(await self.renter.apply(agreed, offers))

    async def set_up(self, outcome: Outcome) -> Outcome:
        """Code and environment onto all pods that answer and lack them."""

        async def one(row: Row) -> None:
            try:
                machine = await self.renter.machine(row.name)
                self.renter.say(row.name, "sending code, making its environment")
                num_gpus = None if row.offer.is_cpu else row.offer.gpu_count
                await set_up(machine, row.label, self.setup, num_gpus=num_gpus)
                self.renter.ledger.advance(row.name, State.SYNCED)
                self.renter.on_state(row.name, State.SYNCED)
            except ProvisioningError as error:
                outcome.failures[row.name] = error
                self.renter.say(row.name, f"failed: {error}")

        rows = [row for row in self.renter.rows if row.state == State.REACHABLE]
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
