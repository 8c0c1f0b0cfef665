"""The keeper, a part of the watcher process (watcher.py), keeps the swarm as the user requested it.

It replaces pods that died, and gives back all pods after the run has ended and its results are fetched. The request,
`Wanted`, is stored in the ledger, so that a new keeper can take over after a crash.

Giving pods back needs no secrets, only the providers' keys. While no pod of a provider answers, none of its pods is
replaced for its silence: this machine's network may be down, or let nothing through to the ports of that provider.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from provisioning.errors import MachineError, ProviderError, ProvisioningError, UserError
from provisioning.ledger.keys import LAST_ACTION, RUN_BEGAN, UNSET, WANTED
from provisioning.ledger.ledger import Ledger
from provisioning.machines.setup import Setup, secrets_of
from provisioning.pods.pod import PodSpec, State
from provisioning.providers.registry import Access
from provisioning.renting.clock import Clock
from provisioning.renting.each import Failures
from provisioning.renting.plan import Plan
from provisioning.renting.renter import Say
from provisioning.renting.renters import Renters, renters
from provisioning.swarm.status import Status, overview
from provisioning.swarm.swarm import Swarm, SwarmOptions

KEEP_INTERVAL_S = 15.0
_SILENT_S = 300.0
_MAX_GAP_S = 75.0
# After a repair; doubled each time, until a peer on the repaired pods has committed an epoch.
_FIRST_REST_S, _MAX_REST_S = 15.0, 600.0
_NOT_UP = (State.CREATING, State.BOOTING)
_AFTER_SETUP = (State.RUNNING, State.DELETING)
_NONE_ANSWERS = "no pod answers: this machine's own network may be down, so none is replaced for that"


class Fate(StrEnum):
    LIVES = "lives"
    DIED = "died"
    ENDED = "ended"
    """Its peer has ended by itself, with or without an error: replacing the pod would not help."""


def fate(status: Status, silent_s: float, *, others_answer: bool = True) -> tuple[Fate, str]:
    """The fate of a pod, and the reason.

    `silent_s`: for how many seconds it has been silent while others answered; `others_answer`: others of its provider.
    """
    if status.row.state != State.RUNNING:
        return Fate.LIVES, ""
    if status.is_there is False:
        return Fate.DIED, "its provider has no such pod any more"
    if status.failure:
        return Fate.DIED, status.failure
    if status.progress is None:
        if silent_s <= _SILENT_S:
            return Fate.LIVES, ""
        if status.is_there is None:
            return Fate.LIVES, "silent, but not replaced: it is unknown whether it still runs"
        if not others_answer:
            return Fate.LIVES, f"silent, but not replaced: no pod of {status.row.provider} answers"
        return Fate.DIED, f"silent for {silent_s:.0f} s while others answered"
    job = status.progress.job
    if job.is_running:
        return Fate.LIVES, ""
    if job.code is None:
        return Fate.DIED, "all its processes were killed"
    return Fate.ENDED, f"its peer ended with {job.code}"


def _is_over(fates: Collection[tuple[Status, Fate, str]], final: Collection[State]) -> bool:
    """Whether no peer runs and none will: one has finished, or all pods are in states of `final`. Those get none."""
    peers = [(one, found, why) for one, found, why in fates if one.row.state == State.RUNNING]
    has_finished = any(one.progress and one.progress.has_finished for one, _, _ in peers)
    # Once a peer has finished, a pod that has been silent for long does not keep the run from being over.
    if any(found is Fate.LIVES and not (why and has_finished) for _, found, why in peers):
        return False
    return has_finished or (bool(final) and all(one.row.state in final for one, _, _ in fates))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The requested swarm."""

    specs: Sequence[PodSpec]
    """The requested pods, each with a price limit."""
    replaces: bool
    stops_when_idle: bool
    budget: float | None = None
    """Once the pods of this run have cost so many dollars, none is replaced any more; None: no limit."""
    setup: Setup
    """Of secrets, the ledger stores the names only."""
    options: SwarmOptions
    ends_at: Mapping[str, float | None] = field(default_factory=dict)
    """Rental ends (Unix time) by pod name. A replacement gets the end of the pod that it replaces."""

    def write(self, ledger: Ledger) -> None:
        """Store this in the ledger; if the keeper would have nothing to do, delete what is stored there."""
        if not (self.replaces or self.stops_when_idle):
            ledger.remember(WANTED, "")
            return
        names = dict.fromkeys(self.setup.secrets or (), "")
        text = msgspec.json.encode(replace(self, setup=replace(self.setup, secrets=names)), enc_hook=str)
        ledger.remember(WANTED, text.decode())

    @classmethod
    def read(cls, ledger: Ledger) -> Wanted | None:
        """The stored swarm, without the values of its secrets; None: there is none.

        Raises UserError if another version has stored it.
        """
        text = ledger.recall(WANTED)
        if not text:
            return None
        try:
            return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            raise UserError(
                f"the stored swarm is of another version: {error}; run `diloco provision` again"
            ) from error

    def at(self, now: float, rows_end_at: Mapping[str, float | None]) -> Wanted:
        """The same without pods whose rental end has passed, and with the remaining hours of the others."""
        ends_at = {**self.ends_at, **rows_end_at}
        left = [spec for spec in self.specs if (end := ends_at.get(spec.name)) is None or end > now]
        specs = [
            spec if (end := ends_at.get(spec.name)) is None else replace(spec, ttl_hours=(end - now) / 3600)
            for spec in left
        ]
        return replace(self, specs=specs, ends_at={spec.name: ends_at.get(spec.name) for spec in left})


