"""The keeper: part of the watcher process (watcher.py), it keeps the swarm as the user requested it.

It replaces pods that died, and gives back all pods after the run has ended and its results are fetched. The request is
stored in the ledger, so that a new keeper can take over after a crash.

Giving pods back needs no secrets, only the providers' keys. Silence of all pods at once is no death: this machine's own
network may be down.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from provisioning.errors import ProviderError, UserError
from provisioning.ledger.keys import LAST_ACTION, RUN_BEGAN, UNSET, WANTED
from provisioning.ledger.ledger import Ledger
from provisioning.machines.setup import secrets_of
from provisioning.pods.pod import State
from provisioning.providers.registry import Access
from provisioning.renting.clock import Clock
from provisioning.renting.each import Failures
from provisioning.renting.renter import Say
from provisioning.renting.renters import Renters, renters
from provisioning.swarm.status import Status, overview
from provisioning.swarm.swarm import Swarm
from provisioning.swarm.wanted import Wanted

_SILENT_S = 300.0
_MAX_GAP_S = 75.0
_AFTER_SETUP = (State.RUNNING, State.DELETING)
_NONE_ANSWERS = "no pod answers: this machine's own network may be down, so none is replaced for that"


class Fate(StrEnum):
    LIVES = "lives"
    DIED = "died"
    ENDED = "ended"
    """Its peer has ended by itself, with or without an error: replacing the pod would not help."""


def fate(status: Status, silent_s: float) -> tuple[Fate, str]:
    """The fate of a pod, and the reason. `silent_s`: for how many seconds it has been silent while others answered."""
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
        return Fate.DIED, f"silent for {silent_s:.0f} s while others answered"
    job = status.progress.job
    if job.is_running:
        return Fate.LIVES, ""
    if job.code is None:
        return Fate.DIED, "all its processes were killed"
    return Fate.ENDED, f"its peer ended with {job.code}"


def _is_over(fates: Collection[tuple[Status, Fate, str]], *, is_final: bool) -> bool:
    """Whether no peer runs and none will: one has finished, or nothing is replaced (`is_final`) or being set up."""
    peers = [(one, found) for one, found, _ in fates if one.row.state == State.RUNNING]
    if any(found is Fate.LIVES for _, found in peers):
        return False
    has_finished = any(one.progress and one.progress.has_finished for one, _ in peers)
    return has_finished or (is_final and all(one.row.state in _AFTER_SETUP for one, _, _ in fates))


@dataclass
class Keeper:
    """Call `tick` repeatedly, in one process at a time."""

    ledger: Ledger
    access: Access
    say: Say
    clock: Callable[[], float] = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self._silent_s: dict[tuple[str, bool | None], float] = {}
        self._looked_at = self.clock()
        self._told, self._told_before = set[str](), set[str]()

    async def tick(self) -> None:
        """Check all pods once, and stop or repair the swarm if necessary. Raises ProvisioningError."""
        self._told_before, self._told = self._told, set()
        seen = [one for one in (await overview(self.ledger, self.access)).pods if one.is_in_ledger]
        # Read after that: a command may have changed it meanwhile.
        wanted = Wanted.read(self.ledger)
        if wanted is None:
            return
        wanted = wanted.at(self.clock(), {one.row.name: one.row.ends_at for one in seen})
        if not seen and not (wanted.replaces and wanted.specs):
            # None was ever rented, or the time of all is over.
            with self.ledger.locked():
                if not self.ledger.rows():
                    self.ledger.remember(WANTED, "")
            return
        obstacle = self._obstacle(wanted)
        fates = self._fates(seen)
        if wanted.stops_when_idle and _is_over(fates.values(), is_final=bool(obstacle)):
            await self._stop(wanted)
            return
        dead = {name: (one, why) for name, (one, found, why) in fates.items() if found is Fate.DIED}
        missing = [spec.name for spec in wanted.specs if spec.name not in fates]
        unfinished = [one.row.name for one in seen if one.row.state != State.RUNNING]
        if wanted.replaces and (dead or missing or unfinished):
            with self.ledger.locked():
                wanted.write(self.ledger)
                await self._restore(wanted, dead, obstacle)

    def _obstacle(self, wanted: Wanted) -> str:
        """Why no pod is replaced; empty: pods that died are."""
        unset = [name for name in wanted.setup.secrets or () if not self.access.environment.get(name)]
        with contextlib.suppress(UserError):
            self.ledger.remember(UNSET, " ".join(unset))
        if not wanted.replaces:
            return "--replace was not given"
        began_at, now = float(self.ledger.recall(RUN_BEGAN) or 0.0), self.clock()
        spent = sum(row.dollars(now) for row in self.ledger.bills() if row.asked_at >= began_at)
        if wanted.budget is not None and spent >= wanted.budget:
            return f"{spent:.2f} $ are spent, and the budget is {wanted.budget:.2f}"
        if unset:
            return (
                f"this process has no {', '.join(unset)}; run `diloco pods status` where that variable is set"
            )
        return ""

    def _fates(self, seen: Sequence[Status]) -> dict[str, tuple[Status, Fate, str]]:
        now = self.clock()
        # Limited: pods were not silent while this machine slept.
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
        # While a provider does not answer, its machines are not asked: that is another silence.
        keys = [(one.row.label, one.is_there) for one in silent]
        self._silent_s = {key: self._silent_s.get(key, -passed_s) + passed_s for key in keys}
        fates = {
            one.row.name: (one, *fate(one, self._silent_s.get((one.row.label, one.is_there), 0.0)))
            for one in seen
        }
        for name, (_, found, why) in fates.items():
            if why and found is Fate.LIVES:
                self.tell(f"{name} is {why}")
        return fates

    async def _stop(self, wanted: Wanted) -> None:
        with self.ledger.locked():
            self.tell("the run has ended: fetching its results, and giving its pods back")
            with contextlib.suppress(UserError):
                # Also if not all of them can be given back now.
                replace(wanted, replaces=False).write(self.ledger)
            async with renters(self.ledger, self.access, self.say) as found:
                failures = await found.down(())
        for name, error in failures.items():
            self.tell(f"{name} is not given back: {error}")
        if not failures:
            self.ledger.remember(WANTED, "")

    async def _restore(self, wanted: Wanted, dead: Mapping[str, tuple[Status, str]], obstacle: str) -> None:
        for name, (_, why) in dead.items():
            self.tell(f"{name} has died: {why}; it is {'given back' if obstacle else 'replaced'}")
        async with renters(self.ledger, self.access, self.say) as found:
            failures = await found.give_back([one.row for one, _ in dead.values()], discard_results=True)
        if not failures and not obstacle:
            secrets = secrets_of(self.access.environment, list(wanted.setup.secrets or ()))
            setup = replace(wanted.setup, secrets=secrets)
            async with renters(self.ledger, self.access, self.say, to_rent=wanted.specs) as found:
                setup = found.completed(setup, wanted.specs)
                failures = await self._brought_up(found, replace(wanted, setup=setup))
        for name, error in failures.items():
            self.tell(f"{name} is not up yet: {error}")
        if obstacle:
            self.tell(f"nothing is replaced: {obstacle}")
        elif not failures:
            self.tell(f"all {len(wanted.specs)} pods train")

    async def _brought_up(self, found: Renters, wanted: Wanted) -> Failures:
        agreed = await found.plan(wanted.specs)
        if any(removal.row.state not in (State.DELETING, State.PLANNED) for removal in agreed.destroy):
            raise ProviderError(
                "living pods would have to be given back; run `diloco provision`, which asks first"
            )
        failures = await found.set_up(wanted.setup, await found.apply(agreed))
        return failures or await Swarm(found, wanted.options, wanted.setup.pod_python).start()

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
