"""What has to change so that there are the pods that are wanted: a pure diff, before anything is bought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from provisioning.ledger.row import Row, State
from provisioning.pods.choice import assign
from provisioning.pods.pod import Offer, PodSpec


@dataclass(frozen=True)
class Creation:
    spec: PodSpec
    offer: Offer


@dataclass(frozen=True)
class Removal:
    row: Row
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """By what is done with each pod."""

    create: tuple[Creation, ...]
    keep: tuple[Row, ...]
    destroy: tuple[Removal, ...]

    @property
    def new_dollars_per_hour(self) -> float:
        return sum(creation.offer.price_per_hour for creation in self.create)

    @property
    def dollars_per_hour(self) -> float:
        """Of all pods that there will be."""
        return self.new_dollars_per_hour + sum(row.offer.price_per_hour for row in self.keep)

    @property
    def dollars_until_end(self) -> float | None:
        """What the new pods cost if all live as long as they may; None where one has no end."""
        hours = [creation.spec.ttl_hours for creation in self.create]
        if any(number is None for number in hours):
            return None
        return sum(
            creation.offer.price_per_hour * (creation.spec.ttl_hours or 0.0) for creation in self.create
        )


def plan(desired: Sequence[PodSpec], rows: Sequence[Row], offers: Sequence[Offer]) -> Plan:
    """Names are unique in `desired`. Raises UserError where a pod that is missing cannot be rented."""
    wanted = {spec.name: spec for spec in desired}
    keep, destroy = [], []
    for row in rows:
        spec = wanted.get(row.name)
        if row.state == State.DELETING and row.is_in_doubt:
            # There may be no pod of it; if one comes, settling gives it back.
            continue
        if row.state == State.PLANNED:
            # Nothing was bought yet: the choice is made, and shown, anew.
            if spec is None:
                destroy.append(Removal(row, "no longer wanted; it was not rented yet"))
        elif spec is None:
            destroy.append(Removal(row, "no longer wanted"))
        elif row.state == State.DELETING:
            destroy.append(Removal(row, "was being given back"))
        elif not row.spec.same_machine(spec):
            destroy.append(Removal(row, "another machine is wanted in its place"))
        else:
            # On the terms of now.
            keep.append(replace(row, spec=spec))
    kept = {row.name for row in keep}
    missing = [spec for spec in desired if spec.name not in kept]
    chosen = assign(missing, offers)
    return Plan(
        create=tuple(Creation(spec, chosen[spec.name]) for spec in missing),
        keep=tuple(keep),
        destroy=tuple(destroy),
    )