def keep(
    ledger: Ledger,
    agreed: Plan,
    setup: Setup,
    options: SwarmOptions,
    *,
    replaces: bool,
    stops: bool | None,
    budget: float | None = None,
) -> None:
    """Store the pods that were agreed on as the swarm that is to be kept. `stops` None: only if a pod costs money."""
    prices = [(creation.spec, creation.offer.price_per_hour) for creation in agreed.create]
    prices += [(row.spec, row.offer.price_per_hour) for row in agreed.keep]
    Wanted(
        specs=[replace(spec, max_price=spec.price_limit(price)) for spec, price in prices],
        replaces=replaces,
        stops_when_idle=any(price for _, price in prices) if stops is None else stops,
        budget=budget,
        setup=setup,
        options=options,
        ends_at={row.name: row.ends_at for row in ledger.rows()},
    ).write(ledger)


def no_longer_wanted(ledger: Ledger, names: Sequence[str]) -> None:
    """Remove these pods, or all if `names` is empty, from the stored swarm, so that they are not replaced."""
    text = ledger.recall(WANTED)
    found = json.loads(text) if text else {"specs": []}
    found["specs"] = [spec for spec in found["specs"] if names and spec["name"] not in names]
    ledger.remember(WANTED, json.dumps(found) if found["specs"] else "")


def begin_run(ledger: Ledger) -> None:
    """Call before pods are rented. A run begins if the ledger has no pods; else the present run goes on."""
    if not ledger.rows():
        ledger.remember(RUN_BEGAN, str(time.time()))
        ledger.remember(LAST_ACTION, "")


