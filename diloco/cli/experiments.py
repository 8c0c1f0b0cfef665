"""`diloco experiments`: many trainings over rented pods, and what came of them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from diloco.cli.pods_flags import (
    GIVEN,
    AsJson,
    Fetch,
    Given,
    Inventory,
    StateFile,
    access,
    ensure_watcher,
    fetched,
    locked,
    opened,
    opened_existing,
    remember_results,
    say,
)
from diloco.cli.pods_plan import agreed_to, given_back, interruption_told, plan_json, print_plan, shouted
from diloco.errors import UserError
from diloco.options.checks import at_least, finite, whole

if TYPE_CHECKING:
    from provisioning.experiments.runs import Result
    from provisioning.experiments.sets import ExperimentSet
    from provisioning.experiments.trainers import Trainer
    from provisioning.ledger.ledger import Ledger
    from provisioning.machines.setup import Setup
    from provisioning.pods.pod import Offer
    from provisioning.providers.registry import Access
    from provisioning.renting.each import Failures
    from provisioning.renting.plan import Plan
    from provisioning.swarm.fleet import Fleet

app = App(name="experiments", help="Run many trainings over rented pods.")

Switch = Annotated[bool, Parameter(negative="")]
Off = Annotated[bool, Parameter(negative="")]
Number = Annotated[int | None, Parameter(converter=whole, validator=at_least(1))]
_LOCK_WAIT_S = 60.0
Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


@app.command(usage="Usage: diloco experiments run [OPTIONS] NAME|FILE [-- FLAGS OF EVERY TRAINER]")
def run(
    name: str,
    *trainer_flags: Words,
    provider: str | None = None,
    trainer: str = "grpo",
    model_id: str | None = None,
    dataset: str | None = None,
    total_steps: Number = None,
    batch_size: Number = None,
    grad_accum_steps: Number = None,
    max_price: Annotated[float | None, Parameter(validator=(at_least(0), finite))] = None,
    ttl_hours: Annotated[float | None, Parameter(validator=(at_least(0.01), finite))] = None,
    plan: Switch = False,
    deploy_only: Switch = False,
    no_deploy: Off = False,
    no_sync: Off = False,
    no_setup: Off = False,
    destroy: Switch = False,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    as_json: AsJson = False,
    python: str | None = None,
    source: Path | None = None,
    given: Annotated[Given, Parameter(name="*", group="To the pods and back")] = GIVEN,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Rent the pods of a set of experiments, run them, and tell what came of each.

    Sequential on each pod, parallel across pods. The same command again goes on where it was: what is done stays
    done and rents no pod, what runs is waited for. A value that did not reach its trainer makes an experiment fail.
    Exit code 0 only if all of them succeeded.

    Parameters
    ----------
    name: str
        lr_sweep, multi_dataset, model_size, batch_grid, custom_advanced, a TOML file with [[pods]] and
        [[experiments]], or a Python file with a function experiments().
    provider: str
        Where to rent instead: local, ssh, lium, lambda, runpod or vast, or several with commas between them.
    trainer: str
        grpo (reinforcement), or pretrain.
    model_id: str
        Another model for all of them.
    dataset: str
        Another dataset for all of them.
    total_steps: int
        Another number of steps for all of them.
    batch_size: int
        Another batch size per device for all of them.
    grad_accum_steps: int
        Another number of passes per step for all of them.
    max_price: float
        Dollars per hour that a pod may cost.
    ttl_hours: float
        Hours after which pods are given back by themselves.
    plan: bool
        Only show what would be rented and given back, with prices.
    deploy_only: bool
        Rent the pods and set them up, but run nothing.
    no_deploy: bool
        Rent nothing: run on the pods that are there.
    no_sync: bool
        Do not send the code again to pods that have it.
    no_setup: bool
        Do not touch the pods' environments either.
    destroy: bool
        Give the pods back at the end.
    yes: bool
        Do not ask.
    python: str
        A Python on the pods that has all that training needs; default: an environment is made there.
    source: Path
        The code to send; default: the clone that this command runs from.
    """
    from provisioning.experiments.sets import load
    from provisioning.experiments.trainers import trainer_named

    found = load(name)
    machine: dict[str, Any] = {"provider": provider, "max_price": max_price, "ttl_hours": ttl_hours}
    if provider == "local":
        machine |= {"gpu_type": "cpu-1"}
    changes = {
        "model_id": model_id,
        "dataset": dataset,
        "total_steps": total_steps,
        "batch_size": batch_size,
        "grad_accum_steps": grad_accum_steps,
    }
    found = found.with_changes(machine, changes, trainer_flags)
    if provider in ("local", "ssh"):
        found = on_own_machines(found, any_gpu=provider == "ssh")
    ledger = opened(state_file or _default_state_file(name))
    job = _Run(
        ledger=ledger,
        found=found,
        trainer=trainer_named(trainer),
        plan_only=plan,
        deploy_only=deploy_only,
        deploys=not no_deploy,
        syncs=not no_sync,
        sets_up=not no_setup,
        destroys=destroy,
        asks=not yes,
        as_json=as_json,
    )
    setup = given.setup(python, source)
    if not plan:
        remember_results(ledger, given, Path(name).stem)
    return locked(ledger, lambda: job.run(access(inventory), setup), for_jobs=True)


