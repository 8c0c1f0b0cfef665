"""What the keeper repairs where not everything can be repaired."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from provisioning.errors import MachineError, ProviderError
from provisioning.ledger.keys import BOOT_S, DHT_POD
from provisioning.ledger.ledger import Ledger
from provisioning.machines.jobs import JobState
from provisioning.machines.setup import Setup
from provisioning.pods.pod import Listing, Offer, Pod, PodSpec, Row, State
from provisioning.providers.cloud import Cloud
from provisioning.providers.registry import Access
from provisioning.renting.each import Failures
from provisioning.renting.renter import Patience, Renter
from provisioning.renting.renters import Renters
from provisioning.swarm import keeper
from provisioning.swarm.keeper import Keeper, Wanted
from provisioning.swarm.peer import PeerProgress
from provisioning.swarm.status import Overview, Status
from provisioning.swarm.swarm import Swarm, SwarmOptions
from tests.support.hostile_provider import ReadyMachine

SPECS = [PodSpec(name=f"pod-{gpu}", provider="shop", gpu_type=gpu, gpu_count=1) for gpu in ("A100", "H100")]
OFFERS = [
    Offer(id=gpu, provider="shop", gpu_type=gpu, gpu_count=1, price_per_hour=1.0) for gpu in ("A100", "H100")
]


START_JOBS = Swarm.start_jobs


@dataclass
class Shop(Cloud):
    """A provider that rents at once, and deletes at once."""

    on_offer: list[Offer]
    there: dict[str, Pod] = field(default_factory=dict)
    orders: list[str] = field(default_factory=list)
    name = "shop"
    repeatable = False
    settle_s = doubt_s = 0.0

    async def check(self) -> None:
        pass

    async def offers(self) -> list[Offer]:
        return self.on_offer

    async def create(self, row: Row) -> str:
        self.orders.append(row.name)
        self.there[row.label] = Pod(id=row.label, label=row.label, is_ready=True)
        return row.label

    async def pods(self) -> Listing:
        return Listing(pods=list(self.there.values()))

    async def find(self, pod_id: str) -> Pod | None:
        return self.there.get(pod_id)

    async def destroy(self, pod_id: str) -> None:
        self.there.pop(pod_id, None)

    async def machine(self, pod: Pod, host_key: str) -> Any:
        return ReadyMachine()

    async def host_key(self, pod: Pod) -> str:
        return "key"


@dataclass
class Repaired:
    """A keeper of two pods, whose processes were all killed. `started`: the pods that were set up at each start."""

    ledger: Ledger
    shop: Shop
    started: list[list[str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def rent(self) -> None:
        for spec, offer in zip(SPECS, OFFERS, strict=True):
            row = self.ledger.advance(self.ledger.add(spec, offer, now=0.0), State.CREATING)
            self.shop.there[row.label] = Pod(id=row.label, label=row.label, is_ready=True)
            row = self.ledger.set_pod(row, row.label, None)
            for state in (State.REACHABLE, State.SYNCED, State.RUNNING):
                row = self.ledger.advance(row, state)

    def tick(self) -> None:
        access = Access(state_dir=self.ledger.path.parent, environment={})
        kept = Keeper(self.ledger, access, lambda name, text: self.told.append(text))
        asyncio.run(kept.tick())


@pytest.fixture
def repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repaired]:
    found = Repaired(Ledger(tmp_path / "pods.sqlite"), Shop(list(OFFERS)))
    found.rent()
    setup = Setup(source=tmp_path)
    Wanted(specs=SPECS, replaces=True, stops_when_idle=False, setup=setup, options=SwarmOptions()).write(
        found.ledger
    )

    async def look(*_: object) -> Overview:
        killed = PeerProgress(JobState(is_running=False, code=None))
        return Overview([Status(row, True, "", killed) for row in found.ledger.rows()], {})

    async def set_up_one(self: Renters, row: Row, setup: Setup, **_: object) -> None:
        pass

    async def start_jobs(self: Swarm) -> Failures:
        found.started.append([row.name for row in found.ledger.rows() if row.state == State.SYNCED])
        return {}

    monkeypatch.setattr(keeper, "overview", look)
    monkeypatch.setattr(Renters, "set_up_one", set_up_one)
    monkeypatch.setattr(Swarm, "start_jobs", start_jobs)
    monkeypatch.setattr("provisioning.renting.renters.open_provider", lambda name, access: found.shop)
    yield found
    found.ledger.close()


def test_a_pod_that_cannot_be_had_keeps_no_other_from_being_replaced(repaired):
    del repaired.shop.on_offer[1:]
    repaired.tick()
    assert (repaired.shop.orders, repaired.started) == (["pod-A100"], [["pod-A100"]])
    assert any(text.startswith("pod-H100 is not up yet: No offer of shop") for text in repaired.told)


def test_a_pod_that_cannot_be_set_up_keeps_no_other_from_being_started(repaired, monkeypatch):
    async def set_up_one(self: Renters, row: Row, setup: Setup, **_: object) -> None:
        if row.name == "pod-A100":
            raise MachineError("no disk space")

    monkeypatch.setattr(Renters, "set_up_one", set_up_one)
    repaired.tick()
    assert repaired.started == [["pod-H100"]]
    assert "pod-A100 is not up yet: no disk space" in repaired.told


def test_a_pod_that_cannot_be_given_back_keeps_no_other_from_being_replaced(repaired, monkeypatch):
    attempts, give_back = list[str](), Renter.give_back

    async def given_back(self: Renter, row: Row, **options: Any) -> bool:
        attempts.append(row.name)
        if row.name == "pod-A100":
            self.ledger.advance(row, State.DELETING)
            raise ProviderError("it is still there")
        return await give_back(self, row, **options)

    monkeypatch.setattr(Renter, "give_back", given_back)
    repaired.tick()
    assert sorted(attempts) == ["pod-A100", "pod-H100"]
    assert (repaired.shop.orders, repaired.started) == (["pod-H100"], [["pod-H100"]])
    assert "pod-A100 is not up yet: it is still there" in repaired.told


def test_a_repair_does_not_wait_for_the_first_epoch_of_what_it_has_started(repaired, monkeypatch):
    async def progress(self: Swarm, row: Row) -> PeerProgress:
        return PeerProgress(JobState(is_running=True, code=None), epoch=0)

    async def join_dht(self: Swarm, row: Row, running: list[Row]) -> None:
        self._dht_address = "--initial-peers"

    async def wait(self: Swarm, rows: list[Row]) -> Failures:
        pytest.fail("waits, while no other pod is looked at")

    monkeypatch.setattr(Swarm, "start_jobs", START_JOBS)
    monkeypatch.setattr(Swarm, "progress", progress)
    monkeypatch.setattr(Swarm, "_join_dht", join_dht)
    monkeypatch.setattr(Swarm, "_until_in_epoch_one", wait)
    repaired.tick()
    assert repaired.told[-1] == "the peers of all 2 pods run"
    assert {row.state for row in repaired.ledger.rows()} == {State.RUNNING}


def test_a_pod_that_dies_while_the_replacement_of_another_boots_is_replaced_before_that_is_up(
    repaired, monkeypatch
):
    first, second = repaired.ledger.rows()
    runs, killed = (PeerProgress(JobState(is_running=one, code=None)) for one in (True, False))
    create = Shop.create

    async def look(*_: object) -> Overview:
        rows = repaired.ledger.rows()
        dead = [first.label] if not repaired.shop.orders else [first.label, second.label]
        return Overview([Status(row, True, "", killed if row.label in dead else runs) for row in rows], {})

    async def slow(self: Shop, row: Row) -> str:
        pod_id = await create(self, row)
        if row.name == first.name:
            self.there[row.label] = replace(self.there[row.label], is_ready=False)
        return pod_id

    monkeypatch.setitem(Patience.__init__.__kwdefaults__, "poll_s", 0.001)
    monkeypatch.setattr(keeper, "KEEP_INTERVAL_S", 0.01)
    monkeypatch.setattr(keeper, "overview", look)
    monkeypatch.setattr(Shop, "create", slow)
    repaired.ledger.remember(BOOT_S, "5")
    repaired.tick()
    assert repaired.shop.orders == ["pod-A100"]
    assert any(text.startswith("pod-A100 is not up yet") for text in repaired.told)
    (label,) = (row.label for row in repaired.ledger.rows() if row.name == first.name)

    async def ready(self: Shop, row: Row) -> str:
        self.there[label] = replace(self.there[label], is_ready=True)
        return await create(self, row)

    monkeypatch.setattr(Shop, "create", ready)
    repaired.tick()
    assert repaired.shop.orders == ["pod-A100", "pod-H100"]
    assert repaired.started[-1] == ["pod-A100", "pod-H100"]


def test_a_rental_that_is_extended_while_its_pod_is_replaced_is_extended_for_the_replacement(
    repaired, monkeypatch
):
    give_back, ends_at = Renter.give_back, time.time() + 3600.0
    for row in repaired.ledger.rows():
        repaired.ledger.advance(row, State.RUNNING, ends_at=ends_at)

    async def extended(self: Renter, row: Row, **options: Any) -> bool:
        if row.name == "pod-A100":
            self.ledger.extend(row, 7200.0)
        return await give_back(self, row, **options)

    monkeypatch.setattr(Renter, "give_back", extended)
    repaired.tick()
    assert sorted(repaired.shop.orders) == ["pod-A100", "pod-H100"]
    ends = {row.name: row.ends_at - ends_at for row in repaired.ledger.rows()}
    assert ends == pytest.approx({"pod-A100": 7200.0, "pod-H100": 0.0}, abs=100.0)


@pytest.mark.parametrize("state", [State.PLANNED, State.BOOTING, State.REACHABLE, State.SYNCED])
def test_a_pod_without_a_peer_is_given_back_once_the_budget_is_spent_while_the_others_train(
    repaired, monkeypatch, state
):
    ledger = repaired.ledger
    (spec, _), (offer, _) = SPECS, OFFERS
    new = ledger.add(replace(spec, name="new"), offer, now=time.time())
    if state != State.PLANNED:
        new = ledger.advance(new, State.CREATING)
        repaired.shop.there[new.label] = Pod(id=new.label, label=new.label, is_ready=True)
        new = ledger.set_pod(new, new.label, None)
        for later in (State.REACHABLE, State.SYNCED):
            new = ledger.advance(new, later) if new.state != state else new
    wanted = Wanted.read(ledger)
    assert wanted is not None and new.state == state

    async def look(*_: object) -> Overview:
        runs = PeerProgress(JobState(is_running=True, code=None))
        rows = ledger.rows()
        seen = [Status(row, True, "", None if row.name == "new" else runs) for row in rows]
        if len(looks) == 0 and state == State.SYNCED:
            # Its start was not written down, or a command has started it meanwhile.
            seen = [replace(one, progress=runs) for one in seen]
        elif len(looks) < 2:
            seen = [replace(one, row=replace(one.row, state=State.CREATING)) for one in seen]
        looks.append(state)
        return Overview(seen, {})

    looks = list[State]()
    monkeypatch.setattr(keeper, "overview", look)
    replace(wanted, budget=0.0, setup=replace(wanted.setup, secrets={"MINE": ""})).write(ledger)
    for _ in range(2):
        repaired.tick()
        assert [row.name for row in ledger.rows()] == ["pod-A100", "pod-H100", "new"]
    repaired.tick()
    assert [row.name for row in ledger.rows()] == ["pod-A100", "pod-H100"]
    assert len(repaired.shop.there) == 2 and repaired.shop.orders == []
    assert "new has no peer and gets none; it is given back" in repaired.told


def test_a_pod_without_a_peer_waits_for_the_secrets_that_its_peer_needs(repaired):
    ledger = repaired.ledger
    for row in ledger.rows():
        ledger.forget(ledger.advance(row, State.DELETING), now=0.0)
    ledger.advance(ledger.add(SPECS[0], OFFERS[0], now=time.time()), State.CREATING)
    wanted = Wanted.read(ledger)
    assert wanted is not None
    replace(wanted, budget=1e9, setup=replace(wanted.setup, secrets={"MINE": ""})).write(ledger)
    repaired.tick()
    assert [row.name for row in ledger.rows()] == ["pod-A100"]


@pytest.mark.parametrize("state", [State.RUNNING, State.DELETING])
def test_nothing_is_rented_that_could_not_be_started_until_the_coordinator_s_pod_answers(
    repaired, monkeypatch, state
):
    first, _ = repaired.ledger.rows()
    repaired.ledger.remember(DHT_POD, first.name)
    killed = PeerProgress(JobState(is_running=False, code=None))
    answers = False

    async def look(*_: object) -> Overview:
        rows = repaired.ledger.rows()
        return Overview(
            [Status(row, True, "", None if row.name == first.name else killed) for row in rows], {}
        )

    async def progress(self: Swarm, row: Row) -> PeerProgress:
        if not answers:
            raise MachineError("no answer")
        return killed

    async def end(self: Renter, row: Row) -> None:
        if not answers and row.name == first.name:
            raise ProviderError("it is still there")
        await ends(self, row)

    ends = Renter.end
    monkeypatch.setattr(keeper, "overview", look)
    monkeypatch.setattr(Swarm, "progress", progress)
    monkeypatch.setattr(Renter, "end", end)
    repaired.ledger.advance(first, state)
    repaired.tick()
    # The second pod was dead, and is given back.
    assert [row.name for row in repaired.ledger.rows()] == [first.name]
    assert (repaired.shop.orders, repaired.started) == ([], [])
    assert any("the coordinator may run on it, so nothing is rented" in text for text in repaired.told)
    answers = True
    repaired.tick()
    assert repaired.shop.orders[-1] == "pod-H100" and len(repaired.started) == 1


def test_no_second_coordinator_is_started_while_the_pod_of_the_first_may_be_there(repaired, monkeypatch):
    monkeypatch.undo()
    first, second = repaired.ledger.rows()
    repaired.ledger.advance(first, State.DELETING)
    repaired.ledger.remember(DHT_POD, first.name)
    asked = list[str]()

    async def progress(self: Swarm, row: Row) -> PeerProgress:
        asked.append(row.name)
        return PeerProgress(JobState(is_running=False, code=None))

    monkeypatch.setattr(Swarm, "progress", progress)
    renter = Renter(ledger=repaired.ledger, provider=repaired.shop, say=lambda name, text: None)
    found = Renters(repaired.ledger, renter.say, [renter])
    found.set_up_here.add(second.label)
    assert asyncio.run(Swarm(found, SwarmOptions(), Setup(source=Path("/none"))).start()) == {}
    # Only its progress was read.
    assert asked == [second.name] and repaired.ledger.recall(DHT_POD) == first.name
