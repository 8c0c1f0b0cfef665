"""Lambda's HTTP API against an emulator of it, with instances that are real SSH servers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from provisioning.errors import UserError
from provisioning.machines.keys import public_key
from provisioning.pods.pod import PodSpec
from provisioning.providers.lambda_cloud import LambdaProvider
from provisioning.providers.registry import Access
from provisioning.renting.renter import Patience
from provisioning.swarm.status import overview
from tests.support.clouds import LoopbackLambda
from tests.support.commands import wait_until
from tests.support.fleets import TestFleet, command
from tests.support.http_api import Fault
from tests.support.lambda_api import LambdaApi
from tests.support.ssh_machines import needs_rsync, ssh_host

pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
pytestmark = pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync())

LAUNCH = "POST /instance-operations/launch"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[LambdaApi]:
    with ExitStack() as stack:
        hosts = [stack.enter_context(ssh_host(tmp_path / f"host{index}", "")) for index in range(2)]
        for host in hosts:
            host.install("nvidia-smi", "echo 'A100, 40960 MiB'")
        yield stack.enter_context(LambdaApi(hosts))


@pytest.fixture
def fleet(tmp_path: Path, api: LambdaApi) -> TestFleet:
    key = tmp_path / "ssh" / "id_ed25519"

    def opened() -> LambdaProvider:
        provider = LoopbackLambda(api.environment, key)
        provider.settle_s = 1.0
        return provider

    return TestFleet(tmp_path, opened, patience=Patience(poll_s=0.2, boot_s=20, destroy_s=5))


def one(name: str = "pod-0", **changes) -> PodSpec:
    return PodSpec(name=name, provider="lambda", **{"gpu_type": "A100", "gpu_count": 1, **changes})


def test_an_order_whose_answer_is_lost_is_found_by_its_name_and_never_sent_twice(fleet, api):
    api.faults.append(Fault(LAUNCH, 502, carried_out=True))
    assert fleet.up([one()], trains=False).is_good, fleet.said
    assert api.count(LAUNCH) == api.num_launched == 1


def test_an_order_that_was_lost_is_looked_for_and_then_another_is_made_while_it_stays_in_doubt(fleet, api):
    api.faults.append(Fault(LAUNCH, 502))
    outcome = fleet.up([one()], trains=False)
    # The same offer would still fit, but one command does not try it twice.
    assert "no listing shows its pod" in str(outcome.failures["pod-0"])
    assert fleet.rows == [("pod-0", "deleting")] and api.num_launched == 0
    assert fleet.up([one()], trains=False).is_good
    assert fleet.rows == [("pod-0", "deleting"), ("pod-0", "synced")]
    labels = {request.body["name"] for request in api.requests if request.path.endswith("/launch")}
    assert (len(labels), api.num_launched) == (2, 1)


def test_an_instance_that_appears_long_after_its_order_failed_is_shown_and_given_back_by_every_look(
    fleet, ledger, api, tmp_path, monkeypatch
):
    monkeypatch.setattr(LambdaProvider, "settle_s", 0.5)
    monkeypatch.setattr(LambdaProvider, "interval_s", 0.0)
    api.late_s = math.inf
    api.faults.append(Fault(LAUNCH, 500, carried_out=True))
    assert "no listing shows its pod" in str(fleet.up([one()], trains=False).failures["pod-0"])
    access = Access(state_dir=tmp_path, environment=api.environment)
    (shown,) = asyncio.run(overview(ledger, access)).pods
    assert (shown.row.name, shown.is_there, shown.may_cost) == ("pod-0", None, True)
    # The instance appears only after the ledger has given up the doubtful order.
    (row,) = ledger.rows()
    ledger.forget(row, now=time.time())
    api.late_s = 0.0
    wait_until(lambda: asyncio.run(overview(ledger, access)).pods, "the instance in the list")
    (shown,) = asyncio.run(overview(ledger, access)).pods
    assert (shown.row.name, shown.is_there) == ("pod-0", True) and ledger.rows() == []
    assert command(ledger, access, lambda found: found.down(()), fleet.patience) == {}
    assert all(found["_ended"] for found in api.instances.values())


def test_a_provider_that_cannot_be_asked_any_more_is_said_and_hides_no_pod(fleet, ledger, api, tmp_path):
    assert fleet.up([one()], trains=False).is_good
    asked = asyncio.run(overview(ledger, Access(state_dir=tmp_path, environment={})))
    (shown,) = asked.pods
    assert shown.may_cost and "LAMBDALABS_API_KEY is not set" in asked.silent["lambda"]
    access = Access(state_dir=tmp_path, environment={})
    failures = command(ledger, access, lambda found: found.down(()), fleet.patience)
    assert "LAMBDALABS_API_KEY is not set" in str(failures["pod-0"]) and len(ledger.rows()) == 1


def test_an_answer_that_breaks_off_is_asked_for_again_but_an_order_is_not(fleet, api):
    # The header announces a chunked body, of which no chunk follows.
    short = {"Transfer-Encoding": "chunked"}
    api.faults += [
        Fault("GET /instance-types", 200, headers=short, error={"data": {}}),
        Fault(LAUNCH, 200, carried_out=True, headers=short, error={"data": {}}),
    ]
    assert fleet.up([one()], trains=False).is_good, fleet.said
    assert api.count(LAUNCH) == api.num_launched == 1


@pytest.mark.parametrize("key", ["", " ", "a b", "a\nb", "schlüssel"])
def test_a_key_that_is_none_is_said_and_not_shown(key, tmp_path):
    with pytest.raises(UserError, match=r"is not set|contains characters that no API key has") as caught:
        LambdaProvider({"LAMBDALABS_API_KEY": key}, tmp_path / "id_ed25519")
    assert not key.strip() or key not in str(caught.value)


def test_a_line_end_behind_the_key_does_not_matter(fleet, api, tmp_path):
    environment = {**api.environment, "LAMBDALABS_API_KEY": f"{api.environment['LAMBDALABS_API_KEY']}\r\n"}
    fleet.open_provider = lambda: LoopbackLambda(environment, tmp_path / "ssh/id_ed25519")
    assert fleet.up([one()], trains=False).is_good, fleet.said


def test_a_key_file_that_others_can_read_ends_it_before_anything_is_rented(fleet, api, tmp_path):
    key = tmp_path / "ssh/id_ed25519"
    public_key(key)
    key.chmod(0o640)
    with pytest.raises(UserError, match=r"Others can read the key file"):
        fleet.up([one()])
    assert api.count(LAUNCH) == 0


@pytest.mark.pods
def test_an_instance_whose_time_is_over_is_given_back_by_us(fleet, api):
    assert fleet.up([one(ttl_hours=0.00001)], trains=False).failures == {}
    fleet.settle()
    assert fleet.states == {}
    assert any("its time is over" in text for text in fleet.said)
