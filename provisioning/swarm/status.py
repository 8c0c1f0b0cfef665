"""The present state and cost of all pods. Changes nothing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from provisioning.errors import in_words
from provisioning.ledger.ledger import Ledger
from provisioning.pods.pod import Pod, Row, State, stray
from provisioning.providers.registry import Access
from provisioning.renting.reconcile import Observation, observe
from provisioning.renting.renter import Renter
from provisioning.renting.renters import renters
from provisioning.swarm.peer import PeerProgress, read_progress

_LOOK_TIMEOUT_S = 30.0
_HAS_ANSWERED = (State.REACHABLE, State.SYNCED, State.RUNNING)


@dataclass(frozen=True)
class Status:
    """The state of one pod."""

    row: Row
    is_there: bool | None
    """Whether the provider has the pod; None: unknown, so it may cost money."""
    peer: str
    """What its peer does, or why that is unknown, as text."""
    progress: PeerProgress | None = None
    failure: str = ""
    """Why the provider says that the pod has failed for good; empty: it has not."""
    is_in_ledger: bool = True
    dollars: float = 0.0
    """Cost so far."""

    @property
    def may_cost(self) -> bool:
        return self.is_there is not False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.row.name,
            "state": str(self.row.state),
            "provider": self.row.provider,
            "provider_id": self.row.provider_id,
            "gpu_type": self.row.offer.gpu_type,
            "gpu_count": self.row.offer.gpu_count,
            "price_per_hour": self.row.offer.price_per_hour,
            "ends_at": self.row.ends_at,
            "is_there": self.is_there,
            "may_cost": self.may_cost,
            "peer": self.peer,
            "epoch": self.progress.epoch if self.progress else None,
            "step": self.progress.step if self.progress else None,
            "tokens": self.progress.tokens if self.progress else None,
            "dollars": self.dollars,
        }


@dataclass
class Overview:
    """The pods at one or all providers."""

    pods: list[Status]
    silent: dict[str, str]
    """Providers and machines that did not answer, and why. They may have pods that are not in `pods`."""


async def overview(ledger: Ledger, access: Access) -> Overview:
    """All pods at all providers that were ever used."""
    async with renters(ledger, access, lambda name, text: None) as opened:
        found = await asyncio.gather(*(_at_one(renter) for renter in opened.values()))
        failures = {name: str(error) for name, error in opened.failures.items()}
    lost = [_unseen(row, failures[row.provider]) for row in ledger.rows() if row.provider in failures]
    now = time.time()
    dollars = {row.label: row.dollars(now) for row in ledger.bills()}
    pods = [*(status for one in found for status in one.pods), *lost]
    return Overview(
        [replace(one, dollars=dollars.get(one.row.label, 0.0)) for one in pods],
        failures | {name: why for one in found for name, why in one.silent.items()},
    )


async def _at_one(renter: Renter) -> Overview:
    """The pods at one provider, strays included."""
    rows, owner, provider = renter.rows, renter.ledger.owner, renter.provider.name
    try:
        observation = await asyncio.wait_for(observe(renter, rows), _LOOK_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - such as an answer that a provider was never known to give
        return Overview([_unseen(row, _words(error)) for row in rows], {provider: _words(error)})
    pods = observation.pods_of(rows)
    known = await asyncio.gather(*(_of_row(renter, row, pods.get(row.label), observation) for row in rows))
    strays = [stray(pod, provider, owner, time.time()) for pod in observation.strays(rows, owner)]
    why = "has our label but is not in the state file: `diloco pods down` gives it back"
    shown = [Status(row, True, why, is_in_ledger=False) for row in strays]
    return Overview([*known, *shown], dict(observation.silent))


async def _of_row(renter: Renter, row: Row, pod: Pod | None, observation: Observation) -> Status:
    if pod is None:
        if row.provider_id in observation.gone:
            if renter.clock() < row.asked_at + renter.provider.settle_s:
                return _unseen(row, f"it is so new that {renter.provider.name} may not know it yet")
            return Status(row, False, "gone, according to its provider")
        return _unseen(row, observation.unknown.get(row.provider_id or "", "not listed"))
    if row.state not in _HAS_ANSWERED:
        return Status(row, True, "is being given back" if row.state == State.DELETING else "–")
    try:
        machine = await asyncio.wait_for(renter.machine_of(row, pod), _LOOK_TIMEOUT_S)
        peer = await asyncio.wait_for(read_progress(machine, row.label), _LOOK_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - whatever this pod answers, the others are looked at
        return Status(row, True, f"unknown: {_words(error)}", failure=pod.failure)
    return Status(row, True, _activity(row, peer), peer)


def _unseen(row: Row, why: str) -> Status:
    if row.state == State.PLANNED:
        return Status(row, False, "–")
    if row.is_in_doubt:
        return Status(row, None, "the answer to its order was lost: it may exist and cost money")
    return Status(row, None, f"not known, may cost: {why}")


def _activity(row: Row, peer: PeerProgress) -> str:
    if peer.job.is_running:
        return "trains" if peer.epoch or peer.step else "starts"
    if peer.job.code is not None:
        return "finished" if peer.has_finished else f"ended with {peer.job.code}: {peer.last_lines}"
    return "does not run" if row.state == State.RUNNING else "–"


def _words(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else in_words(error)
