"""The protocol of all providers.

Every method may raise UserError, or ProviderError or one of its subclasses, which tell the caller what to do
(errors.py). Requests to a provider go through `repeated` (backoff.py), which also translates the exceptions that an
answer of an unknown form causes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from provisioning.machines.machine import Machine
from provisioning.pods.pod import Listing, Offer, Pod, Row


class Provider(ABC):
    """Constructed in registry.py: clouds with (environment, ssh_key), the others with their own arguments."""

    name: str
    """Its name in `--provider` and in the registry."""
    repeatable: bool
    """Whether orders carry an idempotency key, so that an order that is sent twice makes one pod."""
    settle_s: float
    """For so many seconds after the answer to an order, its pod may be missing from listings and unknown by its id."""
    doubt_s: float
    """For orders whose answer was lost: if no listing shows the pod for so many seconds, counted from the first
    listing without it, the order made no pod.
    """
    takes: Collection[str] = ()
    """Which of the optional fields `image` and `volume_id` its orders carry."""
    keeps_time: bool = False
    """Whether the provider itself ends rentals on time; else a process on the operator's machine does (watcher.py)."""
    listens_on: str
    """IP address on which peers on its pods listen."""

    @abstractmethod
    async def check(self) -> None:
        """Check keys, files and programs before anything is rented. Raises UserError."""

    @abstractmethod
    async def offers(self) -> list[Offer]:
        """All current offers, without any filter."""

    @abstractmethod
    async def create(self, row: Row) -> str:
        """Rent exactly what the row says, by one request, and return the pod's id.

        The row's label is the pod's name at the provider, and the idempotency key. The caller waits for the answer
        before it orders again, so things that all pods share, such as an uploaded key, need no lock.

        Raises OutcomeUnknown if a pod may have been made, Unavailable if nothing was rented and the request may be sent
        again, NoCapacity if another offer may succeed. After all other errors, nothing was rented.
        """

    @abstractmethod
    async def pods(self) -> Listing:
        """All pods of the account, also those that diloco did not order."""

    @abstractmethod
    async def find(self, pod_id: str) -> Pod | None:
        """The pod with this id; None only if the provider itself says that no pod has this id."""

    @abstractmethod
    async def destroy(self, pod_id: str) -> None:
        """Request the deletion of this id, whether or not it is listed. Succeeds if the pod is gone already."""

    async def set_end(self, pod_id: str, ends_at: float) -> None:
        """Set the rental end (Unix time). Does nothing unless `keeps_time`."""
        return None

    @abstractmethod
    async def machine(self, pod: Pod, host_key: str) -> Machine:
        """The machine of a ready pod, with this pinned host key. Raises MachineError or HostKeyChanged."""

    async def host_key(self, pod: Pod) -> str:
        """The host key to pin, which the machine shows now; "" where the inventory has it, or without SSH."""
        return ""

    def swarm_flags(self, offer: Offer) -> list[str]:
        """Flags of peers on this offer, before the user's flags."""
        return []

    def python(self) -> str | None:
        """A Python on its pods that has all packages; None: an environment has to be made."""
        return None

    async def close(self) -> None:
        """May be repeated."""
        return None
