"""Renting pods and giving them back, at a provider that keeps them in a list."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from provisioning.errors import HostKeyChanged, MachineError, NoCapacity, ProviderError, UserError
from provisioning.ledger.keys import FETCH, RUN_DIR
from provisioning.ledger.ledger import Ledger
from provisioning.machines.machine import Answer
from provisioning.pods.pod import Listing, Offer, Pod, PodSpec, Row, State
from provisioning.providers.cloud import Cloud
from provisioning.renting.plan import plan
from provisioning.renting.reconcile import settle
from provisioning.renting.renter import Patience, Renter
from provisioning.renting.renters import Renters, offers_of
from tests.support.hostile_provider import DENIED_AND_DONE, ORDER_LOST, TAKEN, HostileProvider
from tests.support.virtual_time import run_virtually


@dataclass
class ListProvider:
    """A provider whose requests take a moment, as real ones do; for `settle_s` after its order a pod may be missing."""

    there: list[Pod] = field(default_factory=list)
    orders: list[Row] = field(default_factory=list)
    refuses: bool = False
    name = "list"
    repeatable = False
    settle_s = doubt_s = 0.05
    keeps_time = False
    takes = ()

    async def pods(self) -> Listing:
        await asyncio.sleep(0.001)
        return Listing(pods=list(self.there))

    async def find(self, pod_id: str) -> Pod | None:
        return next((pod for pod in self.there if pod.id == pod_id), None)

    async def create(self, order: Row) -> str:
        self.orders.append(order)
        if self.refuses:
            raise NoCapacity("it is gone")
        return "id"

    async def destroy(self, pod_id: str) -> None:
        await asyncio.sleep(0.001)
        self.there = [pod for pod in self.there if pod.id != pod_id]


def offer(name: str, city: str) -> Offer:
    return Offer(
        id=name, provider="list", gpu_type="A100", gpu_count=8, price_per_hour=1.0, city=city, num_available=9
    )


PRICES = {"dear": 1.2, "cheap": 1.0}
OFFERS = [offer("a", "Paris"), offer("b", "Oslo")]


def renter(path: Path, provider: ListProvider) -> Renter:
    return Renter(
        ledger=Ledger(path / "pods.sqlite"),
        provider=provider,
        say=lambda name, text: None,
        patience=Patience(poll_s=0.005, destroy_s=5.0),
    )


@pytest.fixture
def provider() -> ListProvider:
    return ListProvider()


@pytest.fixture
def one(tmp_path: Path, provider: ListProvider) -> Renter:
    return renter(tmp_path, provider)


def rented(one: Renter, *, at: float, ttl_hours: float | None = None) -> Row:
    """The row of a pod that exists, ordered when the renter's clock showed `at`."""
    spec = PodSpec(name="pod-0", provider="list", ttl_hours=ttl_hours)
    row = one.ledger.add(spec, OFFERS[0], now=at)
    row = one.ledger.advance(row, State.CREATING, asked_at=at)
    one.provider.there.append(Pod(id="id", label=row.label, is_ready=True))
    return one.ledger.set_pod(row, "id", 1.0)


async def test_several_pods_of_which_nobody_knows_whether_they_were_rented_are_given_back_at_once(
    one, provider
):
    """As when a command dies just after it has ordered them, and the user types `down` at once."""
    for index in range(4):
        row = one.ledger.add(PodSpec(name=f"pod-{index}", provider="list"), OFFERS[0], now=one.clock())
        row = one.ledger.advance(row, State.CREATING, asked_at=one.clock())
        if index < 2:
            # Only these two orders reached the provider; the second pod's id is known.
            provider.there.append(Pod(id=f"id-{index}", label=row.label, is_ready=True))
            if index:
                one.ledger.set_pod(row, f"id-{index}", 1.0)
    assert await Renters(one.ledger, one.say, [one]).give_back(one.rows) == {}
    assert (one.rows, provider.there) == ([], [])


async def test_a_pod_ordered_while_the_clock_was_ahead_is_given_back_at_once(one, provider):
    row = rented(one, at=one.clock() + 86400)
    await asyncio.wait_for(one.give_back(row), 10.0)
    assert (one.rows, provider.there) == ([], [])
    assert one.ledger.bills()[0].dollars(one.clock()) < 0.01


async def test_a_rental_is_no_longer_because_the_clock_was_ahead_when_it_was_ordered(one):
    rented(one, at=one.clock() + 86400, ttl_hours=1)
    await asyncio.wait_for(settle(one), 10.0)
    assert one.rows[0].ends_at == pytest.approx(one.clock() + 3600, abs=60)


async def test_a_stray_is_given_back_whichever_pods_are_named(one, provider):
    rented(one, at=one.clock())
    provider.there.append(Pod(id="stray", label=f"diloco-{one.ledger.owner}-old-1", is_ready=True))
    assert await Renters(one.ledger, one.say, [one]).down(["pod-0"]) == {}
    assert (one.rows, provider.there) == ([], [])


