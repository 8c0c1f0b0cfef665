"""`diloco pods extend`, whatever else is done with the pods meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from diloco.cli import pods
from provisioning.ledger.ledger import Ledger
from provisioning.pods.pod import Listing, Offer, Pod, PodSpec, Row, State
from provisioning.renting import reconcile
from provisioning.renting.renter import Renter
from provisioning.renting.renters import Renters

OFFER = Offer(id="o", provider="lium", gpu_type="A100", gpu_count=8, price_per_hour=2.0)


@dataclass
class Keeping:
    """A provider that ends rentals itself. `until[id]` is their end; while it is set, `row` becomes `state`."""

    ledger: Ledger
    row: Row
    state: State = State.SYNCED
    until: dict[str, float] = field(default_factory=dict)
    name = "lium"
    keeps_time = True
    settle_s = doubt_s = 0.0

    async def find(self, pod_id: str) -> Pod | None:
        return Pod(id=pod_id, label=pod_id, is_ready=True, ends_at=self.until.get(pod_id))

    async def pods(self) -> Listing:
        return Listing(pods=[])

    async def set_end(self, pod_id: str, ends_at: float) -> None:
        self.until[pod_id] = ends_at
        self.ledger.advance(self.row, self.state)

    async def close(self) -> None:
        pass


@pytest.fixture
def provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeping]:
    ledger = Ledger(tmp_path / "pods.sqlite")
    row = ledger.add(PodSpec(name="pod-0", provider="lium", ttl_hours=1), OFFER, now=1000.0)
    row = ledger.set_pod(ledger.advance(row, State.CREATING), "id", None)
    found = Keeping(ledger, ledger.advance(row, State.REACHABLE))
    monkeypatch.setattr("provisioning.renting.renters.open_provider", lambda name, access: found)
    monkeypatch.setattr(pods, "ensure_watcher", lambda ledger: None)
    yield found
    ledger.close()


def test_a_rental_is_extended_while_pods_are_replaced_and_the_pods_state_stays(provider):
    ledger, end = provider.ledger, provider.row.ends_at
    with ledger.locked():
        assert pods.extend(hours=2.0, state_file=ledger.path) == 0
    (row,) = ledger.rows()
    assert (row.state, row.ends_at, provider.until) == (State.SYNCED, end + 7200, {"id": end + 7200})


def test_a_rental_is_not_extended_once_its_pod_is_given_back(provider, capsys):
    ledger, end, provider.state = provider.ledger, provider.row.ends_at, State.DELETING
    assert pods.extend(hours=2.0, state_file=ledger.path) == 1
    assert "!!! pod-0: pod-0 is given back, so its rental was not extended." in capsys.readouterr().err
    assert pods.extend(hours=2.0, state_file=ledger.path) == 0
    assert ledger.rows()[0].ends_at == end


def test_a_replacement_is_extended_by_name_though_its_dead_predecessor_is_not_gone_yet(provider):
    ledger = provider.ledger
    ledger.advance(provider.row, State.DELETING)
    row = ledger.advance(ledger.add(provider.row.spec, OFFER, now=2000.0), State.CREATING)
    provider.row = ledger.advance(ledger.set_pod(row, "new", None), State.REACHABLE)
    assert pods.extend("pod-0", hours=2.0, state_file=ledger.path) == 0
    assert provider.until == {"new": row.ends_at + 7200}
    assert [one.ends_at for one in ledger.rows()] == [4600.0, row.ends_at + 7200]


def test_of_two_extensions_at_once_none_is_lost(provider):
    set_end, ends = provider.set_end, [provider.row.ends_at + 7200, provider.row.ends_at + 10800]

    async def slow(pod_id: str, ends_at: float) -> None:
        if not provider.until:
            # Another command is faster.
            provider.ledger.extend(provider.row, 3600.0)
        await set_end(pod_id, ends_at)
        assert ends_at == ends.pop(0)

    provider.set_end = slow
    assert pods.extend(hours=2.0, state_file=provider.ledger.path) == 0
    assert ends == []
    assert provider.ledger.rows()[0].ends_at == provider.until["id"] == provider.row.ends_at + 10800


async def test_an_extension_while_the_pod_is_ordered_outlives_the_end_that_the_order_schedules(provider):
    ledger, set_end, ends = (
        provider.ledger,
        provider.set_end,
        [provider.row.ends_at + more for more in (0, 7200)],
    )
    one = Renter(ledger=ledger, provider=provider, say=lambda name, text: None)

    async def slow(pod_id: str, ends_at: float) -> None:
        if not provider.until:
            provider.until["id"] = 0.0
            assert await Renters(ledger, one.say, [one]).extend([provider.row], 2.0) == {}
            assert provider.until == {"id": ends[1]}
        await set_end(pod_id, ends_at)

    provider.set_end = slow
    order = ledger.add(replace(provider.row.spec, name="new"), OFFER, now=1000.0)
    provider.row, provider.state = ledger.advance(order, State.CREATING), State.BOOTING
    await one.read_back(provider.row, await provider.find("id"))
    assert ledger.rows()[1].ends_at == provider.until["id"] == ends[1]


def test_a_pod_that_is_being_ordered_is_extended_without_its_provider(provider):
    ledger = provider.ledger
    row = ledger.add(replace(provider.row.spec, name="new"), OFFER, now=1000.0)
    assert pods.extend("new", hours=2.0, state_file=ledger.path) == 0
    assert (ledger.rows()[1].ends_at, provider.until) == (row.ends_at + 7200, {})


def test_an_end_that_an_order_schedules_just_before_an_extension_is_written_down_is_scheduled_again(
    provider, monkeypatch
):
    extend = Ledger.extend

    def late(self: Ledger, row: Row, extra_s: float) -> float:
        provider.until["id"] = provider.row.ends_at
        return extend(self, row, extra_s)

    monkeypatch.setattr(Ledger, "extend", late)
    assert pods.extend(hours=2.0, state_file=provider.ledger.path) == 0
    assert provider.until == {"id": provider.row.ends_at + 7200}


async def test_a_pod_whose_rental_is_extended_while_its_last_results_are_fetched_stays(provider, monkeypatch):
    async def fetch(self: Renter, row: Row, **_: object) -> None:
        self.ledger.extend(row, 9e9 - row.ends_at)

    monkeypatch.setattr(Renter, "fetch_results", fetch)
    one = Renter(ledger=provider.ledger, provider=provider, say=lambda name, text: None)
    assert await reconcile.settle(one) == {}
    assert [(row.state, row.ends_at) for row in provider.ledger.rows()] == [(State.REACHABLE, 9e9)]
