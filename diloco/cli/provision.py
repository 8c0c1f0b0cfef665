"""`diloco provision`: from nothing to a swarm on rented pods, and the same again changes nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from diloco.cli.plan_table import plan_json, print_plan, tell_unmoved_ends
from diloco.cli.pods_flags import (
    GIVEN,
    AsJson,
    Given,
    Inventory,
    StateFile,
    access,
    ensure_watcher,
    locked,
    opened,
    results_of,
    run,
    say,
    typed,
)
from diloco.cli.pods_questions import confirmed, interruption_told, shouted
from diloco.cli.wanted_pods import Amount, WantedPods, specs_of_flags
from diloco.options.flags import HvConfig, Name, Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provisioning.ledger.ledger import Ledger
    from provisioning.machines.setup import Setup
    from provisioning.pods.spec import PodSpec
    from provisioning.renting.each import Failures
    from provisioning.renting.plan import Plan
    from provisioning.renting.renters import Renters
    from provisioning.swarm.swarm import SwarmOptions

DEFAULTS = HvConfig()
_RETRY_S = 30.0
_NOT_REPLACED = " Until the command has succeeded, no pod is replaced."

app = App(name="provision", usage="Usage: diloco provision [FLAGS] [-- FLAGS OF EVERY PEER]")

Switch = Annotated[bool, Parameter(negative="")]


@dataclass(frozen=True, kw_only=True)
class Care:
    """What is done about the pods while nobody looks, by a process in the background on this machine."""

    replace: Switch = False
    """Once all pods train, replace those that die or are taken back; their peers join again."""
    budget: Amount = None
    """Dollars for all pods of this run, that is since there were none, beyond which no pod is replaced."""
    idle_stop: bool | None = None
    """Give all pods back once the run has ended and its results are fetched; default: where they cost money."""
    retry_until_up: Switch = False
    """If there are too few offers, wait and try again instead of giving up."""


NOT_SAID, CARE = WantedPods(), Care()


@app.default
def provision(
    *peer_flags: Annotated[str, Parameter(show=False)],
    wanted: Annotated[WantedPods, Parameter(name="*", group="Pods")] = NOT_SAID,
    offers: Switch = False,
    plan: Switch = False,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    as_json: AsJson = False,
    deploy_only: Switch = False,
    run_id: Name = DEFAULTS.run_id,
    boot_timeout: Seconds = 900.0,
    epoch_timeout: Seconds = 3600.0,
    state_file: StateFile = None,
    inventory: Inventory = None,
    given: Annotated[Given, Parameter(name="*", group="To the pods and back")] = GIVEN,
    care: Annotated[Care, Parameter(name="*", group="While nobody looks")] = CARE,
) -> int:
    """Rent pods, copy the code to them, start a coordinator and a peer on each pod, and wait until all are in epoch 1.

    Shows what it would rent and give back, with prices, and asks first. The same command again changes nothing, or
    continues an interrupted run. Flags after `--` are passed to every peer; without a model among them, the first peer
    chooses one that suits its pod.

    Parameters
    ----------
    offers: bool
        Only list the offers that match these flags.
    plan: bool
        Only show what would be done.
    yes: bool
        Do not ask.
    deploy_only: bool
        Rent the pods and set them up, but start nothing.
    run_id: str
        Name of the run.
    boot_timeout: float
        Seconds a pod may take until it answers; then the next offer is tried.
    epoch_timeout: float
        Seconds until all peers have to be in epoch 1.
    """
    from diloco.cli.peer_flags import check_peer_flags
    from provisioning.errors import NoCapacity, NoOffer
    from provisioning.pods.spec import providers_of
    from provisioning.renting.renters import Patience, renters
    from provisioning.swarm.swarm import Swarm, SwarmOptions
    from provisioning.swarm.wanted import begin_run

    ledger, where = opened(state_file), access(inventory)
    if offers:
        from diloco.cli.offers import tell_offers

        return run(tell_offers(wanted, where, as_json=as_json))
    specs, setup = specs_of_flags(wanted), given.setup()
    check_peer_flags(peer_flags, setup)
    to_fetch = results_of(ledger, given, run_id)
    options = SwarmOptions(run_id=run_id, flags=peer_flags, epoch_timeout_s=epoch_timeout)

    async def attempt(found: Renters, setup: Setup) -> int:
        """Raises NoCapacity and NoOffer where not all pods can be had and that is to be waited for."""
        agreed = await found.plan(specs)
        print_plan(agreed, to_stderr=as_json)
        tell_unmoved_ends(agreed, ledger)
        if plan:
            if as_json:
                print(json.dumps({"plan": plan_json(agreed)}), flush=True)
            return 0
        await agreed_to(agreed, yes=yes)
        to_fetch.remember(ledger)
        begin_run(ledger)
        # It replaces pods only after this command has succeeded: it would rent more than the user has seen.
        _keep(ledger, agreed, specs, None if deploy_only else replace(care, replace=False), setup, options)
        with interruption_told(
            ledger, typed("diloco pods down", ledger), _NOT_REPLACED if care.replace else ""
        ):
            failures = await found.apply(agreed, lambda: ensure_watcher(ledger))
            lacking = [name for name, error in failures.items() if isinstance(error, NoCapacity)]
            if lacking and care.retry_until_up:
                raise NoCapacity(f"{', '.join(lacking)} cannot be had now")
            failures = await found.set_up(setup, failures)
            if not deploy_only and not failures:
                failures = await Swarm(found, options, setup.pod_python).start()
            if not deploy_only and not failures:
                _keep(ledger, agreed, specs, care, setup, options)
                ensure_watcher(ledger)
        return _told(ledger, agreed, failures, care, as_json=as_json)

    async def bring_up() -> int:
        providers = providers_of(specs)
        async with renters(ledger, where, say, Patience(boot_s=boot_timeout), to_rent=providers) as found:
            completed = found.completed(setup, providers)
            while True:
                try:
                    return await attempt(found, completed)
                except (NoOffer, NoCapacity) as error:
                    if not care.retry_until_up or plan:
                        raise
                    say("–", f"{error} Asking again in {_RETRY_S:g} s")
                await asyncio.sleep(_RETRY_S)

    return locked(ledger, bring_up)


async def agreed_to(agreed: Plan, *, yes: bool) -> None:
    """Raises UserError unless somebody says yes. What neither costs nor destroys anything needs no question."""
    free = not agreed.destroy and agreed.new_dollars_per_hour == 0
    cost = f"rent {len(agreed.create)} pods for {agreed.new_dollars_per_hour:.2f} $/h"
    await confirmed(f"Go on, {cost}, give back {len(agreed.destroy)}?", yes=yes or free)


def _keep(
    ledger: Ledger,
    agreed: Plan,
    specs: Sequence[PodSpec],
    care: Care | None,
    setup: Setup,
    options: SwarmOptions,
) -> None:
    """Write down the swarm that is to be kept from now on, for whoever keeps it; None: nothing is kept."""
    from provisioning.renting.renters import MAX_PRICE_RATIO
    from provisioning.renting.watcher import WANTED
    from provisioning.swarm.wanted import Wanted

    prices = {creation.spec.name: creation.offer.price_per_hour for creation in agreed.create}
    prices |= {row.name: row.offer.price_per_hour for row in agreed.keep}
    stops = care is not None and (any(prices.values()) if care.idle_stop is None else care.idle_stop)
    if care is None or not (care.replace or stops):
        ledger.remember(WANTED, "")
        return
    Wanted(
        specs=[
            replace(spec, max_price=prices[spec.name] * MAX_PRICE_RATIO) if spec.max_price is None else spec
            for spec in specs
        ],
        replaces=care.replace,
        stops_when_idle=stops,
        budget=care.budget,
        setup=setup,
        options=options,
        ends_at={row.name: row.ends_at for row in ledger.rows()},
    ).write(ledger)


def _told(ledger: Ledger, agreed: Plan, failures: Failures, care: Care, *, as_json: bool) -> int:
    rows = ledger.rows()
    if as_json:
        pods = [
            {
                "name": row.name,
                "state": str(row.state),
                "provider_id": row.provider_id,
                "ends_at": row.ends_at,
            }
            for row in rows
        ]
        told = {name: str(error) for name, error in failures.items()}
        print(json.dumps({"plan": plan_json(agreed), "pods": pods, "failures": told}), flush=True)
    else:
        for row in rows:
            print(f"{row.name}: {row.state}{', failed' if row.name in failures else ''}")
    if not shouted(failures):
        if not as_json:
            show, give_back = typed("diloco pods status", ledger), typed("diloco pods down", ledger)
            hint = f"`{show}` shows what they do; `{give_back}` gives them back."
            print(hint, file=sys.stderr, flush=True)
        return 0
    also = _NOT_REPLACED if care.replace else ""
    print(
        f"The same command goes on from here; `{typed('diloco pods down', ledger)}` gives everything back.{also}",
        file=sys.stderr,
        flush=True,
    )
    return 1