async def test_what_cannot_be_settled_after_a_failed_order_is_reported_with_it(one, provider, monkeypatch):
    both = Renters(one.ledger, one.say, [one])
    both.failures["closed"] = UserError("no key")
    old = one.ledger.add(
        PodSpec(name="old", provider="closed"), replace(OFFERS[0], provider="closed"), now=0.0
    )
    one.ledger.set_pod(one.ledger.advance(old, State.CREATING), "old-id", None)
    rented(one, at=one.clock())
    provider.refuses = True

    async def unlisted() -> Listing:
        raise ProviderError("502")

    monkeypatch.setattr(provider, "pods", unlisted)
    failures = await both.apply(plan([PodSpec(name="new", provider="list")], [], OFFERS))
    assert {name: str(error) for name, error in failures.items()} == {
        "new": "it is gone; no other offer fits",
        "list": "502",
        "closed": "no key",
    }


async def test_a_pod_whose_host_key_is_not_pinned_is_not_up_yet(one):
    row = rented(one, at=one.clock())
    with pytest.raises(MachineError, match="pod-0 is not up yet"):
        await one.machine(row)


async def test_an_interrupted_command_leaves_no_order_in_doubt_that_it_has_not_sent(tmp_path):
    """As with Lambda, which accepts one order every twelve seconds."""

    class SlowProvider(ListProvider):
        async def create(self, order: Row) -> str:
            self.orders.append(order)
            await asyncio.sleep(3600)
            return "id"

    provider = SlowProvider()
    one = renter(tmp_path, provider)
    rows = [
        one.ledger.add(PodSpec(name=f"pod-{n}", provider="list"), OFFERS[0], now=one.clock())
        for n in range(3)
    ]
    work = [asyncio.create_task(one.until_reachable(row)) for row in rows]
    while not provider.orders:
        await asyncio.sleep(0.001)
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    assert [row.state for row in one.rows] == [State.CREATING, State.PLANNED, State.PLANNED]


def test_a_watcher_is_started_for_an_order_whose_answer_was_lost_and_pods_of_failed_orders_are_given_back(
    tmp_path,
):
    lost = HostileProvider(repeatable=False)
    lost.begin({1: (ORDER_LOST, 0.0)}, lambda: None)
    denied = HostileProvider(repeatable=False)
    denied.begin({1: (DENIED_AND_DONE, 0.0)}, lambda: None)
    watched = list[bool]()
    for directory, provider in (("lost", lost), ("denied", denied)):
        (tmp_path / directory).mkdir()
        clock = provider.clock

        async def work(provider=provider, directory=directory) -> None:
            provider.clock = asyncio.get_running_loop().time
            one = renter(tmp_path / directory, provider)
            one.clock = provider.clock
            both = Renters(one.ledger, one.say, [one])
            agreed = plan([PodSpec(name="pod-0", provider="hostile")], [], await provider.offers())
            await both.apply(agreed, lambda: watched.append(any(row.is_in_doubt for row in both.rows)))

        run_virtually(work(), now=1e6)
        provider.clock = clock
    # For each provider: before the orders are sent, and at the end.
    assert watched == [False, True, False, False]
    # Only the denied order's pod was given back, and the next offer was taken instead.
    assert [pod.deleted_at is not None for pod in lost.pods_made] == [False]
    assert [pod.deleted_at is not None for pod in denied.pods_made] == [True, False]


@pytest.mark.parametrize("wish", ["image", "volume_id"])
async def test_what_a_provider_does_not_take_is_refused_before_anything_is_rented(wish, one, provider):
    spec = replace(PodSpec(name="pod-0", provider="list"), **{wish: "x"})
    flag = f"--{wish.replace('_', '-')}"
    with pytest.raises(UserError, match=f"list takes no {flag}; leave it out"):
        await Renters(one.ledger, one.say, [one]).plan([spec])
    assert provider.orders == []


@pytest.mark.parametrize("hours", [0.01, 0.1, 2.0])
async def test_a_rental_that_is_extended_ends_no_earlier_at_a_provider_that_keeps_time(hours, one, provider):
    async def set_end(pod_id: str, ends_at: float) -> None:
        (pod,) = provider.there
        provider.there = [replace(pod, ends_at=ends_at)]

    provider.keeps_time, provider.set_end = True, set_end
    row = rented(one, at=one.clock(), ttl_hours=1)
    # Rounded up by the provider.
    await set_end("id", row.ends_at + 5.0)
    await one.read_back(row, provider.there[0])
    assert provider.there[0].ends_at == row.ends_at + 5.0
    assert await Renters(one.ledger, one.say, [one]).extend(one.rows, hours) == {}
    assert one.rows[0].ends_at == row.ends_at + hours * 3600
    assert provider.there[0].ends_at == one.rows[0].ends_at


