"""Results that are fetched after the rental end, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from provisioning.ledger.keys import FETCH, RUN_DIR
from provisioning.ledger.ledger import Ledger
from provisioning.machines.machine import Answer
from provisioning.pods.pod import Listing, Offer, Pod, PodSpec, State
from provisioning.renting.each import Failures
from provisioning.renting.reconcile import settle
from provisioning.renting.renter import Renter
from tests.support.virtual_time import run_virtually

NUM_PODS = 12
ENDS_AT = 3600.0


@dataclass
class Slow:
    """The provider of pods whose results take `fetch_s` each, and their only machine."""

    fetch_s: float = 0.0
    there: dict[str, Pod] = field(default_factory=dict)
    num_fetched: int = 0
    name = "slow"
    settle_s = doubt_s = 0.0
    keeps_time = repeatable = False

    async def pods(self) -> Listing:
        return Listing(pods=list(self.there.values()))

    async def find(self, pod_id: str) -> Pod | None:
        return self.there.get(pod_id)

    async def destroy(self, pod_id: str) -> None:
        self.there.pop(pod_id, None)

    async def machine(self, pod: Pod, host_key: str) -> Any:
        return self

    async def run(self, script: str) -> Answer:
        return Answer(0, "jobs/peer/log\n", "")

    async def fetch(self, directory: str, paths: list[str], into: Path) -> None:
        await asyncio.sleep(self.fetch_s)
        self.num_fetched += 1


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Renter, Slow]]:
    """Pods whose rentals end at once."""
    ledger, provider = Ledger(tmp_path / "pods.sqlite"), Slow()
    ledger.remember(RUN_DIR, str(tmp_path / "run"))
    ledger.remember(FETCH, "logs")
    offer = Offer(id="o", provider="slow", gpu_type="A100", gpu_count=1, price_per_hour=1.0)
    for index in range(NUM_PODS):
        spec = PodSpec(name=f"pod-{index}", provider="slow", ttl_hours=ENDS_AT / 3600)
        row = ledger.advance(ledger.add(spec, offer, now=0.0), State.CREATING)
        provider.there[row.label] = Pod(id=row.label, label=row.label, is_ready=True)
        row = ledger.set_pod(row, row.label, None)
        ledger.advance(ledger.advance(row, State.REACHABLE), State.SYNCED)
    yield Renter(ledger=ledger, provider=provider, say=lambda name, text: None), provider
    ledger.close()


def settled(one: Renter) -> float:
    """Settle at the rental end. Returns the seconds that this takes."""

    async def work() -> Failures:
        one.clock = asyncio.get_running_loop().time
        return await settle(one)

    failures, now = run_virtually(work(), now=ENDS_AT)
    assert failures == {} and one.rows == []
    return now - ENDS_AT


def test_the_time_in_which_results_wait_for_others_does_not_count(slow):
    one, provider = slow
    provider.fetch_s = 200.0
    assert settled(one) == pytest.approx(400.0)
    assert provider.num_fetched == NUM_PODS


def test_results_that_do_not_come_keep_no_pod_whose_time_is_over(slow):
    one, provider = slow
    provider.fetch_s = 3600.0
    said = list[str]()
    one.say = lambda name, text: said.append(text)
    assert settled(one) == pytest.approx(600.0)
    assert (provider.num_fetched, provider.there) == (0, {})
    assert said.count("of its results, what did not arrive within minutes of its end is lost") == NUM_PODS
