"""The keeper: part of the watcher process, it keeps the swarm as the user requested it.

It replaces pods that died, and gives back all pods after the run has ended and its results are fetched. The request is
stored in the ledger, so that a new keeper can take over after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from provisioning.errors import Busy, ProviderError, ProvisioningError, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.ledger.row import State
from provisioning.machines.setup import Setup, secrets_of
from provisioning.pods.spec import PodSpec, providers_of
from provisioning.providers.registry import Access
from provisioning.renting import operations
from provisioning.renting.account import Say
from provisioning.renting.clock import Clock
from provisioning.renting.each import Failures
from provisioning.renting.operations import UNWATCHED, WANTED, down, needs_watcher
from provisioning.renting.renters import renters
from provisioning.swarm.fleet import Fleet, opened_fleet
from provisioning.swarm.status import Status, overview
from provisioning.swarm.swarm import SwarmOptions

_INTERVAL_S = 15.0
_SILENT_S = 300.0
_MAX_GAP_S = 75.0
_EPOCH_TIMEOUT_S = 900.0
LAST_ACTION = "kept"
"""Key in the ledger: the keeper's last action, as text for the user."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The requested swarm."""

    specs: Sequence[PodSpec]
    """The requested pods, each with a price limit."""
    replaces: bool
    stops_when_idle: bool
    budget: float | None = None
    """Once all pods of the ledger have cost so many dollars, none is replaced any more; None: no limit."""
    setup: Setup
    options: SwarmOptions
    ends_at: Mapping[str, float | None] = field(default_factory=dict)
    """Rental ends (Unix time) by pod name. A replacement gets the end of the pod that it replaces."""

    def write(self, ledger: Ledger) -> None:
        """Store this in the ledger, with the names of secrets but not their values."""
        names = dict.fromkeys(self.setup.secrets or (), "")
        text = msgspec.json.encode(replace(self, setup=replace(self.setup, secrets=names)), enc_hook=str)
        ledger.remember(WANTED, text.decode())

    @classmethod
    def read(cls, ledger: Ledger, environment: Mapping[str, str]) -> Wanted | None:
        """The stored swarm, with secrets from the environment; None: there is none.

        Raises UserError if a secret is not in the environment any more, or another version has stored it.
        """
        text = ledger.recall(WANTED)
        if not text:
            return None
        try:
            found = msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            raise UserError(
                f"the stored swarm is of another version: {error}; run `diloco provision` again"
            ) from error
        return replace(
            found,
            setup=replace(found.setup, secrets=secrets_of(environment, list(found.setup.secrets or ()))),
            options=replace(found.options, epoch_timeout_s=_EPOCH_TIMEOUT_S),
        )

    def at(self, now: float, rows_end_at: Mapping[str, float | None]) -> Wanted:
        """The same without pods whose rental end has passed, and with the remaining hours of the others."""
        ends_at = {**self.ends_at, **rows_end_at}
        left = [spec for spec in self.specs if (end := ends_at.get(spec.name)) is None or end > now]
        specs = [
            spec if (end := ends_at.get(spec.name)) is None else replace(spec, ttl_hours=(end - now) / 3600)
            for spec in left
        ]
        return replace(self, specs=specs, ends_at={spec.name: ends_at.get(spec.name) for spec in left})


def no_longer_wanted(ledger: Ledger, names: Sequence[str]) -> None:
    """Remove these pods, or all if `names` is empty, from the stored swarm, so that they are not replaced."""
    text = ledger.recall(WANTED)
    found = json.loads(text) if text else {"specs": []}
    found["specs"] = [spec for spec in found["specs"] if names and spec["name"] not in names]
    ledger.remember(WANTED, json.dumps(found) if found["specs"] else "")


class Fate(StrEnum):
    LIVES = "lives"
    DIED = "died"
    ENDED = "ended"
    """Its peer has ended by itself, with or without an error: replacing the pod would not help."""


def fate(status: Status, silent_s: float) -> tuple[Fate, str]:
    """The fate of a pod, and the reason. `silent_s`: seconds since the pod last answered."""
    if status.row.state != State.RUNNING:
        return Fate.LIVES, ""
    if status.is_there is False:
        return Fate.DIED, "its provider has no such pod any more"
    if status.failure:
        return Fate.DIED, status.failure
    if status.progress is None:
        return (Fate.DIED, f"silent for {silent_s:.0f} s") if silent_s > _SILENT_S else (Fate.LIVES, "")
    job = status.progress.job
    if job.is_running:
        return Fate.LIVES, ""
    if job.code is None:
        return Fate.DIED, "all its processes were killed"
    return Fate.ENDED, f"its peer ended with {job.code}"


