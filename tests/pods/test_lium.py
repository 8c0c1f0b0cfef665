"""The real lium.io client against an emulator of its HTTP API, with pods that are real SSH servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from provisioning.errors import ProvisioningError, UserError
from provisioning.ledger.ledger import Ledger
from provisioning.machines.paths import PODS
from provisioning.pods.pod import PodSpec
from provisioning.providers.lium import LiumProvider
from provisioning.providers.registry import Access
from provisioning.renting.renter import Patience
from provisioning.swarm.status import overview
from tests.support.fleets import TestFleet, command
from tests.support.http_api import Fault
from tests.support.lium_api import LiumApi, executor, hasten_client
from tests.support.ssh_machines import needs_rsync, ssh_host

pytest.importorskip("lium", reason="the package lium.io is not installed")
pytestmark = [
    pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync()),
    pytest.mark.usefixtures("home"),
]

A100, H100, RTX = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
RENT = "POST /executors/"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiumApi]:
    """Three nodes, each of one kind, and two hosts for pods."""
    hasten_client(monkeypatch)
    nodes = [executor(A100, 1, 1.2), executor(H100, 1, 2.1, country="US"), executor(RTX, 8, 0.4, smallest=1)]
    with ExitStack() as stack:
        hosts = [stack.enter_context(ssh_host(tmp_path / f"host{index}", "")) for index in range(3)]
        for host in hosts:
            host.install("nvidia-smi", "for _ in 1 2 3 4 5 6 7 8; do echo 'GPU, 24564 MiB'; done")
        yield stack.enter_context(LiumApi(nodes, hosts))


@pytest.fixture
def fleet(tmp_path: Path, api: LiumApi) -> TestFleet:
    key = tmp_path / "ssh" / "id_ed25519"

    def opened() -> LiumProvider:
        provider = LiumProvider(api.environment, key)
        provider.settle_s = 1.0
        return provider

    return TestFleet(tmp_path, opened, patience=Patience(poll_s=0.2, boot_s=20, destroy_s=3))


def one(name: str = "pod-0", **changes) -> PodSpec:
    return PodSpec(provider="lium", name=name, **{"gpu_type": "A100", "gpu_count": 1, **changes})


def rents(api: LiumApi) -> list[dict]:
    return [request.body for request in api.requests if request.path.endswith("/rent")]


def total(ledger: Ledger) -> tuple[int, float, bool]:
    bills = ledger.bills()
    return len(bills), sum(bill.offer.price_per_hour for bill in bills), all(bill.ended_at for bill in bills)


@pytest.mark.pods
def test_three_different_machines_are_rented_set_up_and_given_back(fleet, ledger, api):
    specs = [one(f"pod-{index}", gpu_type=gpu) for index, gpu in enumerate(("A100", "H100", "4090"))]
    api.boot_s = 1.0
    assert fleet.up(specs).is_good, fleet.said
    assert set(fleet.states.values()) == {"running"}
    assert [body["gpu_count"] for body in rents(api)] == [1, 1, 1]
    number = len(api.requests)
    assert fleet.up(specs).is_good
    assert not any(request.method != "GET" for request in api.requests[number:])
    assert fleet.down().is_good
    assert (api.rented, fleet.states) == ({}, {})
    assert total(ledger) == (3, pytest.approx(1.2 + 2.1 + 0.4), True)


def test_asked_for_one_gpu_it_never_keeps_eight(fleet, api):
    """Even if the provider rents out the whole node anyway."""
    api.ignores_gpu_count = True
    outcome = fleet.up([one(gpu_type="4090")])
    assert "8 GPUs in place of 1" in str(outcome.failures["pod-0"])
    assert (api.rented, fleet.states) == ({}, {})


def test_a_wrong_key_and_no_key_are_said_before_anything_is_rented(fleet, api, tmp_path):
    wrong = TestFleet(
        tmp_path, lambda: LiumProvider({**api.environment, "LIUM_API_KEY": "no"}, tmp_path / "ssh/id_ed25519")
    )
    with pytest.raises(UserError, match=r"; check the key in LIUM_API_KEY"):
        wrong.up([one()])
    with pytest.raises(UserError, match=r"LIUM_API_KEY is not set"):
        LiumProvider({}, tmp_path / "ssh/id_ed25519")
    api.balance = 0.0
    with pytest.raises(UserError, match=r"balance at Lium is 0\.00"):
        fleet.up([one()])
    assert rents(api) == []


def test_no_money_ends_it_and_leaves_nothing(fleet, api):
    error = {"error": {"code": "API_KEY_BUDGET_EXCEEDED", "message": "budget reached"}}
    api.faults.append(Fault(RENT, 402, error=error))
    outcome = fleet.up([one()])
    failure = outcome.failures["pod-0"]
    # Other pods may be rented meanwhile.
    assert isinstance(failure, UserError) and "check the key" in str(failure) and "rented" not in str(failure)
    assert (api.rented, fleet.states) == ({}, {})


def test_an_order_whose_answer_is_lost_makes_one_pod(fleet, api):
    api.faults.append(Fault(RENT, 502, carried_out=True))
    assert fleet.up([one()], trains=False).is_good, fleet.said
    assert api.num_rented == len(api.rented) == 1
    assert fleet.states == {"pod-0": "synced"}


@pytest.mark.pods
def test_an_order_that_was_lost_on_its_way_is_sent_again_under_the_same_key(fleet, api):
    api.faults.append(Fault(RENT, 502, carried_out=False))
    assert fleet.up([one()], trains=False).is_good, fleet.said
    assert api.num_rented == 1
    keys = {one.headers["Idempotency-Key"] for one in api.requests if one.path.endswith("/rent")}
    assert len(keys) == 1


def test_a_price_that_rose_after_it_was_agreed_to_is_not_paid_and_one_within_the_limit_is_said(
    fleet, ledger, api
):
    api.dearer = 1.3
    outcome = fleet.up([one()], trains=False)
    assert "for 1.56 $/h in place of 1.20" in str(outcome.failures["pod-0"])
    assert (api.rented, fleet.states) == ({}, {})
    assert fleet.up([one(max_price=2.0)], trains=False).is_good
    assert any("costs 1.56 $/h now, not 1.20 as offered" in text for text in fleet.said)
    assert (ledger.rows()[0].offer.price_per_hour, total(ledger)[1]) == (
        pytest.approx(1.56),
        pytest.approx(2 * 1.56),
    )


@pytest.mark.pods
def test_a_next_offer_that_costs_far_more_than_was_agreed_is_not_taken(fleet, api):
    api.executors.append(executor(A100, 1, 9.0))
    api.faults.append(Fault(RENT, 409, contains=api.executors[0]["id"]))
    outcome = fleet.up([one()], trains=False)
    assert "no other offer fits" in str(outcome.failures["pod-0"])
    assert (api.rented, fleet.states) == ({}, {})


@pytest.mark.pods
def test_a_pod_that_never_comes_up_is_given_back_for_another(fleet, api):
    api.executors.append(executor(A100, 1, 1.5))
    api.never_ready.add(api.executors[0]["id"])
    fleet.patience = Patience(poll_s=0.2, boot_s=2.0, destroy_s=3.0)
    assert fleet.up([one()], trains=False).is_good
    (pod,) = api.rented.values()
    assert (pod["price"], api.num_rented) == (1.5, 2)


@pytest.mark.pods
def test_a_pod_that_vanished_is_rented_anew_and_the_others_stay(fleet, ledger, api):
    specs = [one(), one("pod-1", gpu_type="H100")]
    assert fleet.up(specs).is_good
    stays = [pod for pod in api.rented.values() if "pod-1" in pod["pod_name"]]
    api.vanish("pod-0")
    assert fleet.up(specs).is_good, fleet.said
    assert any("vanished" in text for text in fleet.said)
    assert len(api.rented) == 2 and stays[0]["id"] in api.rented
    assert total(ledger)[0] == 3


def test_lists_that_lack_a_pod_neither_lose_it_nor_rent_a_second_one(fleet, ledger, api):
    """While the provider's lists are empty, a pod is found, kept and deleted by its id."""
    assert fleet.up([one()], trains=False).is_good
    api.num_empty_lists = 1000
    fleet.settle()
    assert fleet.up([one()], trains=False).is_good, fleet.said
    assert (fleet.states, api.num_rented, len(api.rented)) == ({"pod-0": "synced"}, 1, 1)
    assert total(ledger) == (1, pytest.approx(1.2), False)
    assert fleet.down().is_good
    assert (api.rented, fleet.states, api.count("DELETE /pods/")) == ({}, {}, 1)


