"""One request over several providers: the cheapest offer that fits first, wherever it is, then the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from provisioning.ledger.ledger import Ledger
from provisioning.machines.setup import Setup
from provisioning.pods.pod import PodSpec
from provisioning.providers.registry import Access
from provisioning.renting.renters import renters
from provisioning.swarm.status import overview
from tests.support.fleets import PATIENCE, Outcome, command
from tests.support.http_api import Fault
from tests.support.pods_driver import STAND_IN, source_of
from tests.support.runpod_api import RunPodApi
from tests.support.ssh_machines import needs_rsync, ssh_host
from tests.support.vast_api import VastApi

pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
pytestmark = pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync())

SPECS = [
    PodSpec(name=f"pod-{index}", provider="runpod,vast", gpu_type="A100", gpu_count=1) for index in range(2)
]


@dataclass
class Clouds:
    directory: Path
    runpod: RunPodApi
    vast: VastApi
    said: list[str] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.directory / "pods.sqlite")

    @property
    def access(self) -> Access:
        environment = {**self.runpod.environment, **self.vast.environment}
        return Access(state_dir=self.directory, environment=environment)

    def say(self, name: str, text: str) -> None:
        self.said.append(f"{name}: {text}")

    def up(self) -> Outcome:
        async def work() -> Outcome:
            setup = Setup(source=source_of(self.directory), python=str(STAND_IN), min_free_mb=1)
            async with renters(self.ledger, self.access, self.say, PATIENCE, to_rent=SPECS) as found:
                return Outcome(await found.set_up(setup, await found.apply(await found.plan(SPECS))))

        return asyncio.run(work())

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        return [(row.name, row.provider, str(row.state)) for row in self.ledger.rows()]


@pytest.fixture
def clouds(tmp_path: Path) -> Iterator[Clouds]:
    with ExitStack() as stack:
        hosts = [stack.enter_context(ssh_host(tmp_path / f"host{index}", "")) for index in range(4)]
        for host in hosts:
            host.install("nvidia-smi", "echo 'A100, 40960 MiB'")
        runpod = stack.enter_context(RunPodApi(hosts[:2]))
        vast = stack.enter_context(VastApi(hosts[2:]))
        assert isinstance(runpod, RunPodApi) and isinstance(vast, VastApi)
        yield Clouds(tmp_path, runpod, vast)


@pytest.mark.exhaustive
def test_each_pod_is_rented_where_it_is_cheapest_and_all_are_shown_and_given_back(clouds):
    assert clouds.up().is_good, clouds.said
    # There is one machine at Vast.ai, for 0.90 $/h; RunPod has more of them, for 1.19.
    assert clouds.rows == [("pod-0", "vast", "synced"), ("pod-1", "runpod", "synced")]
    assert clouds.up().is_good and (len(clouds.vast.rented), len(clouds.runpod.rented)) == (1, 1)
    seen = asyncio.run(overview(clouds.ledger, clouds.access))
    assert [(one.row.name, one.is_there) for one in seen.pods] == [("pod-0", True), ("pod-1", True)]
    assert command(clouds.ledger, clouds.access, lambda found: found.down(()), PATIENCE) == {}
    assert (clouds.rows, clouds.vast.rented, clouds.runpod.rented) == ([], {}, {})


def test_an_offer_that_is_gone_at_one_cloud_is_followed_by_the_next_at_another(clouds):
    clouds.vast.free_hosts.clear()
    assert clouds.up().is_good, clouds.said
    assert sorted(clouds.rows) == [("pod-0", "runpod", "synced"), ("pod-1", "runpod", "synced")]
    assert any("the next offer is runpod/" in text for text in clouds.said)


def test_a_cloud_that_does_not_answer_holds_up_no_other(clouds, monkeypatch):
    monkeypatch.setattr("provisioning.providers.backoff.MAX_DELAY_S", 0.0)
    clouds.vast.faults.append(Fault("POST /v0/bundles", 503, times=1000))
    assert clouds.up().is_good, clouds.said
    assert {provider for _, provider, _ in clouds.rows} == {"runpod"}
    assert any(text.startswith("vast: offers nothing now: Vast.ai") for text in clouds.said)
