"""The watcher does not fetch results again and again that have no place on this machine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from provisioning.errors import MachineError, ResultsNotFetched, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.pods.pod import Offer, PodSpec, State
from provisioning.providers.registry import Access
from provisioning.renting.renter import Renter
from provisioning.swarm import watcher


@pytest.mark.parametrize(("cause", "num_attempts"), [(UserError("full"), 1), (MachineError("no network"), 2)])
def test_only_a_failure_that_may_pass_is_tried_again_before_the_end(
    tmp_path, monkeypatch, cause, num_attempts
):
    ledger, attempts, fetched = Ledger(tmp_path / "pods.sqlite"), list[str](), set[str]()
    offer = Offer(id="o", provider="lium", gpu_type="A100", gpu_count=8, price_per_hour=2.0)
    added = ledger.add(PodSpec(name="ending", provider="lium"), offer, now=0.0)
    row = ledger.advance(added, State.CREATING, ends_at=1100.0)
    ledger.set_pod(row, "id", None)

    async def fetch(self: Renter, row: object) -> None:
        attempts.append("once")
        raise ResultsNotFetched("they could not be fetched") from cause

    async def close() -> None:
        pass

    provider = SimpleNamespace(name="lium", close=close)
    monkeypatch.setattr("provisioning.renting.renters.open_provider", lambda name, access: provider)
    monkeypatch.setattr(Renter, "fetch_results", fetch)
    access = Access(state_dir=tmp_path, environment={})
    for _ in range(2):
        work = watcher.keep_time(ledger, access, lambda name, text: None, fetched, 60.0, lambda: 1000.0)
        asyncio.run(work)
    ledger.close()
    assert len(attempts) == num_attempts
