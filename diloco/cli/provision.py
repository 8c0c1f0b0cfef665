"""`diloco provision`: from nothing to a swarm on rented pods, and the same again changes nothing."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from diloco.cli.pods_flags import (
    GIVEN,
    AsJson,
    Given,
    Inventory,
    StateFile,
    Words,
    access,
    ensure_watcher,
    locked,
    opened,
    remember_results,
    run,
    say,
)
from diloco.cli.pods_plan import agreed_to, interruption_told, plan_json, print_plan, shouted
from diloco.errors import UserError
from diloco.options.checks import at_least, finite, whole
from diloco.options.flags import HvConfig, Name, Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from provisioning.ledger.ledger import Ledger
    from provisioning.machines.setup import Setup
    from provisioning.pods.pod import Offer, PodSpec
    from provisioning.renting.each import Failures
    from provisioning.renting.plan import Plan
    from provisioning.swarm.fleet import Fleet
    from provisioning.swarm.swarm import SwarmOptions

DEFAULTS = HvConfig()
_RETRY_S = 30.0

app = App(name="provision", usage="Usage: diloco provision [FLAGS] [-- FLAGS OF EVERY PEER]")

Number = Annotated[int | None, Parameter(converter=whole, validator=at_least(1))]
Amount = Annotated[float | None, Parameter(validator=(at_least(0), finite))]
Switch = Annotated[bool, Parameter(negative="")]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """Which pods, in words of PodSpec; what is not given keeps PodSpec's default."""

    pods: Number = None
    """How many pods."""
    file: Path | None = None
    """Instead: a TOML file with [[pods]]."""
    provider: str = "local"
    """local (pods on this machine), ssh (your own machines), lium, lambda, runpod, vast; or several: lium,runpod."""
    gpu_type: Words = ()
    """GPU types that the pods take in turn: A100,H100,4090; default A100, for local pods cpu-1."""
    gpu_count: Number = None
    """GPUs of each pod; default 8, for local pods and machines you own whatever they have."""
    country: str | None = None
    """Two letters, such as NL."""
    volume_id: str | None = None
    """A volume of the provider's to attach."""
    ttl_hours: Amount = None
    """Hours after which pods are given back by themselves."""
    min_upload_mbps: Amount = None
    """Upload bandwidth that an offer must have."""
    min_download_mbps: Amount = None
    """Download bandwidth that an offer must have."""
    max_price: Amount = None
    """Dollars per hour that a pod may cost."""
    image: str | None = None
    """Container image or template, where the provider takes one."""
    spot: Annotated[bool, Parameter(negative="")] = False
    """Also take machines that may be taken back at any time."""


@dataclass(frozen=True, kw_only=True)
class Care:
    """What is done about the pods while nobody looks, by a process in the background on this machine."""

    replace: Switch = False
    """Replace pods that die or are taken back, by the next offer that fits; their peers join again."""
    budget: Amount = None
    """Dollars for all pods, from the first on, beyond which none is replaced any more."""
    idle_stop: bool | None = None
    """Give all pods back once the run has ended and its results are fetched; default: where they cost money."""
    retry_until_up: Switch = False
    """While not all pods can be had, wait and ask again, in place of giving up."""


CARE = Care()