@dataclass
class Keeper:
    """Call `tick` repeatedly, in one process at a time."""

    ledger: Ledger
    access: Access
    say: Say
    clock: Callable[[], float] = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._silent_s: dict[tuple[str, bool | None, bool], float] = {}
        self._looked_at = self.clock()
        self._told, self._told_before = set[str](), set[str]()
        self._rest_s, self._rests_until, self._unrepaired = 0.0, 0.0, set[str]()

    async def tick(self) -> None:
        """Check all pods once, and stop or repair the swarm if necessary. Raises ProvisioningError."""
        self._told_before, self._told = self._told, set()
        seen = await self._seen()
        # Read this last: a command may have changed it while the pods were looked at.
        wanted = Wanted.read(self.ledger)
        if wanted is None:
            return
        wanted = wanted.at(self.clock(), {one.row.name: one.row.ends_at for one in seen})
        if not seen and not (wanted.replaces and wanted.specs):
            # No pod was ever rented, or the rentals of all have ended.
            with self.ledger.locked():
                if not self.ledger.rows():
                    self.ledger.remember(WANTED, "")
            return
        obstacle = self._obstacle(wanted)
        fates = self._fates(seen)
        # Without `replaces`, a command may be about to start a peer on a pod that is set up.
        final = (*_AFTER_SETUP, State.SYNCED) if wanted.replaces else _AFTER_SETUP
        if wanted.stops_when_idle and _is_over(fates.values(), final if obstacle else ()):
            await self._stop(wanted)
            return
        lost = {
            name: (one, f"has died: {why}") for name, (one, found, why) in fates.items() if found is Fate.DIED
        }
        if wanted.replaces and self._spent(wanted):
            # Those that a command has set up meanwhile have changed.
            lost |= {
                one.row.name: (one, "has no peer and gets none")
                for one in seen
                if one.row.state not in _AFTER_SETUP
                and not (one.progress and one.progress.job.is_running)
                and self.ledger.current(one.row) == one.row
            }
        missing = [spec.name for spec in wanted.specs if spec.name not in fates]
        unfinished = [one.row.name for one in seen if one.row.state != State.RUNNING]
        to_repair = {*lost, *missing, *unfinished}
        # Only an epoch shows that a repair was one: pods that die before it, again and again, cost money each time.
        self._unrepaired -= {
            name
            for name, (one, found, _) in fates.items()
            if found is Fate.LIVES and one.progress and one.progress.epoch
        }
        is_known = to_repair <= self._unrepaired
        if wanted.replaces and to_repair and not (is_known and self.clock() < self._rests_until):
            with self.ledger.locked():
                wanted.write(self.ledger)
                rest_s = min(max(2 * self._rest_s, _FIRST_REST_S), _MAX_REST_S) if is_known else _FIRST_REST_S
                self._unrepaired |= to_repair
                try:
                    await self._restore(wanted, lost, obstacle)
                finally:
                    self._rest_s, self._rests_until = rest_s, self.clock() + rest_s

    async def _seen(self) -> list[Status]:
        return [one for one in (await overview(self.ledger, self.access)).pods if one.is_in_ledger]

    def _obstacle(self, wanted: Wanted) -> str:
        """Why no pod is replaced; empty: pods that died are replaced."""
        unset = [name for name in wanted.setup.secrets or () if not self.access.environment.get(name)]
        with contextlib.suppress(UserError):
            self.ledger.remember(UNSET, " ".join(unset))
        if not wanted.replaces:
            return "--replace was not given"
        if spent := self._spent(wanted):
            return spent
        if unset:
            return (
                f"this process has no {', '.join(unset)}; run `diloco pods status` where that variable is set"
            )
        return ""

    def _spent(self, wanted: Wanted) -> str:
        """That the budget is spent; empty: it is not."""
        began_at, now = float(self.ledger.recall(RUN_BEGAN) or 0.0), self.clock()
        spent = sum(row.dollars(now) for row in self.ledger.bills() if row.asked_at >= began_at)
        if wanted.budget is None or spent < wanted.budget:
            return ""
        return f"{spent:.2f} $ are spent, and the budget is {wanted.budget:.2f}"

    def _fates(self, seen: Sequence[Status]) -> dict[str, tuple[Status, Fate, str]]:
        now = self.clock()
        # Limited: time in which this machine slept is not silence of the pods.
        passed_s, self._looked_at = min(now - self._looked_at, _MAX_GAP_S), now
        silent = [
            one
            for one in seen
            if one.row.state == State.RUNNING and one.progress is None and fate(one, 0.0)[0] is Fate.LIVES
        ]
        if any(one.progress for one in seen):
            if _NONE_ANSWERS in self._told_before:
                self.tell("pods answer again")
        elif silent:
            self.tell(_NONE_ANSWERS)
            passed_s = 0.0
        answering = {one.row.provider for one in seen if one.progress}
        labels = {one.row.label for one in silent}
        self._silent_s = {key: seconds for key, seconds in self._silent_s.items() if key[0] in labels}
        fates = {}
        for one in seen:
            # Counted apart: silence while the provider does not answer, or no pod of it, from which nothing follows.
            others_answer = one.row.provider in answering
            key = one.row.label, one.is_there, others_answer
            if one.row.label in labels:
                self._silent_s[key] = self._silent_s.get(key, -passed_s) + passed_s
            fates[one.row.name] = (
                one,
                *fate(one, self._silent_s.get(key, 0.0), others_answer=others_answer),
            )
        for name, (one, found, why) in fates.items():
            if why and found is Fate.LIVES:
                self.tell(f"{name} is {why}")
            if found is Fate.ENDED and one.progress and not one.progress.has_finished:
                self.tell(f"{name} is not replaced: {why}; `diloco pods logs {name}` shows why")
        return fates

    async def _stop(self, wanted: Wanted) -> None:
        with self.ledger.locked():
            self.tell("the run has ended: fetching its results, and giving its pods back")
            with contextlib.suppress(UserError):
                # From now on nothing is replaced, even if not all pods can be given back now.
                replace(wanted, replaces=False).write(self.ledger)
            async with renters(self.ledger, self.access, self.say) as found:
                failures = await found.down(())
        for name, error in failures.items():
            self.tell(f"{name} is not given back: {error}")
        if not failures:
            self.ledger.remember(WANTED, "")

    async def _restore(self, wanted: Wanted, lost: Mapping[str, tuple[Status, str]], obstacle: str) -> None:
        """Give back these pods and, unless there is an obstacle, bring up all that can be."""
        for name, (_, why) in lost.items():
            self.tell(f"{name} {why}; it is {'given back' if obstacle else 'replaced'}")
        async with renters(self.ledger, self.access, self.say) as found:
            failures = await found.give_back([one.row for one, _ in lost.values()], discard_results=True)
        # Their rentals may have been extended meanwhile.
        labels = {one.row.label for one, _ in lost.values()}
        ends_at = {row.name: row.ends_at for row in self.ledger.bills() if row.label in labels}
        wanted = wanted.at(self.clock(), ends_at)
        wanted.write(self.ledger)
        if not obstacle:
            secrets = secrets_of(self.access.environment, list(wanted.setup.secrets or ()))
            setup = replace(wanted.setup, secrets=secrets)
            async with renters(self.ledger, self.access, self.say, to_rent=wanted.specs) as found:
                setup = found.completed(setup, wanted.specs)
                looking = asyncio.create_task(self._look_for_more(found))
                try:
                    failures = await self._brought_up(found, replace(wanted, setup=setup), failures)
                finally:
                    looking.cancel()
        for name, error in failures.items():
            self.tell(f"{name} is not up yet: {error}")
        if obstacle:
            self.tell(f"nothing is replaced: {obstacle}")
        elif not failures:
            self.tell(f"the peers of all {len(wanted.specs)} pods run")

    async def _look_for_more(self, found: Renters) -> None:
        """Look at all pods until one has died that is not being replaced: it must not wait until others have booted."""
        while True:
            await asyncio.sleep(KEEP_INTERVAL_S)
            # What goes wrong here, the next `tick` tells.
            with contextlib.suppress(ProvisioningError, OSError):
                fates = self._fates(await self._seen())
                died = {name for name, (_, fate_of, _) in fates.items() if fate_of is Fate.DIED}
                if died - self._unrepaired:
                    found.leave_booting()
                    return

    async def _brought_up(self, found: Renters, wanted: Wanted, failures: Failures) -> Failures:
        """Rent, set up and start all pods but those in `failures`. Returns these and the new errors by pod."""
        agreed, swarm = await found.plan(wanted.specs), Swarm(found, wanted.options, wanted.setup)
        if name := await swarm.unreachable_coordinator():
            # On new pods nothing could be started, but they would cost money.
            why = "it does not answer, and the coordinator may run on it, so nothing is rented until it answers or is"
            return {name: MachineError(f"{why} gone; `diloco pods down {name}` gives it back")} | failures
        if any(removal.row.state not in (State.DELETING, State.PLANNED) for removal in agreed.destroy):
            raise ProviderError("this would give back living pods; run `diloco provision`, which asks first")
        agreed = replace(
            agreed,
            create=tuple(one for one in agreed.create if one.spec.name not in failures),
            destroy=tuple(one for one in agreed.destroy if one.row.name not in failures),
            # A pod that has answered before, and is silent now, must not hold up the others.
            keep=tuple(row for row in agreed.keep if row.state in _NOT_UP),
        )
        failures = await found.set_up(wanted.setup, failures | await found.apply(agreed))
        return failures | await swarm.start_jobs()

    def tell(self, text: str) -> None:
        """Log this, and remember it for `pods status`, unless the last `tick` or this one has told it already."""
        is_new = text not in self._told | self._told_before
        self._told.add(text)
        if is_new:
            self.say("keeper", text)
            at = time.strftime("%H:%M:%S", time.localtime(self.clock()))
            # A full disk must not keep pods from being given back.
            with contextlib.suppress(UserError):
                self.ledger.remember(LAST_ACTION, f"{at} {text}")