def on_own_machines(found: ExperimentSet, *, any_gpu: bool) -> ExperimentSet:
    """The same without what only clouds can promise."""
    loose: dict[str, Any] = {"gpu_count": None, "min_upload_mbps": None, "min_download_mbps": None}
    if any_gpu:
        loose["gpu_type"] = None
    return replace(found, pods=[replace(spec, **loose) for spec in found.pods])


@dataclass(frozen=True, kw_only=True)
class _Run:
    ledger: Ledger
    found: ExperimentSet
    trainer: Trainer
    plan_only: bool
    deploy_only: bool
    deploys: bool
    syncs: bool
    sets_up: bool
    destroys: bool
    asks: bool
    as_json: bool

    async def run(self, where: Access, setup: Setup) -> int:
        from provisioning.swarm.fleet import opened_fleet

        setup = replace(setup, extras=self.trainer.extras)
        async with opened_fleet(self.ledger, list(self.found.pods), where, say, setup) as fleet:
            give_back = f"diloco experiments destroy --state-file {shlex.quote(str(self.ledger.path))}"
            with interruption_told(self.ledger, give_back):
                return await self._run(fleet)

    async def _run(self, fleet: Fleet) -> int:
        from provisioning.experiments import runs

        failures: dict[str, Exception] = {}
        unfinished = runs.unfinished_pods(self.ledger, self.found, self.trainer)
        if self.plan_only or (self.deploys and (unfinished or self.deploy_only)):
            with self.ledger.locked():
                agreed, offers = await self._planned(fleet, unfinished)
                if self.plan_only:
                    return 0
                failures.update(await self._deployed(fleet, agreed, offers))
        if self.deploy_only:
            return shouted(failures)
        # Not under that lock: meanwhile pods' ends are put off, and whose time is over is given back.
        results = await runs.run(fleet, self.found, self.trainer)
        self._tell(results)
        if self.destroys:
            with self.ledger.locked(wait_s=_LOCK_WAIT_S):
                failures.update(await fleet.renters.give_back())
        return max(shouted(failures), 0 if runs.all_good(results) else 1)

    async def _planned(self, fleet: Fleet, unfinished: set[str]) -> tuple[Plan, list[Offer]]:
        # For what is done already nothing is rented; a pod that is there stays until somebody gives it back.
        there = {row.name for row in self.ledger.rows()}
        wanted = unfinished | there if unfinished else {spec.name for spec in self.found.pods}
        agreed, offers = await fleet.planned([spec for spec in self.found.pods if spec.name in wanted])
        print_plan(agreed, to_stderr=self.as_json)
        if self.plan_only and self.as_json:
            print(json.dumps({"plan": plan_json(agreed)}), flush=True)
        return agreed, offers

    async def _deployed(self, fleet: Fleet, agreed: Plan, offers: Sequence[Offer]) -> Failures:
        await agreed_to(agreed, yes=not self.asks)
        fleet.renters.on_planned = lambda: ensure_watcher(self.ledger)
        failures = await fleet.rent(agreed, offers)
        return await fleet.set_up(failures, again=self.syncs, with_environment=self.sets_up)

    def _tell(self, results: Sequence[Result]) -> None:
        if self.as_json:
            print(json.dumps({"experiments": [asdict(result) for result in results]}), flush=True)
            return
        print_results(results, self.trainer.result)


