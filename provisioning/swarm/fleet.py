"""Sets up rented pods, and starts a swarm on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from provisioning.errors import ProvisioningError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import Row, State
from provisioning.machines import jobs
from provisioning.machines.setup import Setup, set_up
from provisioning.providers.registry import Access
from provisioning.renting.account import Patience, Say
from provisioning.renting.each import Failures, each
from provisioning.renting.operations import PYTHON
from provisioning.renting.renters import INVENTORY, Renters, renters
from provisioning.swarm.swarm import Swarm, SwarmOptions


@dataclass
class Fleet:
    """The pods of one state file. The caller holds the ledger's lock."""

    renters: Renters
    setup: Setup

    async def set_up(
        self, failures: Failures, *, again: bool = False, with_environment: bool = True
    ) -> Failures:
        """Send code and make the environment on pods that lack them; `again`: on all where no job runs.

        Skips the pods in `failures`. Returns these and the new errors by pod.
        """

        async def one(row: Row) -> None:
            machine = await self.renters[row.provider].machine(row)
            if row.state == State.SYNCED and await jobs.any_runs(machine, row.label):
                return
            self.renters.say(row.name, "sending code, making its environment")
            num_gpus = None if row.offer.is_cpu else row.offer.gpu_count
            await set_up(machine, row.label, self.setup, num_gpus=num_gpus, with_environment=with_environment)
            self.renters.ledger.advance(row, State.SYNCED)

        states = {State.REACHABLE, State.SYNCED} if again else {State.REACHABLE}
        rows = [row for row in self.renters.rows if row.state in states and row.name not in failures]
        return failures | await each(rows, one, self.renters.say)

    async def train(self, failures: Failures, options: SwarmOptions) -> Failures:
        """Start a peer on each pod, and wait until all are in epoch 1. Does nothing if there are `failures`."""
        if failures or not self.renters.rows:
            return failures
        try:
            return await Swarm(self.renters, options, self.setup.pod_python).start()
        except ProvisioningError as error:
            return {self.renters.rows[0].name: error}


@contextlib.asynccontextmanager
async def opened_fleet(
    ledger: Ledger,
    providers: Sequence[str],
    access: Access,
    say: Say,
    setup: Setup,
    *,
    boot_timeout_s: float = Patience.boot_s,
) -> AsyncIterator[Fleet]:
    """The fleet. Completes `setup` for these providers. Raises UserError if one of them cannot be opened."""
    patience = Patience(boot_s=boot_timeout_s)
    async with renters(ledger, access, say, patience, to_rent=providers) as found:
        if access.inventory:
            ledger.remember(INVENTORY, str(access.inventory))
        pythons = {found[name].provider.python() for name in providers}
        wandb = ["wandb"] if "WANDB_API_KEY" in (setup.secrets or {}) else []
        setup = replace(
            setup,
            # If providers have different Pythons, each pod gets its own environment.
            python=setup.python or (pythons.pop() if len(pythons) == 1 else None),
            extras=["data", *setup.extras, *wandb],
        )
        ledger.remember(PYTHON, setup.python or "")
        yield Fleet(found, setup)
