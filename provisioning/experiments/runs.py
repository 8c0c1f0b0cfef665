"""Runs experiments on pods: one after the other on each pod, all pods in parallel.

A repeated run skips experiments that are done and waits for those that still run.
"""

from __future__ import annotations

import asyncio
import json
import math
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import msgspec

from provisioning.errors import CommandFailed, MachineError, NoCapacity, ProviderError, in_words
from provisioning.experiments.sets import ExperimentSet, Placed
from provisioning.experiments.trainers import Trainer, argv, environment, job_name
from provisioning.ledger.keys import EXPERIMENT
from provisioning.ledger.ledger import Ledger
from provisioning.machines import jobs
from provisioning.machines.answers import record_in
from provisioning.machines.machine import MAX_LOG_BYTES, Machine
from provisioning.machines.paths import JOBS, pod_directory
from provisioning.pods.pod import Row, State
from provisioning.renting.renters import Renters

T = TypeVar("T")
_MAX_NUMBER = 1 << 63
_RETRY_S = 10.0
RUNS = "experiments"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one experiment."""

    name: str
    pod: str
    job: str
    ok: bool
    trouble: str = ""
    step: int = 0
    figure: float | None = None
    """Last value of the trainer's main metric; None: there is none."""
    metric: str = ""
    """loss or reward; empty if the trainer was not run."""
    seconds: float = 0.0


async def run(
    renters: Renters,
    python: str,
    found: ExperimentSet,
    trainer: Trainer,
    ended: Callable[[str], Awaitable[None]],
) -> list[Result]:
    """Run all experiments; if one fails, the others go on. Each result is written to the ledger at once.

    `python`: its path on the pods. `ended` is called with the name of each pod after its last experiment.
    """
    rows = {row.name: row for row in renters.rows if row.state in (State.SYNCED, State.RUNNING)}

    async def on_pod(name: str) -> list[Result]:
        placed = [one for one in found.experiments if one.pod == name]
        results = [await _one(renters, python, rows.get(name), one, trainer) for one in placed]
        await ended(name)
        return results

    by_pod = await asyncio.gather(*(on_pod(spec.name) for spec in found.pods))
    by_name = {result.name: result for results in by_pod for result in results}
    return [by_name[one.config.name] for one in found.experiments]


def recorded(ledger: Ledger, placed: Placed, trainer: Trainer) -> Result | None:
    """The recorded result of this experiment with exactly these values; None: there is none."""
    text = ledger.recall(EXPERIMENT + job_name(trainer, placed.config))
    # `convert` ignores unknown fields, such as those of earlier versions.
    return msgspec.convert(json.loads(text), Result) if text else None


def unfinished_pods(ledger: Ledger, found: ExperimentSet, trainer: Trainer) -> set[str]:
    """Names of the pods with at least one experiment that has not succeeded yet."""
    results = ((one.pod, recorded(ledger, one, trainer)) for one in found.experiments)
    return {pod for pod, result in results if result is None or not result.ok}


async def _one(renters: Renters, python: str, row: Row | None, placed: Placed, trainer: Trainer) -> Result:
    known = recorded(renters.ledger, placed, trainer)
    if known is not None and known.ok:
        renters.say(placed.pod, f"{placed.config.name} is done already")
        return known
    if row is None:
        return known or _failed(placed, trainer, "its pod does not exist or is not set up")
    try:
        result = await _trained(renters, python, row, placed, trainer)
    except Exception as error:  # noqa: BLE001 - whatever this pod answers, the other pods' experiments go on
        result = _failed(placed, trainer, in_words(error))
    renters.ledger.remember(EXPERIMENT + result.job, json.dumps(asdict(result)))
    renters.say(row.name, f"{result.name} {'is done' if result.ok else f'failed: {result.trouble}'}")
    return result