def print_results(results: Sequence[Result], figure_of: str) -> None:
    """A table, and below it what went wrong, whole."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("experiment", "pod", "what", "lr", "step", figure_of, "seconds"):
        table.add_column(column, overflow="fold")
    for result in results:
        table.add_row(
            result.name,
            result.pod,
            "done" if result.ok else f"failed: {result.trouble}",
            str(result.resolved.get("lr", "–")),
            str(result.step),
            "–" if result.figure is None else f"{result.figure:.4f}",
            f"{result.seconds:.0f}",
        )
    Console().print(table if results else "no experiment has ended yet")
    for result in results:
        if not result.ok:
            print(f"!!! {result.name}: {result.trouble}", file=sys.stderr, flush=True)


@app.command
def status(*names: str, as_json: AsJson = False, state_file: StateFile = None) -> int:
    """What came of the experiments of sets so far, in one table.

    Parameters
    ----------
    names: str
        The sets, as they were given to `run`; default: all that were ever run here. Or say --state-file.
    """
    from provisioning.experiments.runs import all_recorded

    files = [state_file] if state_file else [_default_state_file(name) for name in names]
    files = files or sorted(_default_state_file("any").parent.glob("*.sqlite"))
    results: list[Result] = []
    for file in files:
        ledger = opened_existing(file)
        results += all_recorded(ledger)
        ledger.close()
    if as_json:
        print(json.dumps({"experiments": [asdict(result) for result in results]}), flush=True)
    else:
        print_results(results, "figure")
    return 0


@app.command(name="list")
def list_(*, as_json: AsJson = False) -> int:
    """List the built-in sets, and what each would run."""
    from provisioning.experiments.sets import BUILT_IN, built_in

    sets = [built_in(name) for name in BUILT_IN]
    if as_json:
        found = [
            {
                "name": one.name,
                "pods": [asdict(spec) for spec in one.pods],
                "experiments": [{"pod": placed.pod, **asdict(placed.config)} for placed in one.experiments],
            }
            for one in sets
        ]
        print(json.dumps(found), flush=True)
        return 0
    for one in sets:
        spec = one.pods[0]
        print(
            f"{one.name}: {len(one.pods)} pods of {spec.gpu_count} × {spec.gpu_type} for {spec.ttl_hours:g} h"
        )
        for placed in one.experiments:
            config = placed.config
            batch = f"{config.batch_size} × {config.grad_accum_steps}"
            print(
                f"  {config.name:<14} on {placed.pod:<18} {config.dataset:<6} {config.model_id:<28} "
                f"lr {config.learning_rate:g}, batch {batch}"
            )
    return 0


@app.command
def destroy(
    name: str = "",
    *,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    fetch: Fetch = None,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Give back the pods of a set of experiments, once what was made on them is in the run directory.

    Parameters
    ----------
    name: str
        The set, as it was given to `run`; or say --state-file.
    yes: bool
        Also without their results, where those cannot be fetched.
    """
    if not name and state_file is None:
        raise UserError("Say which: `diloco experiments destroy NAME`, or --state-file FILE.")
    ledger = opened_existing(state_file or _default_state_file(name))
    words = fetched(fetch)
    return locked(ledger, lambda: given_back(ledger, access(inventory), (), words, yes=yes))


def _default_state_file(name: str) -> Path:
    from diloco.launch.swarm_config import state_dir

    return state_dir() / "experiments" / f"{Path(name).stem}.sqlite"
