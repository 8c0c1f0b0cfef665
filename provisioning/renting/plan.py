"""The plan: which pods to create, keep and destroy so that the requested pods exist, and an offer for each new one.

Pure: no requests are sent.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from provisioning.errors import NoOffer, ProvisioningError
from provisioning.pods.pod import Offer, PodSpec, Row, State


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
    """The changes that make the requested pods exist."""

    create: tuple[Creation, ...]
    keep: tuple[Row, ...]
    destroy: tuple[Removal, ...]
    offers: Sequence[Offer] = ()
    """All current offers, in case the chosen one fails."""
    lacking: Mapping[str, ProvisioningError] = field(default_factory=dict)
    """Requested pods that cannot be rented now, and why."""

    def complete(self) -> Plan:
        """This plan. Raises the reason if a requested pod cannot be rented now."""
        for error in self.lacking.values():
            raise type(error)(f"{str(error).rstrip('.')}. Nothing was rented.") from error
        return self

    @property
    def new_dollars_per_hour(self) -> float:
        return sum(creation.offer.price_per_hour for creation in self.create)

    @property
    def dollars_per_hour(self) -> float:
        """Of all pods after the change."""
        return self.new_dollars_per_hour + sum(row.offer.price_per_hour for row in self.keep)

    def dollars_until_end(self, now: float) -> float | None:
        """What all pods cost from now on until their rental ends; None if a pod that costs money has no end."""
        rentals = [(creation.offer.price_per_hour, creation.spec.ttl_hours) for creation in self.create]
        rentals += [(row.offer.price_per_hour, row.hours_left(now)) for row in self.keep]
        if any(price and hours is None for price, hours in rentals):
            return None
        return sum(price * (hours or 0.0) for price, hours in rentals)


def plan(
    desired: Sequence[PodSpec],
    rows: Sequence[Row],
    offers: Sequence[Offer],
    barred: Mapping[str, ProvisioningError] = MappingProxyType({}),
) -> Plan:
    """The names in `desired` have to be unique. `barred`: pods that must not be ordered now, by name, and why."""
    by_name = {spec.name: spec for spec in desired}
    keep, destroy = [], []
    for row in rows:
        spec = by_name.get(row.name)
        if row.state == State.DELETING and row.is_in_doubt:
            # It is not known whether this order made a pod. If one appears, settling gives it back.
            continue
        if row.state == State.PLANNED:
            # Nothing was rented yet: choose an offer again.
            if spec is None:
                destroy.append(Removal(row, "no longer wanted; it was not rented yet"))
        elif spec is None:
            destroy.append(Removal(row, "no longer wanted"))
        elif row.state == State.DELETING:
            destroy.append(Removal(row, "was being given back"))
        elif not row.spec.same_machine(spec):
            destroy.append(Removal(row, "another machine is wanted in its place"))
        else:
            # With the new terms, such as the price limit.
            keep.append(replace(row, spec=spec))
    kept = {row.name for row in keep}
    missing = [spec for spec in desired if spec.name not in kept]
    chosen = assign([spec for spec in missing if spec.name not in barred], offers)
    # Orders in doubt would be sent again.
    held = {row.name for row in keep if row.is_in_doubt and row.name in barred}
    unordered = [
        spec for spec in desired if spec.name in held or (spec in missing and spec.name not in chosen)
    ]
    return Plan(
        create=tuple(Creation(spec, chosen[spec.name]) for spec in missing if spec.name in chosen),
        keep=tuple(row for row in keep if row.name not in held),
        destroy=tuple(destroy),
        offers=offers,
        lacking={
            spec.name: barred.get(spec.name) or NoOffer(_nothing_for(spec, offers)) for spec in unordered
        },
    )


def objections(spec: PodSpec, offer: Offer) -> list[str]:
    """Why this offer does not fit this spec; empty: it fits."""
    found = []
    if offer.provider not in spec.providers:
        found.append(f"of {offer.provider}")
    if spec.gpu_type is not None and not is_gpu(spec.gpu_type, offer.gpu_type):
        found.append(f"not {spec.gpu_type} but {offer.gpu_type}")
    if spec.gpu_count is not None and spec.gpu_count != offer.gpu_count:
        found.append(f"{offer.gpu_count} GPUs, not {spec.gpu_count}")
    if spec.country is not None and spec.country.upper() != (offer.country or "").upper():
        found.append(f"in {offer.country or 'an unknown country'}, not {spec.country}")
    found += _slow("upload", spec.min_upload_mbps, offer.upload_mbps)
    found += _slow("download", spec.min_download_mbps, offer.download_mbps)
    if spec.max_price is not None and offer.price_per_hour > spec.max_price:
        found.append(f"dearer than {spec.max_price:g} $/h")
    if offer.spot and not spec.spot:
        found.append("only as spot")
    return found


def is_gpu(wanted: str, offered: str) -> bool:
    """Whether a name such as A100 or 4090 means the offered GPU: all words of `wanted` occur in it, ignoring case."""
    words = re.findall(r"[a-z0-9]+", offered.lower())
    return all(
        any(word == have or (len(word) > 3 and _is_part(word, have)) for have in words)
        for word in re.findall(r"[a-z0-9]+", wanted.lower())
    )


def candidates(spec: PodSpec, offers: Sequence[Offer], without: Collection[str] = ()) -> list[Offer]:
    """Fitting offers, except those with a key in `without`; cheapest first, independent of the order of `offers`."""
    fitting = [offer for offer in offers if offer.key not in without and not objections(spec, offer)]
    return sorted(fitting, key=lambda offer: (offer.price_per_hour, offer.key))


def assign(specs: Sequence[PodSpec], offers: Sequence[Offer]) -> dict[str, Offer]:
    """An offer for as many specs as possible, by name: cheap ones first, each at most `num_available` times."""
    choices = {spec.name: candidates(spec, offers) for spec in specs}
    holders: dict[str, list[str]] = {offer.key: [] for offer in offers}

    def place(name: str, tried: set[str]) -> bool:
        untried = [offer for offer in choices[name] if offer.key not in tried]
        for offer in untried:
            if len(holders[offer.key]) < offer.num_available:
                holders[offer.key].append(name)
                return True
        # Augmenting path: move another spec to another offer to free one for this spec.
        for offer in untried:
            tried.add(offer.key)
            for other in holders[offer.key]:
                if place(other, tried):
                    holders[offer.key].remove(other)
                    holders[offer.key].append(name)
                    return True
        return False

    for spec in specs:
        place(spec.name, set())
    by_key = {offer.key: offer for offer in offers}
    return {name: by_key[key] for key, names in holders.items() for name in names}


def _is_part(word: str, have: str) -> bool:
    """Whether `have` contains `word`, as rtx4090 contains 4090. Numbers are not split: A1000 does not contain A100."""
    first, last = (r"(?<!\d)" if word[0].isdigit() else ""), (r"(?!\d)" if word[-1].isdigit() else "")
    return re.search(f"{first}{word}{last}", have) is not None


def _slow(direction: str, wanted: float | None, offered: float | None) -> list[str]:
    if wanted is None or (offered is not None and offered >= wanted):
        return []
    return [f"{direction} below {wanted:g} Mbit/s" if offered is not None else f"{direction} unknown"]


def _nothing_for(spec: PodSpec, offers: Sequence[Offer]) -> str:
    if candidates(spec, offers):
        why = "all fitting offers are taken by the other pods; ask for fewer pods or for other GPU types"
    else:
        # The offers with the fewest objections are the most helpful.
        lists = [objections(spec, offer) for offer in offers]
        near = Counter(reason for found in lists if len(found) == min(map(len, lists)) for reason in found)
        why = "; ".join(f"{number} offered {reason}" for reason, number in near.most_common(4))
    return (
        f"No offer of {spec.provider} for pod {spec.name}: {why or 'there are no offers at all'}; "
        f"`diloco provision --provider {spec.provider} --offers` lists what there is."
    )