async def _trained(renters: Renters, python: str, row: Row, placed: Placed, trainer: Trainer) -> Result:
    """Start the experiment unless it runs or is done, wait for its end, and read its result. Raises ProvisioningError.

    Takes as long as the pod cannot be reached: until its outcome is known, the pod must neither run the next
    experiment nor be given back.
    """

    async def certain(work: Callable[[], Awaitable[T]]) -> T:
        return await _certain(renters, row, work)

    machine = await certain(lambda: renters[row.provider].machine(row))
    job = job_name(trainer, placed.config)
    run_dir = f"{RUNS}/{job}"
    if await certain(lambda: _begun(machine, row, python, placed, trainer)):
        renters.say(row.name, f"{placed.config.name} begins")
    code = await certain(lambda: jobs.finished(machine, row.label, job))
    step, figure, seconds, log = await certain(lambda: _collected(machine, row, job, run_dir, trainer))
    trouble = f"its trainer ended with {code}: {log}" if code else ""
    if code is None:
        trouble = f"its trainer was killed together with its pod's processes: {log}"
    return Result(
        name=placed.config.name,
        pod=row.name,
        job=job,
        ok=not trouble,
        trouble=trouble,
        step=step,
        figure=figure,
        metric=trainer.result,
        seconds=seconds,
    )


async def _certain(renters: Renters, row: Row, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is repeated while the pod cannot be reached: a lost connection is no outcome.

    Raises NoCapacity once the provider says that the pod is gone, and MachineError once it says that the pod has
    failed, or if the pod answers that the work cannot be done.
    """
    renter, said = renters[row.provider], ""
    while True:
        try:
            return await work()
        except (CommandFailed, NoCapacity):
            raise
        except (MachineError, ProviderError) as error:
            why = str(error)
        try:
            failure = (await renter.pod_of(row)).failure
        except NoCapacity:
            raise
        except (MachineError, ProviderError):
            # Probably this machine's own network is down.
            failure = ""
        if failure:
            raise MachineError(f"its pod has died: {failure}")
        if why != said:
            said = why
            renters.say(row.name, f"cannot be reached: {why}; waiting for it, since it may go on")
        await asyncio.sleep(_RETRY_S)


async def _begun(machine: Machine, row: Row, python: str, placed: Placed, trainer: Trainer) -> bool:
    """Start the experiment. Returns False if it runs or is done already. Raises MachineError."""
    job, config, has_gpus = job_name(trainer, placed.config), placed.config, not row.offer.is_cpu
    state = await jobs.state(machine, row.label, job)
    if state.is_running or state.code == 0:
        return False
    run_dir = f"{RUNS}/{job}"
    words = argv(trainer, config, python, run_dir, has_gpus=has_gpus)
    variables = environment(trainer, config, has_gpus=has_gpus)
    # Files of a failed attempt would be read as results of this one.
    await machine.run(f"rm -rf {shlex.quote(f'{pod_directory(row.label)}/{run_dir}')}")
    return await jobs.start(machine, row.label, job, words, variables)


async def _collected(
    machine: Machine, row: Row, job: str, run_dir: str, trainer: Trainer
) -> tuple[int, float | None, float, str]:
    """The last step, the main metric, the duration in seconds, and the end of the log."""
    script = f"""
cd {shlex.quote(pod_directory(row.label))} || exit 9
grep -m 1 -E '"kind": ?"(step|eval)"' {run_dir}/metrics.jsonl 2>/dev/null
grep -E '"kind": ?"(step|eval)"' {run_dir}/metrics.jsonl 2>/dev/null | tail -n 200; echo ---log
tail -n 12 {JOBS}/{job}/log 2>/dev/null | tail -c {MAX_LOG_BYTES}; exit 0
"""
    text = (await machine.run(script)).checked("collecting the result")
    metrics, _, log = text.partition("---log\n")
    records = [record for line in metrics.splitlines() if (record := record_in(line))]
    figures, times = _numbers(records, trainer.result), _numbers(records, "time")
    return (
        max((int(step) for step in _numbers(records, "step") if math.isfinite(step)), default=0),
        figures[-1] if figures else None,
        max(times) - min(times) if times else 0.0,
        log.strip(),
    )


def _numbers(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The values of this name that are numbers. Others are left out: files from a pod are not trusted."""
    values = (record.get(name) for record in records)
    return [
        float(value)
        for value in values
        if isinstance(value, float) or (isinstance(value, int) and abs(value) < _MAX_NUMBER)
    ]


def _failed(placed: Placed, trainer: Trainer, trouble: str) -> Result:
    name = placed.config.name
    return Result(name=name, pod=placed.pod, job=job_name(trainer, placed.config), ok=False, trouble=trouble)
