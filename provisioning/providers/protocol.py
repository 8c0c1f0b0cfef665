"""What a provider of pods can do. All of it raises ProviderError and its like, or UserError, as errors.py says."""

from __future__ import annotations

from typing import Protocol

from provisioning.machines.machine import Machine
from provisioning.pods.pod import Listing, Offer, Order, Pod, PodSpec


class Provider(Protocol):
    name: str
    repeatable: bool
    """An order sent twice under one key makes one pod."""
    settle_s: float
    """How long after an order was answered its pod may be unknown, by list and by id."""
    doubt_s: float
    """How long lists have to agree that an order whose answer was lost made no pod."""
    keeps_time: bool
    """It takes a pod back by itself when its time is over."""

    @property
    def listens_on(self) -> str:
        """The address that peers on its pods listen on."""
        ...

    async def check(self) -> None:
        """That it can be used at all: key, files, programs. Raises UserError before anything is bought."""
        ...

    async def offers(self) -> list[Offer]:
        """Everything that could be rented now, whatever it is."""
        ...

    async def create(self, order: Order) -> str:
        """Rent exactly what the order says; the pod's id. Never blindly asks twice.

        NoCapacity, ProviderError and UserError: nothing was rented. Unavailable: it was not even tried.
        OutcomeUnknown: nobody knows.
        """
        ...

    async def pods(self) -> Listing:
        """All pods of the account, whosever they are."""
        ...

    async def find(self, pod_id: str) -> Pod | None:
        """The pod of this id; None only where the provider itself says of this id that there is no such pod."""
        ...

    async def destroy(self, pod_id: str) -> None:
        """Ask for the deletion of this id, whatever lists say. Destroying what is gone succeeds."""
        ...

    async def set_end(self, pod_id: str, ends_at: float) -> None:
        """Change when it is taken back (Unix time), where the provider keeps time; else nothing."""
        ...

    async def machine(self, pod: Pod, host_key: str) -> Machine:
        """A ready pod's machine, pinned to this host key. Raises MachineError and HostKeyChanged."""
        ...

    async def host_key(self, pod: Pod) -> str:
        """The host key to pin: what the provider knows, or what the machine shows at first sight; "" without SSH."""
        ...

    def swarm_flags(self, spec: PodSpec, offer: Offer) -> list[str]:
        """What peers on this offer are started with beside the user's flags."""
        ...

    def python(self) -> str | None:
        """The Python of its pods that has all that training needs; None: an environment is to be made."""
        ...

    async def close(self) -> None:
        """May be repeated."""
        ...