def test_a_pod_of_which_nothing_is_known_stays_in_the_ledger_and_nothing_is_rented(fleet, api, monkeypatch):
    monkeypatch.setattr("provisioning.providers.backoff.MAX_DELAY_S", 0.0)
    assert fleet.up([one()], trains=False).is_good
    api.num_empty_lists = 1000
    api.faults.append(Fault("GET /pods/", 400, times=1000))
    assert list(fleet.up([one()], trains=False).failures) == ["pod-0"]
    assert any("it is not known whether it is still there, so it may cost" in text for text in fleet.said)
    fleet.patience = replace(fleet.patience, destroy_s=1.0)
    assert "IS NOT KNOWN TO BE GONE AND MAY COST MONEY" in str(fleet.down().failures["pod-0"])
    assert (fleet.states, api.num_rented) == ({"pod-0": "deleting"}, 1)


@pytest.mark.pods
def test_it_ends_by_itself_at_the_time_that_was_asked_for(fleet, ledger, api):
    began = time.time()
    assert fleet.up([one(ttl_hours=1.5)], trains=False).is_good
    (body,) = rents(api)
    assert body["termination_hours"] == 2
    (pod,) = api.rented.values()
    (row,) = ledger.rows()
    assert row.ends_at == pytest.approx(began + 1.5 * 3600, abs=30)
    from provisioning.providers.lium import _moment

    assert _moment(pod["removal_scheduled_at"]) == pytest.approx(row.ends_at, abs=1)


