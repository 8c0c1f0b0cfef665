"""Requirements on every provider in the registry; the clouds are the emulators in tests/support/clouds.py."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest

from provisioning.errors import NoCapacity, OutcomeUnknown, ProviderError, Unavailable, UserError
from provisioning.pods.pod import Pod, PodSpec, Row, State
from provisioning.providers.backoff import repeated
from provisioning.providers.local import LocalProvider
from provisioning.providers.protocol import Provider
from provisioning.providers.registry import NAMES
from provisioning.providers.ssh import SshProvider
from tests.support.clouds import CLOUDS
from tests.support.exhaustive import exhaustive_but
from tests.support.http_api import Fault
from tests.support.lium_api import hasten_client
from tests.support.ssh_machines import client_key, inventory, needs_rsync, ssh_host

pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
pytestmark = pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync())

T = TypeVar("T")
TIMEOUT_S = 30.0


@dataclass
class Kind:
    """One provider; `open` opens it anew, as each command does."""

    name: str
    open: Callable[..., Provider]
    api: Any = None

    def run(self, work: Callable[[Provider], Awaitable[T]], **changes: str) -> T:
        async def main() -> T:
            provider = self.open(**changes)
            try:
                return await asyncio.wait_for(work(provider), TIMEOUT_S)
            finally:
                await provider.close()

        return asyncio.run(main())

    def order(self) -> Row:
        """An order for the cheapest offer."""
        offers = self.run(lambda provider: provider.offers())
        offer = min(offers, key=lambda one: (one.price_per_hour, one.id))
        return Row(
            name="pod-0",
            label=f"diloco-0a0b0c0d-pod-0-{secrets.token_hex(4)}",
            spec=PodSpec(name="pod-0", provider=self.name),
            offer=offer,
            state=State.CREATING,
            provider_id=None,
            asked_at=time.time(),
            ends_at=time.time() + 7200,
        )

    def until(self, wanted: Callable[[Pod | None], bool], pod_id: str) -> Pod | None:
        """Ask the provider for this pod until the answer is `wanted`, and return the answer."""

        async def work(provider: Provider) -> Pod | None:
            while not wanted(found := await provider.find(pod_id)):
                await asyncio.sleep(0.05)
            return found

        return self.run(work)


@pytest.fixture
def hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("lium") is not None:
        hasten_client(monkeypatch)


@pytest.fixture(params=exhaustive_but(("local", "lium"), NAMES))
def kind(request: pytest.FixtureRequest, tmp_path: Path, home: None, hastened: None) -> Iterator[Kind]:
    name = request.param
    with ExitStack() as stack:
        if name == "local":
            yield Kind(name, lambda: LocalProvider(tmp_path / "local"))
        elif name == "ssh":
            key = client_key(tmp_path)
            host = stack.enter_context(ssh_host(tmp_path / "host", key.with_suffix(".pub").read_text()))
            path = inventory(tmp_path / "machines.toml", [host], key, gpu_count="")
            yield Kind(name, lambda: SshProvider(path))
        else:
            yield _of_cloud(name, stack, tmp_path)


@pytest.fixture(params=exhaustive_but(("lium",), CLOUDS))
def cloud(request: pytest.FixtureRequest, tmp_path: Path, home: None, hastened: None) -> Iterator[Kind]:
    with ExitStack() as stack:
        yield _of_cloud(request.param, stack, tmp_path)


def _of_cloud(name: str, stack: ExitStack, directory: Path) -> Kind:
    known, key = CLOUDS[name], directory / "ssh/id_ed25519"
    host = stack.enter_context(ssh_host(directory / "host", ""))
    api: Any = stack.enter_context(known.make_api([host]))

    def opened(**changes: str) -> Provider:
        return known.provider({**api.environment, **changes}, key)

    return Kind(name, opened, api)


@pytest.mark.parametrize("kind", exhaustive_but(("local", "ssh", "lium"), NAMES), indirect=True)
def test_an_order_makes_one_pod_that_is_listed_reached_and_gone_when_it_is_deleted(kind):
    order = kind.order()
    assert order.offer.provider == kind.name and order.offer.price_per_hour >= 0
    pod_id = kind.run(lambda provider: provider.create(order))
    pod = kind.until(lambda found: found is not None and found.is_ready, pod_id)
    assert pod is not None
    assert (pod.id, pod.label, pod.failure) == (pod_id, order.label, "")
    assert pod.gpu_count == order.offer.gpu_count
    assert pod.price_per_hour == pytest.approx(order.offer.price_per_hour)
    assert len(pod.ports) >= 3 and pod.host
    listed = kind.run(lambda provider: provider.pods())
    assert [(one.id, one.label) for one in listed.pods] == [(pod_id, order.label)] and not listed.silent

    async def spoken_to(provider: Provider) -> str:
        machine = await provider.machine(pod, await provider.host_key(pod))
        try:
            return (await machine.run("cat", stdin=b"hello")).checked("echoing")
        finally:
            await machine.close()

    assert kind.run(spoken_to) == "hello"
    for _ in range(2):
        # Destroying a pod that is gone succeeds.
        kind.run(lambda provider: provider.destroy(pod_id))
        kind.until(lambda found: found is None, pod_id)
    assert kind.run(lambda provider: provider.pods()).pods == []


def test_an_id_that_nobody_knows_is_no_pod_and_deleting_it_succeeds(kind):
    order = kind.order()
    known = kind.run(lambda provider: provider.create(order))
    # An id of the same form that was never given out.
    unknown = known.replace(order.label, f"{order.label}0") if order.label in known else f"{known[:-1]}0"
    unknown = unknown if unknown != known else f"{known[:-1]}1"
    kind.run(lambda provider: provider.destroy(unknown))
    assert kind.run(lambda provider: provider.find(unknown)) is None
    assert kind.run(lambda provider: provider.find(known)) is not None
    kind.run(lambda provider: provider.destroy(known))


def test_a_404_that_is_not_of_the_api_is_no_word_on_a_pod(cloud):
    """Such a 404 comes from a gateway whose routes are being changed."""
    order = cloud.order()
    pod_id = cloud.run(lambda provider: provider.create(order))
    error = {"message": "no Route matched with those values"}
    cloud.api.faults.append(Fault(CLOUDS[cloud.name].shows, 404, error=error))
    with pytest.raises(Unavailable):
        cloud.run(lambda provider: provider.find(pod_id))
    assert cloud.run(lambda provider: provider.find(pod_id)) is not None
    cloud.run(lambda provider: provider.destroy(pod_id))


def test_offers_have_keys_of_their_own_and_a_second_order_makes_a_second_pod_only_where_it_says_so(kind):
    offers = kind.run(lambda provider: provider.offers())
    assert offers and len({offer.key for offer in offers}) == len(offers)
    order = kind.order()
    first = kind.run(lambda provider: provider.create(order))
    if kind.run(_is_repeatable):
        assert kind.run(lambda provider: provider.create(order)) == first
        assert len(kind.run(lambda provider: provider.pods()).pods) == 1
    kind.run(lambda provider: provider.destroy(first))


async def _is_repeatable(provider: Provider) -> bool:
    return provider.repeatable


def test_every_page_of_a_list_of_pods_is_read(cloud):
    # The emulator may rent its only machine twice.
    cloud.api.free_hosts *= 2
    ids = set()
    for _ in range(2):
        order = cloud.order()
        ids.add(cloud.run(lambda provider, order=order: provider.create(order)))
    assert {pod.id for pod in cloud.run(lambda provider: provider.pods()).pods} == ids and len(ids) == 2
    for pod_id in ids:
        cloud.run(lambda provider, pod_id=pod_id: provider.destroy(pod_id))


def test_an_end_is_kept_where_the_provider_says_that_it_keeps_time(kind):
    order = kind.order()
    pod_id = kind.run(lambda provider: provider.create(order))
    ends_at = round(time.time() + 5400)

    async def set_end(provider: Provider) -> bool:
        await provider.set_end(pod_id, ends_at)
        return provider.keeps_time

    if kind.run(set_end):
        found = kind.run(lambda provider: provider.find(pod_id))
        assert found is not None and found.ends_at == ends_at
    kind.run(lambda provider: provider.destroy(pod_id))


def test_what_was_offered_and_is_not_there_any_more_is_no_capacity_and_makes_nothing(cloud):
    order = cloud.order()
    cloud.api.free_hosts.clear()
    with pytest.raises(NoCapacity):
        cloud.run(lambda provider: provider.create(order))
    assert cloud.run(lambda provider: provider.pods()).pods == []


@pytest.mark.parametrize("code", [500, 502])
def test_an_order_whose_answer_is_lost_has_no_other_outcome_and_its_pod_is_found_by_its_label(cloud, code):
    order = cloud.order()
    cloud.api.faults.append(Fault(CLOUDS[cloud.name].orders, code, carried_out=True))
    known = ""
    # A client may look for the pod itself and return its id.
    with contextlib.suppress(OutcomeUnknown):
        known = cloud.run(lambda provider: provider.create(order))
    (found,) = cloud.run(lambda provider: provider.pods()).pods
    assert found.label == order.label and known in ("", found.id)
    cloud.run(lambda provider: provider.destroy(found.id))


def test_a_list_of_another_form_is_an_error_and_an_order_whose_answer_is_of_none_is_no_refusal(cloud):
    known, order = CLOUDS[cloud.name], cloud.order()
    cloud.api.faults.append(Fault(known.lists, 200, error={"nothing": "of use"}))
    with pytest.raises(ProviderError):
        cloud.run(lambda provider: repeated(provider.pods))
    cloud.api.faults.append(Fault(known.orders, 200, carried_out=True, error={"nothing": "of use"}))
    pod_id = ""
    with contextlib.suppress(OutcomeUnknown):
        pod_id = cloud.run(
            lambda provider: repeated(lambda: provider.create(order), unexpected=OutcomeUnknown)
        )
    (found,) = cloud.run(lambda provider: provider.pods()).pods
    assert found.label == order.label and pod_id in ("", found.id)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_provider_that_is_busy_or_broken_is_asked_again_later(cloud, code):
    cloud.api.faults.append(Fault(CLOUDS[cloud.name].lists, code, times=50, headers={"Retry-After": "7"}))
    with pytest.raises(Unavailable) as caught:
        cloud.run(lambda provider: provider.pods())
    assert code != 429 or caught.value.retry_after_s == 7


def test_a_wrong_key_is_said_and_not_shown_and_rents_nothing(cloud):
    key_env = CLOUDS[cloud.name].provider.key_env
    order = cloud.order()
    for work in (lambda provider: provider.pods(), lambda provider: provider.create(order)):
        with pytest.raises(UserError, match=key_env) as caught:
            cloud.run(work, **{key_env: "a-wrong-key"})
        assert "a-wrong-key" not in str(caught.value)
    assert cloud.run(lambda provider: provider.pods()).pods == []


def test_where_nobody_listens_nothing_was_tried_or_nobody_knows(cloud):
    order = cloud.order()
    away = {CLOUDS[cloud.name].provider.base_url_env(): f"http://127.0.0.1:1{cloud.api.prefix}"}
    with pytest.raises(Unavailable):
        cloud.run(lambda provider: provider.pods(), **away)
    with pytest.raises((Unavailable, OutcomeUnknown)):
        cloud.run(lambda provider: provider.create(replace(order, label=f"{order.label}0")), **away)