@dataclass
class ResultsMachine:
    """A machine with a log and a model, which counts the transfers from all machines."""

    fetched: list[str]
    present: list[int]
    most: list[int]

    async def run(self, script: str, **_: object) -> Answer:
        return Answer(0, "jobs/peer/log\nruns/peer/model\n", "")

    async def fetch(self, directory: str, paths: list[str], into: Path) -> None:
        self.fetched += paths
        self.present[0] += 1
        self.most[0] = max(self.most[0], self.present[0])
        await asyncio.sleep(0.001)
        self.present[0] -= 1


async def test_eight_transfers_run_at_once_and_small_results_precede_models(
    one, provider, monkeypatch, tmp_path
):
    """If all pods sent at once, none might have sent all when its rental ends."""
    one.ledger.remember(RUN_DIR, str(tmp_path / "run"))
    one.ledger.remember(FETCH, "logs metrics model")
    for index in range(20):
        row = one.ledger.add(PodSpec(name=f"pod-{index}", provider="list"), OFFERS[0], now=0.0)
        row = one.ledger.set_pod(one.ledger.advance(row, State.CREATING, asked_at=0.0), f"id-{index}", 1.0)
        provider.there.append(Pod(id=f"id-{index}", label=row.label, is_ready=True))
        one.ledger.advance(one.ledger.advance(row, State.REACHABLE), State.SYNCED)
    fetched, most = list[str](), [0]
    machine = ResultsMachine(fetched, [0], most)

    async def machine_of(self: Renter, row: Row, pod: Pod) -> ResultsMachine:
        return machine

    monkeypatch.setattr(Renter, "machine_of", machine_of)
    assert await Renters(one.ledger, one.say, [one]).fetch_results(one.rows) == {}
    assert most == [8]
    assert fetched == ["jobs/peer/log"] * 20 + ["runs/peer/model"] * 20


async def test_a_pod_that_several_tasks_give_back_is_given_back_once(one, provider, monkeypatch):
    fetching, late = list[str](), asyncio.Event()

    async def fetch(self: Renter, row: Row, *, discard_results: bool = False, **_: object) -> None:
        if discard_results:
            fetching.append(row.name)
            await late.wait()

    async def first() -> bool:
        while len(fetching) < 2:
            await asyncio.sleep(0.001)
        found = await one.give_back(one.rows[0])
        late.set()
        return found

    monkeypatch.setattr(Renter, "fetch_results", fetch)
    row = rented(one, at=0.0, ttl_hours=1)
    others = [asyncio.create_task(settle(one)), asyncio.create_task(one.give_back(row, discard_results=True))]
    assert await asyncio.wait_for(asyncio.gather(first(), *others), 10.0) == [True, {}, True]
    assert (one.rows, provider.there) == ([], [])


async def test_an_order_that_one_provider_refuses_goes_to_the_next_offer_at_another_one(tmp_path):
    cheap, dear = HostileProvider(repeatable=True), HostileProvider(repeatable=True)
    cheap.name, dear.name = "cheap", "dear"
    cheap.begin({1: (TAKEN, 0.0)}, lambda: None)
    dear.begin({}, lambda: None)
    one, other = renter(tmp_path, cheap), renter(tmp_path, dear)
    other.ledger = one.ledger
    both = Renters(one.ledger, one.say, [one, other])
    spec = PodSpec(name="pod-0", provider="dear,cheap")
    offers = [replace(OFFERS[0], provider=name, price_per_hour=price) for name, price in PRICES.items()]
    agreed = plan([spec], [], offers)
    assert agreed.create[0].offer.provider == "cheap"
    assert await asyncio.wait_for(both.apply(agreed), 10.0) == {}
    assert (len(cheap.pods_made), len(dear.pods_made)) == (0, 1)
    assert [(found.provider, found.state) for found in both.rows] == [("dear", State.REACHABLE)]
    assert one.ledger.providers() == ["cheap", "dear"]


@dataclass
class RefusingProvider(ListProvider, Cloud):
    """An account without money, at which nothing else may work either."""

    is_checked: bool = False
    is_listed: bool = True
    name = "cheap"

    async def check(self) -> None:
        if self.is_checked:
            raise UserError("no money")

    async def pods(self) -> Listing:
        if not self.is_listed:
            raise UserError("no access")
        return await super().pods()

    async def offers(self) -> list[Offer]:
        return [replace(OFFERS[0], provider="cheap", id=name) for name in ("a", "b")]

    async def create(self, order: Row) -> str:
        self.orders.append(order)
        raise UserError("no money")


