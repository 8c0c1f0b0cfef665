"""`diloco experiments`: runs many trainings on rented pods and reports their results."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from diloco.cli.pod_tables import print_table
from diloco.cli.pods_flags import (
    GIVEN,
    Amount,
    Fetch,
    Given,
    Hours,
    Inventory,
    WithoutResults,
    Yes,
    access,
    ensure_watcher,
    fetched,
    interruption_told,
    locked,
    results_of,
    say,
    shout,
    shouted,
)
from diloco.cli.provision import agreed_to, given_back, shown_plan
from diloco.cli.state_files import (
    SetStateFile,
    opened,
    opened_existing,
    state_file_of,
    typed,
)
from diloco.errors import UserError
from diloco.options.checks import not_empty
from diloco.options.flags import AsJson, Count, Switch
from provisioning.providers.registry import LISTED

if TYPE_CHECKING:
    from provisioning.experiments.runs import Result
    from provisioning.experiments.sets import ExperimentSet
    from provisioning.machines.setup import Setup
    from provisioning.renting.renters import Renters

app = App(name="experiments", help="Run many trainings over rented pods.")

_LOCK_WAIT_S = 60.0
Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


@app.command(usage="Usage: diloco experiments run [OPTIONS] NAME|FILE [-- FLAGS OF EVERY TRAINER]")
def run(
    name: str,
    *trainer_flags: Words,
    provider: Annotated[
        str | None, Parameter(help=f"Where to rent instead: {LISTED}; or several.", validator=not_empty)
    ] = None,
    trainer: str = "grpo",
    model_id: str | None = None,
    dataset: str | None = None,
    total_steps: Count | None = None,
    batch_size: Count | None = None,
    grad_accum_steps: Count | None = None,
    max_price: Amount = None,
    ttl_hours: Hours = None,
    plan: Switch = False,
    deploy_only: Switch = False,
    no_deploy: Switch = False,
    no_sync: Switch = False,
    no_setup: Switch = False,
    destroy: Switch = False,
    yes: Yes = False,
    as_json: AsJson = False,
    given: Annotated[Given, Parameter(name="*", group="To the pods and back")] = GIVEN,
    state_file: SetStateFile = None,
    inventory: Inventory = None,
) -> int:
    """Rent the pods of a set of experiments, run the experiments, and report the results.

    Experiments run one after the other on each pod, and on all pods in parallel. The same command again continues:
    finished experiments are not repeated, running ones are waited for. The exit code is 0 only if all succeeded.

    Parameters
    ----------
    name: str
        lr_sweep, multi_dataset, model_size, batch_grid, custom_advanced, or a TOML file with [[pods]] and
        [[experiments]].
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
        Give each pod back after its last training.
    """
    from provisioning.errors import ProvisioningError
    from provisioning.experiments import runs
    from provisioning.experiments.sets import load
    from provisioning.experiments.trainers import trainer_named
    from provisioning.renting.renters import renters

    changes = {
        "model_id": model_id,
        "dataset": dataset,
        "total_steps": total_steps,
        "batch_size": batch_size,
        "grad_accum_steps": grad_accum_steps,
    }
    found = load(name, provider).with_changes(
        {"provider": provider, "max_price": max_price, "ttl_hours": ttl_hours}, changes, trainer_flags
    )
    if provider is not None:
        found = _on_own_machines(found, provider)
    ledger, of = opened(state_file or state_file_of(name)), trainer_named(trainer)
    setup = replace(given.setup(), extras=of.extras)
    to_fetch = results_of(ledger, given, Path(name).stem)
    if not plan:
        to_fetch.remember(ledger)

    has_begun = False

    async def rent(pods: Renters, setup: Setup, unfinished: set[str]) -> Mapping[str, Exception]:
        """Rent the pods and set them up. Returns the errors by pod. The caller holds the ledger's lock."""
        nonlocal has_begun
        # Pods are rented for unfinished experiments only; pods that exist stay until they are given back.
        there = {row.name for row in ledger.rows()}
        names = unfinished | there if unfinished else {spec.name for spec in found.pods}
        specs = [spec for spec in found.pods if spec.name in names]
        agreed = await shown_plan(pods, specs, as_json=as_json, only_plan=plan)
        if plan:
            return {}
        await agreed_to(agreed, yes=yes)
        has_begun = True
        failures = await pods.apply(agreed, lambda: ensure_watcher(ledger))
        return await pods.set_up(setup, failures, again=not no_sync, with_environment=not no_setup)

    async def work(pods: Renters, setup: Setup) -> int:
        nonlocal has_begun
        failures: dict[str, Exception] = {}
        unfinished = runs.unfinished_pods(ledger, found, of)
        try:
            if plan or (not no_deploy and (unfinished or deploy_only)):
                async with ledger.locked_within(_LOCK_WAIT_S):
                    failures.update(await rent(pods, setup, unfinished))
            if plan or deploy_only:
                return shouted(failures)
            has_begun = True
            is_good = await trained(pods, setup)
        except Exception:
            # Whatever failed, the pods cost money. Until the user has agreed, nothing is rented or given back.
            if has_begun:
                shouted(await destroyed(pods))
            raise
        failures.update(await destroyed(pods))
        return max(shouted(failures), 0 if is_good else 1)

    async def trained(pods: Renters, setup: Setup) -> bool:
        """Run the experiments and print the results. Returns whether all succeeded."""
        # Without the ledger's lock, so that pods can be extended, and given back at their rental end, meanwhile.
        results = await runs.run(pods, setup.pod_python, found, of, lambda name: pod_ended(pods, name))
        if as_json:
            print(json.dumps({"experiments": [asdict(result) for result in results]}), flush=True)
        else:
            print_results(results, of.result)
        return all(result.ok for result in results)

    done, giving_back = set[str](), asyncio.Lock()

    async def pod_ended(pods: Renters, name: str) -> None:
        """Give this pod back if --destroy is set: another pod may not answer for long, and hold up the end."""
        done.add(name)
        names = done.copy()
        done.clear()
        # What fails is repeated when the next pod ends, and at the end.
        failed: Collection[str] = names
        with contextlib.suppress(ProvisioningError, OSError):
            failed = await destroyed(pods, names)
        done.update(failed)

    async def destroyed(pods: Renters, names: Collection[str] | None = None) -> Mapping[str, Exception]:
        """Give back the pods of these names, or all, if --destroy is set. Returns the errors by pod."""
        if not destroy:
            return {}
        rows = [row for row in pods.rows if names is None or row.name in names]
        # Before the lock is held: it may take minutes, in which other commands may want to change the pods.
        failures = await pods.fetch_results(rows)
        rows = [row for row in rows if row.name not in failures]
        try:
            async with giving_back, ledger.locked_within(_LOCK_WAIT_S):
                return failures | await pods.give_back(rows, fetched=True)
        finally:
            ensure_watcher(ledger)

    async def run_all() -> int:
        async with renters(ledger, access(inventory), say, to_rent=found.pods) as pods:
            with interruption_told(ledger, typed("diloco experiments destroy", ledger)):
                return await work(pods, pods.completed(setup, found.pods))

    return locked(ledger, run_all, for_jobs=True)


