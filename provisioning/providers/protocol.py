"""What a provider of pods can do.

Every method may raise ProviderError or one of its subclasses, each of which tells the caller what to do (see
errors.py), and UserError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from provisioning.machines.machine import Machine
from provisioning.pods.pod import Listing, Offer, Order, Pod


class Provider(ABC):
    """registry.py makes them: a cloud with (environment, ssh_key), the others with what they need."""

    name: str
    """As `--provider` and the registry have it."""
    repeatable: bool
    """Orders carry an idempotency key: one that is sent twice makes one pod."""
    settle_s: float
    """Seconds after the answer to an order during which its pod may be missing from the list and unknown by its id.
    Until they are over, that it is missing proves nothing.
    """
    doubt_s: float
    """Of an order whose answer was lost: for how many seconds, from the first list without its pod on, all lists have
    to lack it before it is taken for an order that made none.
    """
    keeps_time: bool = False
    """It takes a pod back by itself when its time is over; for others a process on the operator's machine does."""
    listens_on: str
    """The address that peers on its pods listen on."""

    @abstractmethod
    async def check(self) -> None:
        """That it can be used at all: key, files, programs. Raises UserError before anything is bought."""

    @abstractmethod
    async def offers(self) -> list[Offer]:
        """Everything that could be rented now, whatever it is."""

    @abstractmethod
    async def create(self, order: Order) -> str:
        """Rent exactly what the order says, by one request; the pod's id.

        Raises OutcomeUnknown where a pod may have been made; Unavailable where the request was not carried out and
        may be sent again; NoCapacity where another offer may do. All other errors: nothing was rented.
        """

    @abstractmethod
    async def pods(self) -> Listing:
        """All pods of the account, whosever they are."""

    @abstractmethod
    async def find(self, pod_id: str) -> Pod | None:
        """The pod of this id; None only where the provider itself says of this id that there is no such pod."""

    @abstractmethod
    async def destroy(self, pod_id: str) -> None:
        """Ask for the deletion of this id, whatever lists say. Destroying what is gone succeeds."""

    async def set_end(self, pod_id: str, ends_at: float) -> None:
        """Change when it is taken back (Unix time), where the provider keeps time; else nothing."""
        return None

    @abstractmethod
    async def machine(self, pod: Pod, host_key: str) -> Machine:
        """A ready pod's machine, pinned to this host key. Raises MachineError and HostKeyChanged."""

    async def host_key(self, pod: Pod) -> str:
        """The host key to pin: what the provider knows, or what the machine shows at first sight; "" without SSH."""
        return ""

    def swarm_flags(self, offer: Offer) -> list[str]:
        """What peers on this offer are started with beside the user's flags."""
        return []

    def python(self) -> str | None:
        """The Python of its pods that has all that training needs; None: an environment is to be made."""
        return None

    async def close(self) -> None:
        """May be repeated."""
        return None
