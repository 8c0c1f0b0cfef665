"""Whole fleets in a test's own process: a provider, a ledger, and pods whose Python is a stand-in by default."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provisioning.fleet import Fleet, Outcome
from provisioning.ledger import Ledger
from provisioning.pods import PodSpec
from provisioning.providers.protocol import Provider
from provisioning.renting import Renter
from provisioning.settling import Patience
from provisioning.setup import Setup
from provisioning.swarm import SwarmOptions
from tests.support.pods_driver import STAND_IN, source_of

PATIENCE = Patience(poll_s=0.1, boot_s=20.0, destroy_s=5.0)


@dataclass
class TestFleet:
    """Each call is a command of its own: a new provider, a new event loop, the same ledger."""

    __test__ = False

    directory: Path
    open_provider: Callable[[], Provider]
    public_key: str = ""
    patience: Patience = PATIENCE
    python: str | None = str(STAND_IN)
    said: list[str] = field(default_factory=list)
    min_free_mb: int = 1

    @property
    def ledger_path(self) -> Path:
        return self.directory / "pods.sqlite"

    def up(
        self, specs: Sequence[PodSpec], *, trains: bool = True, options: SwarmOptions | None = None
    ) -> Outcome:
        async def work(fleet: Fleet) -> Outcome:
            agreed, offers = await fleet.planned(specs)
            outcome = await fleet.set_up(await fleet.rent(agreed, offers))
            if trains:
                outcome = await fleet.train(outcome, options or SwarmOptions(epoch_timeout_s=60.0))
            return outcome

        return self.run(work)

    def down(self) -> Outcome:
        return self.run(lambda fleet: fleet.give_back())

    def settle(self) -> None:
        async def work(fleet: Fleet) -> Outcome:
            return Outcome(await fleet.renter.settle())

        self.run(work)

    def run(self, work: Callable[[Fleet], Coroutine[Any, Any, Outcome]]) -> Outcome:
        async def main() -> Outcome:
            provider = self.open_provider()
            ledger = Ledger(self.ledger_path)
            renter = Renter(
                ledger=ledger,
                provider=provider,
                public_key=self.public_key,
                say=lambda name, text: self.said.append(f"{name}: {text}"),
                patience=self.patience,
            )
            setup = Setup(source=source_of(self.directory), python=self.python, min_free_mb=self.min_free_mb)
            try:
                with ledger.locked():
                    return await work(Fleet(renter, setup))
            finally:
                await renter.close()
                await provider.close()
                ledger.close()

        return asyncio.run(main())

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Names and states; a pod that is being given back may have a successor of the same name."""
        ledger = Ledger(self.ledger_path)
        try:
            return [(row.name, str(row.state)) for row in ledger.rows()]
        finally:
            ledger.close()

    @property
    def states(self) -> dict[str, str]:
        return dict(self.rows)