@dataclass
class Keeper:
    """Call `tick` repeatedly, in one process at a time."""

    ledger: Ledger
    access: Access
    say: Say
    clock: Callable[[], float] = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._silent_s: dict[str, float] = {}
        self._looked_at = self.clock()
        self._said = ""

    async def tick(self) -> None:
        """Check all pods once, and stop or repair the swarm if necessary. Raises ProvisioningError."""
        wanted = Wanted.read(self.ledger, self.access.environment)
        if wanted is None:
            return
        seen = [one for one in (await overview(self.ledger, self.access)).pods if one.is_in_ledger]
        now = self.clock()
        # Limited: pods were not silent while this machine slept.
        passed_s, self._looked_at = min(now - self._looked_at, _MAX_GAP_S), now
        wanted = wanted.at(now, {one.row.name: one.row.ends_at for one in seen})
        fates = {one.row.name: (one, *fate(one, self._silence_s(one, passed_s))) for one in seen}
        if wanted.stops_when_idle and fates and all(found is Fate.ENDED for _, found, _ in fates.values()):
            await self._stop()
            return
        dead = {name: (one, why) for name, (one, found, why) in fates.items() if found is Fate.DIED}
        missing = [spec.name for spec in wanted.specs if spec.name not in fates]
        unfinished = [one.row.name for one, _, _ in fates.values() if one.row.state != State.RUNNING]
        if wanted.replaces and (dead or missing or unfinished):
            with self.ledger.locked():
                wanted.write(self.ledger)
                await self._restore(wanted, dead)

    async def _stop(self) -> None:
        self.tell("the run has ended: fetching its results, and giving its pods back")
        with self.ledger.locked():
            failures = await down(self.ledger, self.access, (), self.say)
        for name, error in failures.items():
            self.tell(f"{name} is not given back: {error}")
        if not failures:
            self.ledger.remember(WANTED, "")

    async def _restore(self, wanted: Wanted, dead: Mapping[str, tuple[Status, str]]) -> None:
        now = self.clock()
        spent = sum(row.dollars(now) for row in self.ledger.bills())
        if wanted.budget is not None and spent >= wanted.budget:
            self.tell(f"{spent:.2f} $ are spent, and the budget is {wanted.budget:.2f}: nothing is replaced")
            return
        for name, (_, why) in dead.items():
            self.tell(f"{name} has died: {why}; it is replaced")
        async with opened_fleet(
            self.ledger, providers_of(wanted.specs), self.access, self.say, wanted.setup
        ) as fleet:
            failures = await fleet.renters.give_back(
                [one.row for one, _ in dead.values()], discard_results=True
            )
            failures = failures or await self._brought_up(fleet, wanted)
        for name, error in failures.items():
            self.tell(f"{name} is not up yet: {error}")
        if not failures:
            self.tell(f"all {len(wanted.specs)} pods train")

    async def _brought_up(self, fleet: Fleet, wanted: Wanted) -> Failures:
        agreed = await fleet.renters.plan(wanted.specs)
        if any(removal.row.state not in (State.DELETING, State.PLANNED) for removal in agreed.destroy):
            raise ProviderError(
                "living pods would have to be given back; run `diloco provision`, which asks first"
            )
        return await fleet.train(await fleet.set_up(await fleet.renters.apply(agreed)), wanted.options)

    def _silence_s(self, one: Status, passed_s: float) -> float:
        label = one.row.label
        if one.progress is not None or one.is_there is not True:
            self._silent_s.pop(label, None)
            return 0.0
        self._silent_s[label] = self._silent_s.get(label, -passed_s) + passed_s
        return self._silent_s[label]

    def tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.say("keeper", text)
            at = time.strftime("%H:%M:%S", time.localtime(self.clock()))
            self.ledger.remember(LAST_ACTION, f"{at} {text}")


async def watch(
    ledger: Ledger, access: Access, say: Say, *, interval_s: float, stop: Callable[[], bool] = lambda: False
) -> None:
    """Keep the requested swarm, and give back pods at their rental end, until nothing is left to watch or `stop()`."""

    def quietly(name: str, text: str) -> None:
        # If the disk is full, pods are given back without a log.
        with contextlib.suppress(OSError):
            say(name, text)

    async with renters(ledger, access, quietly) as found:
        ledger.remember(UNWATCHED, " ".join(found.failures))
    keeper, fetched = Keeper(ledger, access, quietly), set[str]()
    while not stop() and needs_watcher(ledger):
        wait_s = interval_s
        try:
            wait_s = await operations.keep_time(ledger, access, quietly, fetched, interval_s, keeper.clock)
            if ledger.recall(WANTED):
                wait_s = min(wait_s, _INTERVAL_S)
                await keeper.tick()
        except Busy:
            # Another command changes the pods now.
            pass
        except (ProvisioningError, OSError) as error:
            with contextlib.suppress(UserError):
                keeper.tell(f"not done yet: {error}")
        if needs_watcher(ledger):
            await asyncio.sleep(wait_s)
