"""The swarm as the user requested it, stored in the ledger for the keeper (keeper.py)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from provisioning.errors import UserError
from provisioning.ledger.keys import LAST_ACTION, RUN_BEGAN, WANTED
from provisioning.ledger.ledger import Ledger
from provisioning.machines.setup import Setup
from provisioning.pods.spec import PodSpec
from provisioning.renting.plan import Plan
from provisioning.swarm.swarm import SwarmOptions

_EPOCH_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The requested swarm."""

    specs: Sequence[PodSpec]
    """The requested pods, each with a price limit."""
    replaces: bool
    stops_when_idle: bool
    budget: float | None = None
    """Once the pods of this run have cost so many dollars, none is replaced any more; None: no limit."""
    setup: Setup
    """Of secrets, the ledger stores the names only."""
    options: SwarmOptions
    ends_at: Mapping[str, float | None] = field(default_factory=dict)
    """Rental ends (Unix time) by pod name. A replacement gets the end of the pod that it replaces."""

    def write(self, ledger: Ledger) -> None:
        """Store this in the ledger, or nothing if there is nothing for the keeper to do."""
        if not (self.replaces or self.stops_when_idle):
            ledger.remember(WANTED, "")
            return
        names = dict.fromkeys(self.setup.secrets or (), "")
        text = msgspec.json.encode(replace(self, setup=replace(self.setup, secrets=names)), enc_hook=str)
        ledger.remember(WANTED, text.decode())

    @classmethod
    def read(cls, ledger: Ledger) -> Wanted | None:
        """The stored swarm, without the values of its secrets; None: there is none.

        Raises UserError if another version has stored it.
        """
        text = ledger.recall(WANTED)
        if not text:
            return None
        try:
            found = msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))
        except msgspec.ValidationError as error:
            raise UserError(
                f"the stored swarm is of another version: {error}; run `diloco provision` again"
            ) from error
        return replace(found, options=replace(found.options, epoch_timeout_s=_EPOCH_TIMEOUT_S))

    def at(self, now: float, rows_end_at: Mapping[str, float | None]) -> Wanted:
        """The same without pods whose rental end has passed, and with the remaining hours of the others."""
        ends_at = {**self.ends_at, **rows_end_at}
        left = [spec for spec in self.specs if (end := ends_at.get(spec.name)) is None or end > now]
        specs = [
            spec if (end := ends_at.get(spec.name)) is None else replace(spec, ttl_hours=(end - now) / 3600)
            for spec in left
        ]
        return replace(self, specs=specs, ends_at={spec.name: ends_at.get(spec.name) for spec in left})


def keep(
    ledger: Ledger,
    agreed: Plan,
    setup: Setup,
    options: SwarmOptions,
    *,
    replaces: bool,
    stops: bool | None,
    budget: float | None = None,
) -> None:
    """Store the pods that were agreed on as the swarm that is to be kept. `stops` None: if one of them costs money."""
    prices = [(creation.spec, creation.offer.price_per_hour) for creation in agreed.create]
    prices += [(row.spec, row.offer.price_per_hour) for row in agreed.keep]
    Wanted(
        specs=[replace(spec, max_price=spec.price_limit(price)) for spec, price in prices],
        replaces=replaces,
        stops_when_idle=any(price for _, price in prices) if stops is None else stops,
        budget=budget,
        setup=setup,
        options=options,
        ends_at={row.name: row.ends_at for row in ledger.rows()},
    ).write(ledger)


def no_longer_wanted(ledger: Ledger, names: Sequence[str]) -> None:
    """Remove these pods, or all if `names` is empty, from the stored swarm, so that they are not replaced."""
    text = ledger.recall(WANTED)
    found = json.loads(text) if text else {"specs": []}
    found["specs"] = [spec for spec in found["specs"] if names and spec["name"] not in names]
    ledger.remember(WANTED, json.dumps(found) if found["specs"] else "")


def begin_run(ledger: Ledger) -> None:
    """Call before pods are rented. A run begins if the ledger has no pods; else the present run goes on."""
    if not ledger.rows():
        ledger.remember(RUN_BEGAN, str(time.time()))
        ledger.remember(LAST_ACTION, "")
