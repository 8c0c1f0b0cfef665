"""Experiments on a pod that cannot be reached for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from provisioning.errors import MachineError, Unavailable
from provisioning.experiments import runs
from provisioning.experiments.runs import Result
from provisioning.experiments.sets import ExperimentConfig, ExperimentSet, Placed
from provisioning.experiments.trainers import PRETRAIN
from provisioning.ledger.ledger import Ledger
from provisioning.machines import jobs
from provisioning.machines.machine import Answer
from provisioning.pods.pod import Offer, Pod, PodSpec, State
from provisioning.renting.renter import Patience, Renter
from provisioning.renting.renters import Renters

SPEC = PodSpec(name="one", provider="list")
SET = ExperimentSet(
    name="set",
    pods=[SPEC],
    experiments=[Placed(pod="one", config=ExperimentConfig(name=name)) for name in ("first", "second")],
)


@dataclass
class FlakyMachine:
    """A machine whose jobs end with `code` at once. After the first start, `num_lost` connections are lost."""

    num_lost: int
    code: str = "0"
    done: list[str] = field(default_factory=list)
    runs: bool = False
    num_nonsense: int = 0
    """Number of answers about a running job that make no sense."""

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        if self.done and self.num_lost:
            self.num_lost -= 1
            raise MachineError("the connection broke")
        if "setsid" in script:
            self.done.append("starts")
            self.runs = True
            return Answer(0, "started", "")
        if "---log" in script:
            return Answer(0, '{"kind": "step", "step": 7, "loss": 2.5, "time": 1.0}\n---log\n', "")
        if 'cat "$job/code"' in script:
            if self.runs and self.num_nonsense:
                self.num_nonsense -= 1
                return Answer(0, "nonsense", "")
            if self.runs:
                self.done.append("ended")
                self.runs = False
                return Answer(0, self.code, "")
            return Answer(0, "none", "")
        return Answer(0, "", "")


@dataclass
class Listing:
    """A provider that answers with `pod`; it cannot delete any. Every other request is lost."""

    pod: Pod | None
    num_requests: int = 0
    name = "list"
    settle_s = 0.0

    async def find(self, pod_id: str) -> Pod | None:
        self.num_requests += 1
        if self.num_requests % 2:
            raise Unavailable("no network")
        return self.pod


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Renter]:
    """The renter of a pod that is set up."""
    for module, name in ((jobs, "_POLL_S"), (runs, "_RETRY_S")):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr("provisioning.providers.backoff.MAX_ATTEMPTS", 1)
    ledger = Ledger(tmp_path / "pods.sqlite")
    offer = Offer(id="o", provider="list", gpu_type="A100", gpu_count=1, price_per_hour=1.0)
    row = ledger.advance(ledger.add(SPEC, offer, now=0.0), State.CREATING)
    row = ledger.set_pod(row, "id", None)
    for state in (State.REACHABLE, State.SYNCED):
        row = ledger.advance(row, state)
    found = Renter(
        ledger=ledger,
        provider=Listing(Pod(id="id", label=row.label, is_ready=True)),
        say=lambda name, text: None,
        patience=Patience(poll_s=0.0),
    )
    yield found
    ledger.close()


async def results(one: Renter, machine: FlakyMachine) -> list[Result]:
    one._machines[one.rows[0].label] = machine
    return await runs.run(Renters(one.ledger, one.say, [one]), "python", SET, PRETRAIN, ended)


async def ended(name: str) -> None:
    pass


@pytest.mark.parametrize(("code", "trouble"), [("0", ""), ("3", "its trainer ended with 3: ")])
async def test_a_lost_connection_is_no_outcome_and_the_next_experiment_waits_for_it(one, code, trouble):
    machine = FlakyMachine(100, code)
    found = await results(one, machine)
    assert [(result.trouble, result.step, result.figure) for result in found] == [(trouble, 7, 2.5)] * 2
    assert machine.done == ["starts", "ended"] * 2


@pytest.mark.parametrize(
    ("pod", "trouble"),
    [(None, "list has no pod id any more"), ("preempted", "its pod has died: preempted")],
)
async def test_experiments_fail_with_their_pod(one, pod, trouble):
    one.provider.pod = pod and Pod(id="id", label="l", is_ready=True, failure=pod)
    assert [result.trouble for result in await results(one, FlakyMachine(1000))] == [trouble] * 2


async def test_an_answer_that_makes_no_sense_is_not_the_end_of_an_experiment(one, monkeypatch):
    monkeypatch.setattr(jobs, "_MAX_FAILED_POLLS", 0)
    machine = FlakyMachine(0, num_nonsense=3)
    assert [result.trouble for result in await results(one, machine)] == ["", ""]
    assert machine.done == ["starts", "ended"] * 2


async def test_an_experiment_that_cannot_be_started_is_not_waited_for(one):
    class FullMachine(FlakyMachine):
        async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
            return Answer(9, "", "the disk is full")

    found = await results(one, FullMachine(0))
    assert ["the disk is full" in result.trouble for result in found] == [True, True]


async def test_a_pod_that_does_not_answer_holds_up_the_end_of_no_other(one):
    spec = PodSpec(name="hung", provider="list")
    row = one.ledger.advance(one.ledger.add(spec, one.rows[0].offer, now=0.0), State.CREATING)
    row = one.ledger.set_pod(row, "id", None)
    for state in (State.REACHABLE, State.SYNCED):
        row = one.ledger.advance(row, state)
    one._machines = {one.rows[0].label: FlakyMachine(0), row.label: FlakyMachine(10**9, done=["starts"])}
    placed = [*SET.experiments, Placed(pod="hung", config=ExperimentConfig(name="third"))]
    both, given_back = replace(SET, pods=[SPEC, spec], experiments=placed), asyncio.Queue[str]()
    running = asyncio.create_task(
        runs.run(Renters(one.ledger, one.say, [one]), "python", both, PRETRAIN, given_back.put)
    )
    assert await asyncio.wait_for(given_back.get(), 60.0) == "one"
    assert not running.done()
    running.cancel()
