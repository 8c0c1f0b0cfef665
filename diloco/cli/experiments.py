"""`diloco experiments`: many trainings over rented pods, and what came of them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from diloco.cli.pods_board import Board
from diloco.cli.pods_flags import (
    AsJson,
    Inventory,
    StateFile,
    access,
    ensure_watcher,
    locked,
    opened,
    opened_existing,
    say,
)
from diloco.cli.pods_plan import agreed_to, interruption_told, print_plan, shouted
from diloco.errors import UserError
from diloco.options.checks import at_least, finite, whole

if TYPE_CHECKING:
    from provisioning.experiment_runs import Result
    from provisioning.experiments import ExperimentSet
    from provisioning.fleet import Fleet, Outcome
    from provisioning.ledger import Ledger
    from provisioning.trainers import Trainer

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
    deploy_only: Switch = False,
    no_deploy: Off = False,
    no_sync: Off = False,
    no_setup: Off = False,
    destroy: Switch = False,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    as_json: AsJson = False,
    python: str | None = None,
    source: Path | None = None,
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
        Where to rent instead: local, ssh, lium or lambda.
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
    from provisioning.experiments import load
    from provisioning.trainers import trainer_named

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
        ledger,
        found,
        trainer_named(trainer),
        deploy_only,
        no_deploy,
        no_sync,
        no_setup,
        destroy,
        yes,
        as_json,
    )
    return locked(ledger, lambda: job.run(access(inventory), python, source), for_jobs=True)


def on_own_machines(found: ExperimentSet, *, any_gpu: bool) -> ExperimentSet:
    """The same without what only clouds can promise."""
    from dataclasses import replace

    loose: dict[str, Any] = {"gpu_count": None, "min_upload_mbps": None, "min_download_mbps": None}
    if any_gpu:
        loose["gpu_type"] = None
    return replace(found, pods=[replace(spec, **loose) for spec in found.pods])


class _Run:
    def __init__(
        self,
        ledger: Ledger,
        found: ExperimentSet,
        trainer: Trainer,
        deploy_only: bool,
        no_deploy: bool,
        no_sync: bool,
        no_setup: bool,
        destroys: bool,
        yes: bool,
        as_json: bool,
    ) -> None:
        self._ledger, self._found, self._trainer = ledger, found, trainer
        self._deploy_only, self._no_deploy = deploy_only, no_deploy
        self._syncs, self._no_setup = not no_sync, no_setup
        self._destroys, self._yes, self._as_json = destroys, yes, as_json

    async def run(self, where: Any, python: str | None, source: Path | None) -> int:
        from provisioning.fleet import opened_fleet

        board = Board()
        async with opened_fleet(
            self._ledger,
            list(self._found.pods),
            where,
            board.say,
            python=python,
            source=source,
            extras=self._trainer.extras,
        ) as fleet:
            give_back = f"diloco experiments destroy --state-file {shlex.quote(str(self._ledger.path))}"
            with interruption_told(self._ledger, give_back):
                return await self._run(fleet, board)

    async def _run(self, fleet: Fleet, board: Board) -> int:
        from provisioning import experiment_runs

        failures: dict[str, Exception] = {}
        self._unfinished = experiment_runs.unfinished_pods(self._ledger, self._found, self._trainer)
        if not self._no_deploy and (self._unfinished or self._deploy_only):
            with self._ledger.locked():
                failures.update((await self._deployed(fleet, board)).failures)
        if self._deploy_only:
            return shouted(failures)
        # Not under that lock: meanwhile pods' ends are put off, and whose time is over is given back.
        results = await experiment_runs.run(fleet, self._found, self._trainer)
        self._tell(results)
        if self._destroys:
            with self._ledger.locked(wait_s=_LOCK_WAIT_S):
                failures.update((await fleet.give_back()).failures)
        return max(shouted(failures), 0 if experiment_runs.all_good(results) else 1)

    async def _deployed(self, fleet: Fleet, board: Board) -> Outcome:
        # For what is done already nothing is rented; a pod that is there stays until somebody gives it back.
        there = {row.name for row in self._ledger.rows()}
        wanted = self._unfinished | there if self._unfinished else {spec.name for spec in self._found.pods}
        agreed, offers = await fleet.planned([spec for spec in self._found.pods if spec.name in wanted])
        print_plan(agreed, to_stderr=self._as_json)
        await agreed_to(agreed, yes=self._yes)
        board.attach(fleet)
        fleet.renter.on_planned = lambda: ensure_watcher(self._ledger, board.say)
        with board:
            outcome = await fleet.rent(agreed, offers)
            return await fleet.set_up(outcome, again=self._syncs, with_environment=not self._no_setup)

    def _tell(self, results: Sequence[Result]) -> None:
        if self._as_json:
            print(json.dumps({"experiments": [asdict(result) for result in results]}), flush=True)
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("experiment", "pod", "what", "lr", "step", self._trainer.result, "seconds"):
            table.add_column(column, overflow="fold")
        for result in results:
            figure = "–" if result.figure is None else f"{result.figure:.4f}"
            table.add_row(
                result.name,
                result.pod,
                "done" if result.ok else f"failed: {result.trouble}",
                str(result.resolved.get("lr", "–")),
                str(result.step),
                figure,
                f"{result.seconds:.0f}",
            )
        Console().print(table)
        for result in results:
            if not result.ok:
                print(f"!!! {result.name}: {result.trouble}", file=sys.stderr, flush=True)


@app.command(name="list")
def list_(*, as_json: AsJson = False) -> int:
    """List the built-in sets, and what each would run."""
    from provisioning.experiments import BUILT_IN

    sets = [make() for make in BUILT_IN.values()]
    if as_json:
        found = [
            {
                "name": one.name,
                "pods": [json.loads(spec.to_json()) for spec in one.pods],
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
def destroy(name: str = "", *, state_file: StateFile = None, inventory: Inventory = None) -> int:
    """Give back the pods of a set of experiments.

    Parameters
    ----------
    name: str
        The set, as it was given to `run`; or say --state-file.
    """
    from provisioning import operations, watcher

    if not name and state_file is None:
        raise UserError("Say which: `diloco experiments destroy NAME`, or --state-file FILE.")
    ledger = opened_existing(state_file or _default_state_file(name))

    async def work() -> int:
        failures = await operations.down(ledger, access(inventory), (), say)
        if not ledger.rows():
            watcher.stop(ledger.path)
        return shouted(failures)

    return locked(ledger, work)


def _default_state_file(name: str) -> Path:
    from diloco.launch.swarm_config import state_dir

    return state_dir() / "experiments" / f"{Path(name).stem}.sqlite"
