"""Whole fleets in a test's own process: a provider, a ledger, and pods whose Python is a stand-in by default."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from provisioning.ledger.keys import FETCH, RUN_DIR
from provisioning.ledger.ledger import Ledger
from provisioning.machines.results import DEFAULT
from provisioning.machines.setup import Setup
from provisioning.pods.pod import PodSpec
from provisioning.providers.protocol import Provider
from provisioning.providers.registry import Access
from provisioning.renting.each import Failures
from provisioning.renting.renter import Patience, Renter, Say
from provisioning.renting.renters import Renters, renters
from provisioning.swarm.swarm import Swarm, SwarmOptions
from tests.support.pods_driver import STAND_IN, source_of

T = TypeVar("T")
PATIENCE = Patience(poll_s=0.1, boot_s=20.0, destroy_s=5.0)


@dataclass
class Outcome:
    """The errors of one command by pod."""

    failures: Failures

    @property
    def is_good(self) -> bool:
        return not self.failures


@dataclass
class TestFleet:
    """Each call is a command of its own: a new provider, a new event loop, the same ledger."""

    __test__ = False

    directory: Path
    open_provider: Callable[[], Provider]
    patience: Patience = PATIENCE
    python: str | None = str(STAND_IN)
    said: list[str] = field(default_factory=list)
    min_free_mb: int = 1
    run_dir: Path | str | None = None
    """Where results go; None: they are not fetched."""
    discard_results: bool = False

    @property
    def ledger_path(self) -> Path:
        return self.directory / "pods.sqlite"

    def up(
        self, specs: Sequence[PodSpec], *, trains: bool = True, options: SwarmOptions | None = None
    ) -> Outcome:
        async def work(found: Renters) -> Outcome:
            setup = Setup(source=source_of(self.directory), python=self.python, min_free_mb=self.min_free_mb)
            failures = await found.set_up(setup, await found.apply((await found.plan(specs)).complete()))
            if trains and not failures:
                told = options or SwarmOptions(epoch_timeout_s=60.0)
                failures = await Swarm(found, told, setup).start()
            return Outcome(failures)

        return self.run(work)

    def down(self) -> Outcome:
        async def work(found: Renters) -> Outcome:
            return Outcome(await found.give_back(found.rows, discard_results=self.discard_results))

        return self.run(work)

    def settle(self) -> None:
        async def work(found: Renters) -> Outcome:
            ((provider, failures),) = (await found.settle()).items()
            if provider in failures:
                raise failures[provider]
            return Outcome(failures)

        self.run(work)

    def run(self, work: Callable[[Renters], Coroutine[Any, Any, Outcome]]) -> Outcome:
        async def main() -> Outcome:
            provider = self.open_provider()
            ledger = Ledger(self.ledger_path)
            renter = Renter(
                ledger=ledger,
                provider=provider,
                say=lambda name, text: self.said.append(f"{name}: {text}"),
                patience=self.patience,
            )
            if self.run_dir is not None:
                ledger.remember(RUN_DIR, str(self.run_dir))
                ledger.remember(FETCH, " ".join(DEFAULT))
            try:
                with ledger.locked():
                    return await work(Renters(ledger, renter.say, [renter]))
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


def command(
    ledger: Ledger,
    access: Access,
    work: Callable[[Renters], Awaitable[T]],
    patience: Patience | None = None,
    say: Say = lambda name, text: None,
) -> T:
    """Run `work` with the providers of this ledger, and return its result."""

    async def main() -> T:
        async with renters(ledger, access, say, patience) as found:
            return await work(found)

    return asyncio.run(main())