@app.default
def provision(
    *peer_flags: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    wish: Annotated[Wish, Parameter(name="*", group="Pods")] = Wish(),
    offers: Switch = False,
    plan: Switch = False,
    yes: Annotated[bool, Parameter(alias="-y", negative="")] = False,
    as_json: AsJson = False,
    deploy_only: Switch = False,
    run_id: Name = DEFAULTS.run_id,
    python: str | None = None,
    source: Path | None = None,
    boot_timeout: Seconds = 900.0,
    epoch_timeout: Seconds = 3600.0,
    state_file: StateFile = None,
    inventory: Inventory = None,
    given: Annotated[Given, Parameter(name="*", group="To the pods and back")] = GIVEN,
    care: Annotated[Care, Parameter(name="*", group="While nobody looks")] = CARE,
) -> int:
    """Rent pods, put the code on them, start a DHT and a peer on each, and wait until all are in epoch 1.

    Shows what it would rent and give back, with prices, and asks before it does. The same command again changes
    nothing, and goes on where it was interrupted, whatever interrupted it. Flags behind `--` go to every peer; unless
    they name a model, one is trained that the pods train well.

    Parameters
    ----------
    offers: bool
        Only list what could be rented for these flags.
    plan: bool
        Only show what would be done.
    yes: bool
        Do not ask.
    deploy_only: bool
        Rent the pods and set them up, but start nothing.
    run_id: str
        Name of the run.
    python: str
        A Python on the pods that has all that training needs; default: an environment is made there.
    source: Path
        The code to send; default: the clone that this command runs from.
    boot_timeout: float
        Seconds a pod may take until it answers; then the next offer is tried.
    epoch_timeout: float
        Seconds until all peers have to be in epoch 1.
    """
    from provisioning.swarm.commands import check_flags

    check_flags(peer_flags)
    ledger = opened(state_file)
    where = access(inventory)
    if offers:
        return run(_offers(wish, where, as_json))
    specs = _specs(wish)
    job = _Provision(
        ledger=ledger,
        specs=specs,
        where=where,
        asks=not yes,
        as_json=as_json,
        plan_only=plan,
        deploy_only=deploy_only,
        run_id=run_id,
        flags=peer_flags,
        setup=given.setup(python, source),
        given=given,
        care=care,
        boot_timeout_s=boot_timeout,
        epoch_timeout_s=epoch_timeout,
    )
    return locked(ledger, job.run)


def _specs(wish: Wish) -> list[PodSpec]:
    from provisioning.pods.files import checked, from_file, wanted

    if (wish.pods is None) == (wish.file is None):
        raise UserError("Say which pods: --pods 3, or --file FILE with [[pods]]; one of the two.")
    gpu_types = [name for words in wish.gpu_type for name in words.split(",") if name]
    common: dict[str, Any] = {
        name: getattr(wish, name)
        for name in (
            *("provider", "gpu_count", "country", "volume_id", "ttl_hours", "min_upload_mbps"),
            *("min_download_mbps", "max_price", "image"),
        )
    } | {"spot": wish.spot or None}
    if wish.file is not None:
        return from_file(wish.file, **common)
    if wish.provider == "local":
        # They share the cores of this machine: one process each.
        gpu_types = gpu_types or ["cpu-1"]
    specs = wanted(wish.pods or 0, gpu_types, **common)
    return checked([_any_machine(spec, wish) for spec in specs], "--pods")


def _any_machine(spec: PodSpec, wish: Wish) -> PodSpec:
    """On machines that are there anyway, what was not asked for does not matter."""
    if {"local", "ssh"}.issuperset(spec.providers):
        if wish.gpu_count is None:
            spec = replace(spec, gpu_count=None)
        if "ssh" in spec.providers and not wish.gpu_type:
            spec = replace(spec, gpu_type=None)
    return spec


async def _waited(why: str) -> None:
    import asyncio

    say("–", f"{why} Asking again in {_RETRY_S:g} s")
    await asyncio.sleep(_RETRY_S)


async def _offers(wish: Wish, where: Any, as_json: bool) -> int:
    from dataclasses import asdict

    from provisioning.pods.choice import objections
    from provisioning.pods.files import wanted
    from provisioning.providers.backoff import repeated
    from provisioning.providers.registry import open_provider

    common = {
        name: getattr(wish, name)
        for name in ("country", "min_upload_mbps", "min_download_mbps", "max_price", "gpu_count")
    }
    types = [name for words in wish.gpu_type for name in words.split(",") if name]
    specs = wanted(max(len(types), 1), types, provider=wish.provider, **common)
    specs = [
        replace(
            spec,
            gpu_type=spec.gpu_type if types else None,
            gpu_count=wish.gpu_count,
            spot=True,
        )
        for spec in specs
    ]
    there: list[Offer] = []
    for name in specs[0].providers:
        provider = open_provider(name, where)
        try:
            # Without the check before renting: looking needs no SSH key, and no money.
            there += await repeated(provider.offers, tell=functools.partial(say, name))
        finally:
            await provider.close()
    found = [one for one in there if any(not objections(spec, one) for spec in specs)]
    found.sort(key=lambda one: (one.price_per_hour, one.key))
    if as_json:
        print(
            json.dumps(
                [{key: value for key, value in asdict(one).items() if key != "details"} for one in found]
            )
        )
    else:
        _print_offers(found)
    return 0


