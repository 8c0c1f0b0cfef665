"""`diloco provision` rents pods, and `diloco pods down` gives them back. Repeating a command changes nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from diloco.cli.interrupts import run_interruptible
from diloco.cli.pod_tables import print_table, tell_offers
from diloco.cli.pods_flags import (
    GIVEN,
    Amount,
    Fetch,
    Given,
    Hours,
    Inventory,
    PodNames,
    StateFile,
    WithoutResults,
    Words,
    Yes,
    access,
    confirmed,
    ensure_watcher,
    fetched,
    interruption_told,
    locked,
    results_of,
    say,
    says_yes,
    shouted,
)
from diloco.cli.state_files import opened, opened_existing, say_if_empty, tell_other_state_files, typed
from diloco.errors import UserError
from diloco.options.checks import not_empty
from diloco.options.flags import AsJson, Count, HvConfig, Name, Seconds, Switch
from provisioning.providers.registry import LISTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provisioning.ledger.ledger import Ledger
    from provisioning.machines.setup import Setup
    from provisioning.pods.pod import PodSpec
    from provisioning.providers.registry import Access
    from provisioning.renting.each import Failures
    from provisioning.renting.plan import Plan
    from provisioning.renting.renters import Renters

DEFAULTS = HvConfig()
_RETRY_S = 30.0
_NOT_REPLACED = " Until the command has succeeded, no pod is replaced."

app = App(name="provision", usage="Usage: diloco provision [FLAGS] [-- FLAGS OF EVERY PEER]")


@dataclass(frozen=True, kw_only=True)
class PodFlags:
    """Which pods, in the words of PodSpec. What is not given is as is usual for their provider."""

    pods: Count | None = None
    """Number of pods."""
    file: Path | None = None
    """Instead: a TOML file with [[pods]]."""
    provider: Annotated[str, Parameter(help=f"{LISTED}; or several: lium,runpod.", validator=not_empty)] = (
        "local"
    )
    gpu_type: Words = ()
    """GPU types that the pods take in turn: A100,H100,4090; default A100, for local pods cpu-1."""
    gpu_count: Count | None = None
    """GPUs of each pod; default 8, for local pods and machines you own whatever they have."""
    country: str | None = None
    """Two letters, such as NL."""
    volume_id: str | None = None
    """A volume of the provider's to attach."""
    ttl_hours: Hours = None
    """Hours after which new pods are given back by themselves; `diloco pods extend` changes the end of others."""
    min_upload_mbps: Amount = None
    """Upload bandwidth that an offer must have."""
    min_download_mbps: Amount = None
    """Download bandwidth that an offer must have."""
    max_price: Amount = None
    """Dollars per hour that a pod may cost."""
    image: str | None = None
    """Container image or template, where the provider takes one."""
    spot: Switch = False
    """Also rent machines that the provider may take back at any time."""

    @property
    def gpu_types(self) -> list[str]:
        return [name for words in self.gpu_type for name in words.split(",") if name]

    def specs(self) -> list[PodSpec]:
        """Raises UserError."""
        from provisioning.pods.pod import specs_of
        from provisioning.pods.tables import read_toml, tables_in

        if (self.pods is None) == (self.file is None):
            raise UserError("Say which pods: --pods 3, or --file FILE with [[pods]]; one of the two.")
        # Without --spot, a table of the file may still say `spot = true`.
        common = {**self._common(), "spot": self.spot or None}
        origin = "--pods"
        tables: list[dict[str, Any]] = [{}] * (self.pods or 0)
        if self.file is not None:
            origin = str(self.file)
            tables = tables_in(read_toml(self.file), "pods", origin)
        return specs_of(tables, origin, gpu_types=self.gpu_types, **common)

    def filters(self) -> list[PodSpec]:
        """The specs that --offers matches. Flags that are not given exclude nothing, not even spot machines.

        Raises UserError for --file, whose tables may name several providers.
        """
        from provisioning.pods.pod import PodSpec

        if self.file is not None:
            raise UserError(
                f"--offers works with flags only: in place of --file {self.file}, give --provider, "
                "--gpu-type and the like; --plan shows which offers the pods of a file would take."
            )
        common = {**self._common(), "name": "any", "spot": True}
        return [PodSpec(gpu_type=gpu_type, **common) for gpu_type in self.gpu_types or (None,)]

    def _common(self) -> dict[str, Any]:
        """The fields of PodSpec that are the same for all pods."""
        names = {item.name for item in fields(self)} - {"pods", "file", "gpu_type"}
        return {name: getattr(self, name) for name in names}


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


NOT_SAID, CARE = PodFlags(), Care()