@pytest.fixture
def rich(tmp_path: Path, one: Renter) -> Renter:
    """The renter of a provider that rents."""
    provider = HostileProvider(repeatable=True)
    provider.name = "dear"
    provider.begin({}, lambda: None)
    return replace(one, provider=provider)


async def test_a_provider_that_refuses_an_order_gets_no_other_one_and_keeps_no_pod_from_being_rented(
    one, rich
):
    one.provider = poor = RefusingProvider()
    both = Renters(one.ledger, one.say, [one, rich])

    async def applied(providers: str) -> dict[str, str]:
        agreed = await both.plan([PodSpec(name="pod-0", provider=providers)])
        assert agreed.create[0].offer.key == "cheap/a"
        return {name: str(error) for name, error in (await both.apply(agreed)).items()}

    assert await applied("cheap") == {"pod-0": "no money"} and both.rows == []
    assert await applied("cheap,dear") == {}
    assert len(poor.orders) == 2 and [row.provider for row in both.rows] == ["dear"]


async def test_a_provider_that_refuses_to_list_its_offers_hides_no_others(rich):
    class Closed(RefusingProvider):
        async def offers(self) -> list[Offer]:
            raise UserError("no access")

    said = list[str]()
    found = await offers_of([Closed(), rich.provider], lambda name, text: said.append(f"{name} {text}"))
    assert {offer.provider for offer in found} == {"dear"}
    assert said == ["cheap offers nothing now: no access"]
    with pytest.raises(UserError, match="no access"):
        await offers_of([Closed()], rich.say)


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_provider_whose_check_fails_is_left_out_of_the_plan_unless_a_pod_may_be_nowhere_else(
    is_listed, one, rich
):
    said = list[str]()
    one.provider = RefusingProvider(is_checked=True, is_listed=is_listed)
    both = Renters(one.ledger, lambda name, text: said.append(f"{name} {text}"), [one, rich])
    anywhere, here = (PodSpec(name=f"in {names}", provider=names) for names in ("cheap,dear", "cheap"))
    assert [one.offer.provider for one in (await both.plan([anywhere])).create] == ["dear"]
    assert said[0] == "cheap offers nothing now: no money"
    with pytest.raises(UserError, match="no money"):
        (await both.plan([anywhere, here])).complete()
    order = one.ledger.add(anywhere, replace(OFFERS[0], provider="cheap"), now=one.clock())
    one.ledger.advance(order, State.CREATING, asked_at=one.clock())
    if not is_listed:
        with pytest.raises(ProviderError, match="cheap: no access"):
            (await both.plan([anywhere])).complete()


async def test_own_machines_whose_check_fails_are_not_replaced_by_rented_ones(one, rich):
    class OwnMachines(ListProvider):
        name = "cheap"

        async def check(self) -> None:
            raise HostKeyChanged("its host key is not known")

    one.provider = OwnMachines()
    both = Renters(one.ledger, one.say, [one, rich])
    with pytest.raises(HostKeyChanged):
        (await both.plan([PodSpec(name="pod-0", provider="cheap,dear")])).complete()


async def test_a_rental_that_is_extended_before_its_pod_fails_is_extended_for_the_next_offer(one, provider):
    async def create(order: Row) -> str:
        provider.orders.append(order)
        provider.there.append(Pod(id=order.label, label=order.label, is_ready=True, failure="preempted"))
        return order.label

    async def find(pod_id: str) -> Pod | None:
        if len(provider.orders) == 2 and not extended:
            extended.append(one.ledger.extend(provider.orders[1], 7200.0))
        return await found(pod_id)

    found, provider.create, provider.find = provider.find, create, find
    extended = list[float]()
    offers = [replace(OFFERS[0], id=str(number)) for number in range(4)]
    spec = PodSpec(name="pod-0", provider="list", ttl_hours=1)
    await Renters(one.ledger, one.say, [one]).apply(plan([spec], [], offers))
    hours = [(order.ends_at - order.asked_at) / 3600 for order in provider.orders]
    assert hours == pytest.approx([1.0, 1.0, 3.0, 3.0], abs=0.01)


async def test_after_the_last_attempt_no_further_offer_is_announced_or_written_down(tmp_path):
    provider, said = ListProvider(refuses=True), list[str]()
    one = renter(tmp_path, provider)
    both = Renters(one.ledger, lambda name, text: said.append(text), [one])
    offers = [replace(OFFERS[0], id=str(number)) for number in range(9)]
    failures = await both.apply(plan([PodSpec(name="pod-0", provider="list")], [], offers))
    assert str(failures["pod-0"]) == "4 offers failed in turn, the last one: it is gone"
    assert len(provider.orders) == 4 and both.rows == []
    assert [text.partition(" for ")[0] for text in said] == [
        *(f"it is gone; the next offer is list/{number}" for number in (1, 2, 3)),
        f"failed: {failures['pod-0']}",
    ]