def _on_own_machines(found: ExperimentSet, provider: str) -> ExperimentSet:
    """The set without requirements that only clouds can meet, if the provider means machines of the user's own."""
    from provisioning.pods.pod import usual_for

    usual = usual_for(provider)
    loose: dict[str, Any] = {**usual, "min_upload_mbps": None, "min_download_mbps": None} if usual else {}
    return replace(found, pods=[replace(spec, **loose) for spec in found.pods])


def print_results(results: Sequence[Result], figure_of: str) -> None:
    """Print a table of the results, and on stderr each failure's message in full."""
    rows = [
        (
            result.name,
            result.pod,
            "done" if result.ok else f"failed: {result.trouble}",
            str(result.step),
            "–" if result.figure is None else f"{result.figure:.4f}",
            f"{result.seconds:.0f}",
        )
        for result in results
    ]
    print_table(("experiment", "pod", "what"), ("step", figure_of, "seconds"), rows)
    for result in results:
        if not result.ok:
            shout(f"{result.name}: {result.trouble}")


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
    yes: WithoutResults = False,
    fetch: Fetch = None,
    state_file: SetStateFile = None,
    inventory: Inventory = None,
) -> int:
    """Copy the results of a set's pods to the run directory, then give the pods back.

    Parameters
    ----------
    name: str
        The set, as it was given to `run`; or say --state-file.
    """
    if not name and state_file is None:
        raise UserError("Say which: `diloco experiments destroy NAME`, or --state-file FILE.")
    ledger = opened_existing(state_file or state_file_of(name))
    words = fetched(fetch)
    return locked(ledger, lambda: given_back(ledger, access(inventory), (), words, yes=yes))
