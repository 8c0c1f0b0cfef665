"""Whatever a pod answers: it is at most unknown itself, and the other pods are looked after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from provisioning.errors import MachineError
from provisioning.machines import jobs
from provisioning.machines.jobs import JobState
from provisioning.machines.machine import Answer
from provisioning.machines.results import fetch_results
from provisioning.machines.setup import Setup, send
from provisioning.pods.pod import Offer, Pod, PodSpec, Row, State
from provisioning.providers.hosts import Host, HostsProvider
from provisioning.renting.each import each
from provisioning.renting.reconcile import Observation
from provisioning.swarm import status
from provisioning.swarm.commands import ADDRESS_FLAG, address_in
from provisioning.swarm.peer import PeerProgress, read_progress

HONEST = "".join(
    line + "\n"
    for line in (
        '{"kind": "event", "event": "start", "tokens": 100, "time": 1.5}',
        '{"kind": "step", "step": 60, "tokens": 400.0, "loss": null, "grad_norm": 1.0}',
        '{"kind": "epoch", "epoch": 2, "step": 50, "contributors": [0, 2]}',
    )
)
MALFORMED = {
    "text": '{"kind":"epoch","epoch":"x"}',
    "infinity": '{"kind":"epoch","epoch":Infinity}',
    "negative": '{"kind":"epoch","epoch":-1}',
    "digits": f'{{"kind":"epoch","epoch":{"9" * 5000}}}',
    "no list": '{"kind":"epoch","epoch":1,"contributors":1}',
    "no number": '{"kind":"step","step":1,"loss":"low","tokens":{}}',
    "not finite": '{"kind":"step","step":1,"loss":1e999}',
    "nested": "[" * 100_000,
    "nested below": '{"kind":"step","x":' + "[" * 100_000,
}


@dataclass
class Answering:
    """A machine that answers the script of the metrics with `figures`, and any other with `text`."""

    text: str = "runs\n"
    figures: str = HONEST

    async def run(self, script: str, **_: object) -> Answer:
        return Answer(0, f"{self.figures}---\n" if "---" in script else self.text, "")


def test_what_a_peer_records_is_its_progress():
    assert asyncio.run(read_progress(Answering(), "l")) == PeerProgress(
        JobState(is_running=True, code=None), epoch=2, step=60, num_contributors=2, tokens=300
    )


@pytest.mark.parametrize("line", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_record_counts_as_absent(line):
    progress = asyncio.run(read_progress(Answering(figures=f"{line}\n"), "l"))
    assert progress == PeerProgress(JobState(is_running=True, code=None))


@pytest.mark.parametrize("word", ["²", "٣", "1" * 5000, "running", "-9"])
async def test_a_job_state_that_is_none_is_an_error_of_the_machine(word):
    with pytest.raises(MachineError, match="no state of a job"):
        await jobs.state(Answering(text=f"{word}\n"), "l", "peer")


@pytest.mark.parametrize("word", ["0", "137"])
async def test_an_exit_code_is_read(word):
    seen = await jobs.state(Answering(text=f"{word}\n"), "l", "peer")
    assert seen == JobState(is_running=False, code=int(word))


async def test_a_very_long_log_is_cut():
    progress = await read_progress(Answering(figures="---\n" + "x" * 100_000), "l")
    assert len(progress.last_lines) < 10_000


def test_an_address_is_looked_for_in_lines_that_have_one():
    assert address_in(f"{ADDRESS_FLAG}  \n") is None
    assert address_in(f"{ADDRESS_FLAG}/ip4/192.0.2.1\n{ADDRESS_FLAG}  \n") == "/ip4/192.0.2.1"


@pytest.mark.parametrize("free", ["²", "9" * 5000])
async def test_a_free_space_that_is_no_number_is_not_compared(free, tmp_path):
    class Unsynced(Answering):
        async def sync(self, *_: object, **__: object) -> None:
            pass

    machine = Unsynced(text=f"/dev/sda 1 1 {free} 1% /\n")
    await send(machine, "l", Setup(source=tmp_path), num_gpus=None)


@pytest.mark.parametrize("listed", ["[" * 100_000, '{"label": 1}', '{"gpu_count": 1}', "[]"])
async def test_a_list_of_pods_that_cannot_be_read_is_silence_of_its_host_alone(listed):
    class Hosts(HostsProvider):
        name = "ssh"
        hosts = tuple(Host(host=name, name=name) for name in ("honest", "hostile"))

        async def connect(self, host: Host) -> Answering:
            good = '{"label": "l", "gpu_count": 0, "price": 0.0, "ports": [1, 2, 3]}'
            return Answering(text=good if host.name == "honest" else listed)

    Hosts.__abstractmethods__ = frozenset()
    seen = await Hosts().pods()
    assert [(pod.id, pod.is_ready, pod.ports) for pod in seen.pods] == [
        ("honest/l", True, ((1, 1), (2, 2), (3, 3)))
    ]
    assert list(seen.silent) == ["hostile"]


def row(name: str) -> Row:
    offer = Offer(id="o", provider="vast", gpu_type="A100", gpu_count=8, price_per_hour=2.0)
    return Row(
        **{"name": name, "label": name, "state": State.RUNNING, "provider_id": name, "offer": offer},
        **{"spec": PodSpec(name=name, provider="vast"), "asked_at": 0.0, "ends_at": None},
    )


@dataclass
class Owner:
    owner: str = "o"


@dataclass
class Named:
    name: str = "vast"
    settle_s: float = 0.0


@dataclass
class TwoPods:
    """The renter of two pods, of which one raises what nobody expects."""

    rows: list[Row] = field(default_factory=lambda: [row("honest"), row("hostile")])
    ledger: Owner = field(default_factory=Owner)
    provider: Named = field(default_factory=Named)
    clock: Callable[[], float] = time.time

    async def machine_of(self, row: Row, pod: Pod) -> Answering:
        if row.name == "hostile":
            raise RecursionError("too deep")
        return Answering()


async def test_a_fault_while_looking_at_one_pod_leaves_the_others_known(monkeypatch):
    async def observe(renter: TwoPods, rows: list[Row]) -> Observation:
        return Observation(pods=[Pod(id=one.name, label=one.label, is_ready=True) for one in rows])

    monkeypatch.setattr(status, "observe", observe)
    honest, hostile = (await status._at_one(TwoPods())).pods
    assert (honest.peer, honest.progress.epoch) == ("trains", 2)
    assert (hostile.is_there, hostile.progress) == (True, None)
    assert hostile.peer == "unknown: RecursionError: too deep"


async def test_a_fault_of_the_work_for_one_pod_is_its_failure():
    done, told = list[str](), list[str]()

    async def work(name: str) -> None:
        if name == "hostile":
            raise ValueError("x is no number")
        done.append(name)

    failures = await each(
        ["hostile", "honest"], work, lambda name, text: told.append(f"{name} {text}"), name=str
    )
    assert {name: str(error) for name, error in failures.items()} == {"hostile": "ValueError: x is no number"}
    assert (done, told) == (["honest"], ["hostile failed: ValueError: x is no number"])


async def test_a_path_that_was_not_asked_for_is_not_fetched(tmp_path):
    machine = Answering(text="../x\n/etc/passwd\njobs/../../log\n")
    assert await fetch_results(machine, "l", ["logs"], str(tmp_path), asyncio.Semaphore()) == "it has no logs"