@app.default
def provision(
    *peer_flags: Annotated[str, Parameter(show=False)],
    which: Annotated[PodFlags, Parameter(name="*", group="Pods")] = NOT_SAID,
    offers: Switch = False,
    plan: Switch = False,
    yes: Yes = False,
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
    deploy_only: bool
        Rent the pods and set them up, but start nothing.
    run_id: str
        Name of the run.
    boot_timeout: float
        Seconds a pod may take until it answers; then the next offer is tried, also when a pod is replaced.
    epoch_timeout: float
        Seconds until all peers have to be in epoch 1.
    """
    from diloco.cli.peer_flags import check_peer_flags
    from provisioning.errors import NoCapacity, NoOffer
    from provisioning.ledger.keys import BOOT_S
    from provisioning.renting.renters import Patience, renters
    from provisioning.swarm.keeper import begin_run, keep
    from provisioning.swarm.swarm import Swarm, SwarmOptions

    ledger, where = opened(state_file), access(inventory)
    if offers:
        return run_interruptible(tell_offers(which.filters(), where, as_json=as_json))
    specs, setup = which.specs(), given.setup()
    setup = replace(setup, extras=check_peer_flags(peer_flags, setup))
    to_fetch = results_of(ledger, given, run_id)
    stops = False if deploy_only else care.idle_stop
    options = SwarmOptions(run_id=run_id, flags=peer_flags, epoch_timeout_s=epoch_timeout)

    async def attempt(found: Renters, setup: Setup) -> int:
        """Raises NoOffer, or with --retry-until-up NoCapacity, if not all pods can be rented now."""
        agreed = await shown_plan(found, specs, as_json=as_json, only_plan=plan)
        if plan:
            return 0
        await agreed_to(agreed, yes=yes)
        to_fetch.remember(ledger)
        ledger.remember(BOOT_S, str(boot_timeout))
        begin_run(ledger)
        # The watcher replaces pods only after this command has succeeded: it would rent more than the user agreed to.
        keep(ledger, agreed, setup, options, replaces=False, stops=stops)
        with interruption_told(
            ledger, typed("diloco pods down", ledger), _NOT_REPLACED if care.replace else ""
        ):
            failures = await found.apply(agreed, lambda: ensure_watcher(ledger))
            lacking = [name for name, error in failures.items() if isinstance(error, NoCapacity)]
            if lacking and care.retry_until_up:
                raise NoCapacity(f"no capacity for {', '.join(lacking)} at the moment")
            failures = await found.set_up(setup, failures)
            if not deploy_only and not failures:
                failures = await Swarm(found, options, setup).start()
                if not failures:
                    keep(
                        ledger, agreed, setup, options, replaces=care.replace, stops=stops, budget=care.budget
                    )
                    ensure_watcher(ledger)
        return _told(ledger, agreed, failures, care, as_json=as_json)

    async def bring_up() -> int:
        async with renters(ledger, where, say, Patience(boot_s=boot_timeout), to_rent=specs) as found:
            completed = found.completed(setup, specs)
            while True:
                try:
                    return await attempt(found, completed)
                except (NoOffer, NoCapacity) as error:
                    if not care.retry_until_up or plan:
                        raise
                    say("–", f"{str(error).rstrip('.')}; asking again in {_RETRY_S:g} s")
                await asyncio.sleep(_RETRY_S)

    return locked(ledger, bring_up)


async def shown_plan(found: Renters, specs: Sequence[PodSpec], *, as_json: bool, only_plan: bool) -> Plan:
    """Plan what has to be done for these pods, and print the plan. `only_plan`: it is the command's only result."""
    agreed = (await found.plan(specs)).complete()
    print_plan(agreed, to_stderr=as_json)
    if only_plan and as_json:
        print(json.dumps({"plan": plan_json(agreed)}), flush=True)
    return agreed


def plan_json(agreed: Plan) -> dict[str, Any]:
    return {
        "create": [
            {
                "name": creation.spec.name,
                "offer": creation.offer.id,
                "gpu_type": creation.offer.gpu_type,
                "gpu_count": creation.offer.gpu_count,
                "price_per_hour": creation.offer.price_per_hour,
            }
            for creation in agreed.create
        ],
        "keep": [row.name for row in agreed.keep],
        "destroy": [{"name": removal.row.name, "reason": removal.reason} for removal in agreed.destroy],
        "price_per_hour": agreed.dollars_per_hour,
        "price_until_end": agreed.dollars_until_end(time.time()),
    }


def print_plan(agreed: Plan, *, to_stderr: bool) -> None:
    """Print a table with prices per hour and in total."""
    now = time.time()
    pods = [
        ("create", one.spec.name, one.offer, one.offer.place, one.spec.ttl_hours) for one in agreed.create
    ]
    pods += [("keep", row.name, row.offer, row.state, row.hours_left(now)) for row in agreed.keep]
    rows = []
    for do, name, offer, place, hours in pods:
        what, price = f"{offer.gpu_count} × {offer.gpu_type}", offer.price_per_hour
        until_end = ("–", "–") if hours is None else (f"{round(hours, 2):g}", f"{hours * price:.2f}")
        rows.append((do, name, what, place, f"{price:.2f}", *until_end))
    rows += [("destroy", removal.row.name, removal.reason, "", "", "", "") for removal in agreed.destroy]
    dollars = agreed.dollars_until_end(now)
    until = "–" if dollars is None else f"{dollars:.2f}"
    rows.append(("", "all", "", "", f"{agreed.dollars_per_hour:.2f}", "", until))
    print_table(("", "pod", "what", "place"), ("$/h", "hours", "$"), rows, to_stderr=to_stderr)


async def agreed_to(agreed: Plan, *, yes: bool) -> None:
    """Ask the user, unless the plan neither costs nor destroys anything. Raises UserError unless the answer is yes."""
    free = not agreed.destroy and agreed.new_dollars_per_hour == 0
    cost = f"rent {len(agreed.create)} pods for {agreed.new_dollars_per_hour:.2f} $/h"
    await confirmed(f"Go on, {cost}, give back {len(agreed.destroy)}?", yes=yes or free)


def _told(ledger: Ledger, agreed: Plan, failures: Failures, care: Care, *, as_json: bool) -> int:
    from provisioning.terminal import printable

    rows = ledger.rows()
    if as_json:
        names = ("name", "state", "provider_id", "ends_at")
        pods = [{name: getattr(row, name) for name in names} for row in rows]
        told = {name: str(error) for name, error in failures.items()}
        print(json.dumps({"plan": plan_json(agreed), "pods": pods, "failures": told}), flush=True)
    else:
        for row in rows:
            print(printable(f"{row.name}: {row.state}{', failed' if row.name in failures else ''}"))
    if not shouted(failures):
        if not as_json:
            show, give_back = typed("diloco pods status", ledger), typed("diloco pods down", ledger)
            hint = f"`{show}` shows what they do; `{give_back}` gives them back."
            print(hint, file=sys.stderr, flush=True)
        return 0
    also = _NOT_REPLACED if care.replace else ""
    print(
        f"Repeat the command to continue; `{typed('diloco pods down', ledger)}` gives everything back.{also}",
        file=sys.stderr,
        flush=True,
    )
    return 1


def down(
    *names: PodNames,
    yes: WithoutResults = False,
    fetch: Fetch = None,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Copy the results of pods to the run directory, then give the pods back.

    A pod whose results cannot be fetched is given back only if you say so.
    """
    from provisioning.swarm import watcher
    from provisioning.swarm.keeper import no_longer_wanted

    ledger = opened_existing(state_file)
    words = fetched(fetch)
    was_empty = not ledger.rows()

    async def stop_watcher() -> int:
        await asyncio.to_thread(watcher.stop, ledger.path)
        return 0

    async def work() -> int:
        no_longer_wanted(ledger, names)
        # This command may wait for an answer, or be killed, while the rentals of pods end.
        ensure_watcher(ledger)
        return await given_back(ledger, access(inventory), names, words, yes=yes)

    try:
        # The watcher may be replacing a pod; what it leaves behind is given back like the other pods.
        code = (0 if names else run_interruptible(stop_watcher())) or locked(ledger, work)
    finally:
        # Also if another command held the lock, or after an interruption: the pods that are left have a rental end.
        ensure_watcher(ledger)
    # Not before: pods that a provider lists and the state file does not are given back, too.
    if was_empty:
        say_if_empty(ledger)
    if state_file is None and not names:
        tell_other_state_files("diloco pods down")
    return code


async def given_back(
    ledger: Ledger, where: Access, names: Sequence[str], fetches: Sequence[str] | None, *, yes: bool
) -> int:
    """Give pods back, asking before results are lost. Returns the exit code."""
    from provisioning.errors import ResultsNotFetched
    from provisioning.renting.renters import renters
    from provisioning.swarm import watcher

    async with renters(ledger, where, say, fetches=fetches) as found:
        failures = await found.down(names, discard_results=yes)
        kept = {name: error for name, error in failures.items() if isinstance(error, ResultsNotFetched)}
        code = 0
        if kept and sys.stdin.isatty():
            # Printed before the question, since these errors are its reason.
            code = shouted(kept)
            failures = {name: error for name, error in failures.items() if name not in kept}
            if await says_yes(f"Give back {', '.join(kept)} without their results?"):
                code, failures = 0, failures | await found.down(list(kept), discard_results=True)
    if not ledger.rows():
        watcher.stop(ledger.path)
    ensure_watcher(ledger)
    return shouted(failures) or code
