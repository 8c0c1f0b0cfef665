"""Provisions three local pods, or gives them back, as the command does, and dies by SIGKILL at a named point.

python -m tests.support.pods_driver up|down STATE_DIRECTORY [POINT]

A point is a state that the ledger has just written, `created` (the provider made a pod that is not in the ledger yet),
`dht` or `peer` (it was started), or `destroyed` (the provider deleted a pod whose row still exists).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from provisioning.ledger.ledger import Ledger
from provisioning.machines.setup import Setup
from provisioning.pods.pod import PodSpec
from provisioning.providers.local import LocalProvider
from provisioning.renting.renter import Patience, Renter
from provisioning.renting.renters import Renters
from provisioning.swarm.swarm import Swarm, SwarmOptions

STAND_IN = Path(__file__).parent / "stand_in_python.sh"
SPECS = [
    PodSpec(name=f"pod-{size}", provider="local", gpu_type=f"cpu-{size}", gpu_count=None)
    for size in (1, 2, 4)
]
PATIENCE = Patience(poll_s=0.05, boot_s=30.0, destroy_s=30.0)


@dataclass
class Death:
    """Kills this process by SIGKILL when the point is reached."""

    point: str

    def at(self, point: str) -> None:
        if point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, work: Callable[..., Awaitable[Any]], point: str) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any) -> Any:
            result = await work(*args)
            self.at(point)
            return result

        return wrapped


class MortalLedger(Ledger):
    """A ledger whose command may die right after a state is on disk."""

    death = Death("")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        before = {row.label: str(row.state) for row in self.rows()}
        with super()._transaction():
            yield
        after = {row.label: str(row.state) for row in self.rows()}
        for label in before.keys() | after.keys():
            if before.get(label) != after.get(label):
                self.death.at(after.get(label, "gone"))


def source_of(state_dir: Path) -> Path:
    """A source directory with next to nothing to copy."""
    source = state_dir / "source"
    source.mkdir(exist_ok=True)
    (source / "pyproject.toml").write_text("[project]\nname = 'nothing'\n")
    return source


async def drive(what: str, state_dir: Path, point: str) -> int:
    death = Death(point)
    provider: Any = LocalProvider(state_dir / "local")
    provider.create = death.after(provider.create, "created")
    provider.destroy = death.after(provider.destroy, "destroyed")

    def said(name: str, text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr, flush=True)
        if text.startswith("starting its peer"):
            death.at("peer")
        if text.startswith("starting the DHT"):
            death.at("dht")

    ledger = MortalLedger(state_dir / "pods.sqlite")
    ledger.death = death
    with ledger.locked():
        renter = Renter(
            ledger=ledger,
            provider=provider,
            say=said,
            patience=PATIENCE,
        )
        found = Renters(ledger, renter.say, [renter])
        setup = Setup(source=source_of(state_dir), python=str(STAND_IN), min_free_mb=1)
        if what == "down":
            failures = await found.give_back(found.rows)
        else:
            failures = await found.set_up(setup, await found.apply(await found.plan(SPECS)))
            swarm = Swarm(found, SwarmOptions(epoch_timeout_s=30.0), setup)
            failures = failures or await swarm.start()
    for name, error in failures.items():
        print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    what, directory, *rest = sys.argv[1:]
    sys.exit(asyncio.run(drive(what, Path(directory), rest[0] if rest else "")))
