"""Many pods boot at once, at a cloud that limits the rate of requests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from provisioning.errors import MachineError, NoCapacity
from provisioning.ledger.ledger import Ledger
from provisioning.machines.machine import Answer
from provisioning.pods.pod import Listing, Offer, Pod, PodSpec, Row, State
from provisioning.providers import backoff
from provisioning.providers.http import HttpCloud
from provisioning.renting.each import each
from provisioning.renting.renter import Patience, Renter

pytest.importorskip("httpx", reason="the package httpx is not installed")

LEAST_S = 0.02


class LimitedCloud(HttpCloud):
    """Refuses each request within LEAST_S of the last accepted one. Its listings show the first pods only."""

    name = title = "limited"
    key_env, keys_at, url = "LIMITED_API_KEY", "a web page", "http://limited"
    pod_path = "/pods/{}"
    settle_s = 0.05

    def __init__(self, num_pods: int, num_listed: int) -> None:
        super().__init__({self.key_env: "key"}, Path("key"))
        self.ids = [f"id-{index}" for index in range(num_pods)]
        self.num_listed = num_listed
        self.began_at = time.monotonic()
        self.accepted_at = 0.0
        self.paths: list[str] = []
        self.num_refused = 0

    async def _exchanged(self, method: str, path: str, body: Any) -> tuple[int, dict[str, str], bytes]:
        now = time.monotonic()
        if now < self.accepted_at + LEAST_S:
            self.num_refused += 1
            return 429, {}, b""
        self.accepted_at = now
        self.paths.append(path)
        found = self.ids[: self.num_listed] if path == "/pods" else path.rpartition("/")[2]
        return 200, {}, json.dumps(found).encode()

    @staticmethod
    def refusal(status: int, body: Any) -> tuple[str, None]:
        return "too many requests", None

    def pod_in(self, found: str) -> Pod:
        return Pod(id=found, label=found, is_ready=time.monotonic() > self.began_at + 0.15)

    async def pods(self) -> Listing:
        return Listing(pods=[self.pod_in(one) for one in await self.request("GET", "/pods")])

    async def offers(self) -> list[Offer]:
        return []

    async def create(self, row: Row) -> str:
        raise AssertionError

    async def host_key(self, pod: Pod) -> str:
        return "ssh-ed25519 AAAA"

    async def machine(self, pod: Pod, host_key: str) -> Any:
        return AnsweringMachine()


class AnsweringMachine:
    async def run(self, script: str) -> Answer:
        return Answer(0, "", "")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("is_late", [True, False])
async def test_the_time_in_which_a_pod_has_to_be_up_does_not_begin_anew_with_each_call(is_late, tmp_path):
    cloud, ledger = LimitedCloud(1, 1), Ledger(tmp_path / "pods.sqlite")
    cloud.began_at += 9e9
    patience = Patience(poll_s=0.03, boot_s=20.0)
    one = Renter(ledger=ledger, provider=cloud, say=lambda name, text: None, patience=patience)
    offer = Offer(id="a", provider="limited", gpu_type="A100", gpu_count=8, price_per_hour=1.0)
    row = ledger.add(PodSpec(name="pod-0", provider="limited"), offer, now=one.clock())
    asked_at = one.clock() - (21.0 if is_late else 0.0)
    row = ledger.set_pod(ledger.advance(row, State.CREATING), "id-0", 1.0, asked_at=asked_at)
    one.has_other_work = not is_late
    with pytest.raises(NoCapacity if is_late else MachineError, match=r"not up within 20 s|still boots"):
        await one.until_reachable(row)
    await one.close()
    assert one.rows == [row]


@pytest.mark.parametrize("num_listed", [15, 0])
async def test_many_pods_boot_at_a_cloud_that_accepts_few_requests(num_listed, tmp_path, monkeypatch):
    monkeypatch.setattr(backoff, "FIRST_DELAY_S", 0.005)
    cloud, ledger = LimitedCloud(15, num_listed), Ledger(tmp_path / "pods.sqlite")
    patience = Patience(poll_s=0.03, boot_s=20.0)
    one = Renter(ledger=ledger, provider=cloud, say=lambda name, text: None, patience=patience)
    offer = Offer(id="a", provider="limited", gpu_type="A100", gpu_count=8, price_per_hour=1.0)
    for pod_id in cloud.ids:
        row = ledger.add(PodSpec(name=pod_id, provider="limited"), offer, now=one.clock())
        row = ledger.advance(row, State.CREATING, asked_at=one.clock())
        ledger.set_pod(row, pod_id, 1.0)
    assert await each(one.rows, one.until_reachable) == {}
    await one.close()
    assert {row.state for row in one.rows} == {State.REACHABLE}
    # Those that a listing lacks are asked for one by one.
    assert set(cloud.paths) == {"/pods", *(f"/pods/{one}" for one in cloud.ids[num_listed:])}
    assert cloud.num_refused < len(cloud.paths)