def _print_offers(found: Sequence[Offer]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("$/h", "GPUs", "type", "up Mbit/s", "down Mbit/s", "place", "free", "offer"):
        is_text = column in ("type", "place", "offer")
        # Figures are never cut; what is too wide for the terminal goes on in the next line.
        table.add_column(
            column,
            overflow="fold",
            min_width=None if is_text else max(len(column), 6),
            justify="left" if is_text else "right",
        )
    for one in found:
        place = ", ".join(filter(None, (one.city, one.country))) or "–"
        table.add_row(
            f"{one.price_per_hour:.2f}",
            str(one.gpu_count),
            f"{one.gpu_type}{' (spot)' if one.spot else ''}",
            "–" if one.upload_mbps is None else f"{one.upload_mbps:.0f}",
            "–" if one.download_mbps is None else f"{one.download_mbps:.0f}",
            place,
            str(one.num_available),
            one.key,
        )
    Console().print(table if found else "nothing that fits is offered now")


@dataclass(frozen=True, kw_only=True)
class _Provision:
    ledger: Ledger
    specs: list[PodSpec]
    where: Any
    asks: bool
    as_json: bool
    plan_only: bool
    deploy_only: bool
    run_id: str
    flags: tuple[str, ...]
    setup: Setup
    given: Given
    care: Care
    boot_timeout_s: float
    epoch_timeout_s: float

    async def run(self) -> int:
        from provisioning.swarm.fleet import opened_fleet

        async with opened_fleet(
            self.ledger,
            self.specs,
            self.where,
            say,
            self.setup,
            boot_timeout_s=self.boot_timeout_s,
        ) as fleet:
            return await self._bring_up(fleet)

    async def _bring_up(self, fleet: Fleet) -> int:
        from provisioning.errors import NoCapacity

        while True:
            agreed, offers = await self._planned(fleet)
            print_plan(agreed, to_stderr=self.as_json)
            if self.plan_only:
                if self.as_json:
                    print(json.dumps({"plan": plan_json(agreed)}), flush=True)
                return 0
            await agreed_to(agreed, yes=not self.asks)
            remember_results(self.ledger, self.given, self.run_id)
            self._remember(agreed, fleet.setup)
            fleet.renters.on_planned = lambda: ensure_watcher(self.ledger)
            with interruption_told(self.ledger, "diloco pods down"):
                failures = await fleet.rent(agreed, offers)
                lacking = [name for name, error in failures.items() if isinstance(error, NoCapacity)]
                if not (lacking and self.care.retry_until_up):
                    failures = await fleet.set_up(failures)
                    if not self.deploy_only:
                        failures = await fleet.train(failures, self._options)
                    return self._told(agreed, failures)
            await _waited(f"{', '.join(lacking)} cannot be had now")

    async def _planned(self, fleet: Fleet) -> tuple[Plan, list[Offer]]:
        from provisioning.errors import NoOffer

        while True:
            try:
                return await fleet.planned(self.specs)
            except NoOffer as error:
                if not self.care.retry_until_up or self.plan_only:
                    raise
                await _waited(str(error))

    @property
    def _options(self) -> SwarmOptions:
        from provisioning.swarm.swarm import SwarmOptions

        return SwarmOptions(run_id=self.run_id, flags=self.flags, epoch_timeout_s=self.epoch_timeout_s)

    def _remember(self, agreed: Plan, setup: Setup) -> None:
        """The swarm that is to be kept from now on, for whoever keeps it."""
        from provisioning.renting.operations import WANTED
        from provisioning.renting.renters import DEARER
        from provisioning.swarm.keeper import Wanted

        prices = {creation.spec.name: creation.offer.price_per_hour for creation in agreed.create}
        prices |= {row.name: row.offer.price_per_hour for row in agreed.keep}
        stops = any(prices.values()) if self.care.idle_stop is None else self.care.idle_stop
        if self.deploy_only or not (self.care.replace or stops):
            self.ledger.remember(WANTED, "")
            return
        Wanted(
            specs=[
                replace(spec, max_price=prices[spec.name] * DEARER) if spec.max_price is None else spec
                for spec in self.specs
            ],
            replaces=self.care.replace,
            stops_when_idle=stops,
            budget=self.care.budget,
            setup=setup,
            options=self._options,
        ).write(self.ledger)

    def _told(self, agreed: Plan, failures: Failures) -> int:
        rows = self.ledger.rows()
        if self.as_json:
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
            return 0
        print(
            "The same command goes on from here; `diloco pods down` gives everything back.",
            file=sys.stderr,
            flush=True,
        )
        return 1
