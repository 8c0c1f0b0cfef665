"""Whatever a provider answers, and wherever a command dies: every pod that was ever made is deleted, or shown.

DILOCO_POD_SCHEDULES=10000 tries 10000 schedules in place of 200.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from hypothesis import example, given, settings
from hypothesis import strategies as st

from provisioning.errors import ProvisioningError
from provisioning.ledger.ledger import Ledger
from provisioning.pods.pod import PodSpec, Row, name_in_label
from provisioning.providers.registry import Access
from provisioning.renting.reconcile import Observation, settle
from provisioning.renting.renter import Patience, Renter
from provisioning.renting.renters import Renters
from provisioning.swarm.status import overview
from tests.support.hostile_provider import (
    DELAYS_S,
    DOUBT_S,
    LISTS,
    NUM_FATES,
    SETTLE_S,
    TWIN,
    Fates,
    HostileProvider,
    RealPod,
)
from tests.support.virtual_time import run_virtually

NUM_SCHEDULES = int(os.environ.get("DILOCO_POD_SCHEDULES", "200"))
PATIENCE = Patience(poll_s=10.0, boot_s=100.0, destroy_s=60.0)


class Killed(BaseException):
    """kill -9: nothing is caught, and nothing more is done."""


@dataclass
class Life:
    """The life of one command, which is killed after `steps_left` steps, or never if that is None."""

    steps_left: int | None

    def step(self) -> None:
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise Killed


class MortalLedger(Ledger):
    """A ledger whose command may die before and after everything that it writes."""

    life = Life(None)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.life.step()
        with super()._transaction():
            yield
        self.life.step()


@dataclass
class World:
    """One state file and one provider, which many commands use in turn."""

    path: Path
    provider: HostileProvider = field(init=False)
    now: float = 1e6
    ever_known: set[str] = field(default_factory=set)

    def run(self, what: str, num_pods: int, steps_left: int | None, fates: Fates) -> None:
        ledger = MortalLedger(self.path)
        ledger.life = Life(steps_left)
        self.provider.begin(fates, ledger.life.step)
        ledger._db.execute("PRAGMA synchronous = OFF")
        result, self.now = run_virtually(self._command(what, num_pods, ledger), now=self.now)
        ledger.close()
        self.provider.clock = lambda: self.now
        if isinstance(result, BaseException) and not isinstance(result, ProvisioningError | Killed):
            raise result

    async def _command(self, what: str, num_pods: int, ledger: MortalLedger) -> None:
        clock = asyncio.get_running_loop().time
        self.provider.clock = clock
        self.provider.before_order = lambda order: self.check_not_rented_twice(ledger, order)
        renter = self._renter(ledger)
        found = Renters(ledger, renter.say, [renter])
        match what:
            case "provision":
                specs = [PodSpec(name=f"pod-{index}", provider="hostile") for index in range(num_pods)]
                await found.apply(await found.plan(specs))
            case "down":
                await found.give_back(found.rows)
            case "reconcile":
                await settle(renter)

    def _renter(self, ledger: Ledger) -> Renter:
        return Renter(
            ledger=ledger,
            provider=self.provider,  # type: ignore[arg-type]
            say=lambda name, text: None,
            patience=PATIENCE,
            clock=asyncio.get_running_loop().time,
        )

    def check_overview(self, fates: Fates) -> None:
        """Check that `pods status` shows every living pod as one that may cost money.

        With `fates`, a pod without a row may be missing: the provider may leave it out of its listing.
        """
        ledger = Ledger(self.path)
        self.provider.begin(fates, lambda: None)

        @asynccontextmanager
        async def opened(*_: object) -> AsyncIterator[Renters]:
            renter = self._renter(ledger)
            yield Renters(ledger, renter.say, [renter])

        async def look() -> None:
            self.provider.clock = asyncio.get_running_loop().time
            seen = await overview(ledger, Access(state_dir=self.path.parent, environment={}))
            for pod in self.living:
                known = self.provider._shown(pod)
                shown = [one for one in seen.pods if one.row.is_pod(known)]
                is_listed = pod.is_known(self.provider.clock()) and not fates
                if is_listed or any(row.is_pod(known) for row in ledger.rows()):
                    assert any(one.may_cost for one in shown), f"{pod} lives, and is shown as {shown}"

        with mock.patch("provisioning.swarm.status.renters", opened):
            result, _ = run_virtually(look(), now=self.now)
        ledger.close()
        self.provider.clock = lambda: self.now
        if result is not None:
            raise result

    def check_not_rented_twice(self, ledger: Ledger, order: Row) -> None:
        """No pod is ordered while a known pod of the same name lives."""
        living = {pod.id for pod in self.living}
        rows = [
            row
            for row in ledger.rows()
            if row.name == name_in_label(order.label, ledger.owner) and row.provider_id in living
        ]
        assert not rows, f"{order.label} is ordered while {rows[0].provider_id} lives"

    @property
    def living(self) -> list[RealPod]:
        return [pod for pod in self.provider.pods_made if pod.lives(self.provider.clock())]

    @property
    def rows(self) -> list[Row]:
        return self.rows_and_owner()[0]

    def rows_and_owner(self) -> tuple[list[Row], str]:
        ledger = Ledger(self.path)
        try:
            return ledger.rows(), ledger.owner
        finally:
            ledger.close()

    def check(self) -> None:
        rows, owner = self.rows_and_owner()
        self.ever_known |= {row.provider_id for row in rows if row.provider_id}
        in_ledger = {
            pod.id for pod in self.living if any(row.is_pod(self.provider._shown(pod)) for row in rows)
        }
        seen = [self.provider._shown(pod) for pod in self.living if pod.is_known(self.now)]
        strays = {pod.id for pod in Observation(pods=seen).strays(rows, owner)}
        for pod in self.living:
            if pod.id in self.ever_known:
                assert pod.id in in_ledger, f"{pod} was known, lives, and has no row any more"
            if pod.is_known(self.now):
                assert pod.id in in_ledger | strays, f"{pod} is neither in the ledger nor shown as a stray"
            is_extra = pod.id.endswith(TWIN) or pod.was_denied
            if not is_extra and self.now < pod.ordered_at + SETTLE_S + DOUBT_S:
                assert pod.id in in_ledger, f"{pod} may come yet, and its order is forgotten"


# Fates by the number of the request within its command; all other requests succeed.
fates = st.dictionaries(
    st.integers(1, 4) | st.integers(1, 20),
    st.tuples(st.integers(0, NUM_FATES - 1), st.sampled_from(DELAYS_S)),
    max_size=4,
)
commands = st.lists(
    st.tuples(
        st.sampled_from(["provision", "provision", "down", "reconcile"]),
        st.integers(1, 2),
        st.none() | st.integers(0, 30),
        fates,
        st.sampled_from([1.0, 61.0, 700.0]),
    ),
    min_size=1,
    max_size=6,
)


PART_IS_SILENT = (LISTS.index("a part is silent"), 0.0)


@settings(max_examples=NUM_SCHEDULES)
@given(commands, st.booleans())
# A command dies after its order, and part of the provider is silent when the next one looks for the pod.
@example(
    [
        ("provision", 1, None, {}, 1.0),
        ("provision", 2, 6, {}, 1.0),
        ("provision", 2, None, {1: PART_IS_SILENT}, 1.0),
    ],
    False,
)
def test_every_pod_ever_made_is_deleted_or_shown(tmp_path_factory, commands, repeatable):
    world = World(tmp_path_factory.mktemp("ledger") / "pods.sqlite")
    world.provider = HostileProvider(repeatable=repeatable)
    for what, num_pods, steps_left, fates, pause_s in commands:
        world.run(what, num_pods, steps_left, fates)
        world.check()
        world.check_overview({})
        world.check_overview(fates)
        world.now += pause_s
    # From now on the provider makes no faults.
    world.now += max(DELAYS_S)
    for what in ("down", "reconcile", "reconcile", "down"):
        world.run(what, 0, None, {})
        world.check()
        world.now += DOUBT_S / 2
    assert (world.living, world.rows) == ([], [])