@pytest.mark.pods
def test_an_end_that_the_provider_does_not_confirm_is_said(fleet, api):
    api.ignores_end = True
    assert fleet.up([one(ttl_hours=2)], trains=False).is_good
    assert any("does not confirm its rental end" in text for text in fleet.said)


def test_an_end_that_is_confirmed_late_is_no_alarm(fleet, api):
    api.end_shown_after_s = 0.5
    assert fleet.up([one(ttl_hours=1.5)], trains=False).is_good
    assert not any("does not confirm" in text for text in fleet.said)


def test_a_pod_that_has_died_is_not_called_new(fleet, ledger, api, tmp_path):
    assert fleet.up([one()], trains=False).is_good
    (pod,) = api.rented.values()
    pod["status"] = "FAILED"
    access = Access(state_dir=tmp_path, environment=api.environment)
    (shown,) = asyncio.run(overview(ledger, access)).pods
    assert shown.peer == "unknown: pod-0 has died: Lium says that it is FAILED"


@pytest.mark.exhaustive
def test_a_provider_that_cannot_be_reached_is_said_in_plain_words(tmp_path, monkeypatch):
    monkeypatch.setattr("provisioning.providers.backoff.MAX_DELAY_S", 0.0)
    environment = {"LIUM_API_KEY": "k", "LIUM_BASE_URL": "http://127.0.0.1:1/api"}
    away = TestFleet(tmp_path, lambda: LiumProvider(environment, tmp_path / "ssh/id_ed25519"))
    said = r"^Lium: http://127\.0\.0\.1:\d+/api/\S+ cannot be reached: no connection$"
    with pytest.raises(ProvisioningError, match=said):
        away.settle()
    assert any("asking again" in text for text in away.said)


def test_a_pod_that_cannot_be_given_back_is_shouted_of_and_stays_in_the_ledger(fleet, api):
    assert fleet.up([one()], trains=False).is_good
    api.faults.append(Fault("DELETE /pods/", 400, times=1000))
    usual, fleet.patience = fleet.patience, replace(fleet.patience, destroy_s=1.0)
    outcome = fleet.down()
    fleet.patience = usual
    assert "IS NOT KNOWN TO BE GONE AND MAY COST MONEY" in str(outcome.failures["pod-0"])
    assert any("not given back yet" in text for text in fleet.said)
    assert fleet.states == {"pod-0": "deleting"} and len(api.rented) == 1
    api.faults.clear()
    assert fleet.down().is_good
    assert (api.rented, fleet.states) == ({}, {})


@pytest.mark.pods
def test_orphans_of_ours_go_and_other_peoples_pods_stay(fleet, api):
    assert fleet.up([one()], trains=False).is_good
    (pod,) = api.rented.values()
    owner = pod["pod_name"].split("-")[1]
    for name in (f"diloco-{owner}-pod-9-dead", "diloco-ffffffff-pod-0-1", "somebody's web server"):
        api.rented[name] = {**pod, "id": name, "pod_name": name}
        pod["_node"]["available_gpu_count"] -= 1
    fleet.settle()
    assert sorted(one["pod_name"] for one in api.rented.values()) == sorted(
        [pod["pod_name"], "diloco-ffffffff-pod-0-1", "somebody's web server"]
    )


def test_another_machine_behind_the_same_address_is_not_talked_to(fleet, api, tmp_path):
    assert fleet.up([one()], trains=False).is_good
    (pod,) = api.rented.values()
    other = next(host for host in api.free_hosts)
    (other.home.parent / "authorized_keys").write_text(
        (pod["_host"].home.parent / "authorized_keys").read_text()
    )
    pod["_host"] = other
    outcome: object = None
    try:
        outcome = fleet.up([one()])
    except ProvisioningError as error:
        assert "another host key" in str(error)
    else:
        assert "another host key" in str(next(iter(outcome.failures.values())))
    assert not (other.home / PODS).exists()


@pytest.mark.pods
def test_without_money_pods_are_given_back_all_the_same_and_an_extension_that_failed_can_be_repeated(
    fleet, ledger, api, tmp_path
):
    assert fleet.up([one(ttl_hours=1)], trains=False).is_good
    access = Access(state_dir=tmp_path, environment=api.environment)
    api.balance = 0.0
    (before,) = ledger.rows()
    assert before.ends_at is not None
    api.faults.append(Fault("POST /pods/", 400))

    def extended() -> dict[str, ProvisioningError]:
        return command(ledger, access, lambda found: found.extend(found.rows, 2.0))

    assert "as the test wants it" in str(extended()["pod-0"])
    assert extended() == {}
    assert ledger.rows()[0].ends_at == before.ends_at + 2 * 3600

    ledger.advance(before, before.state, ends_at=time.time() - 1)
    settled = command(ledger, access, lambda found: found.settle(), fleet.patience)
    assert (settled, ledger.rows(), api.rented) == ({"lium": {}}, [], {})
