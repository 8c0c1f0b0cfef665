"""A provider that may give any wrong answer but one: about the id of a pod that is not new, its answers are true.

A schedule (`Fates`) says which requests do not succeed, and what happens to them instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from provisioning.errors import NoCapacity, OutcomeUnknown, ProviderError, Unavailable
from provisioning.machines.machine import Answer
from provisioning.pods.pod import Listing, Offer, Pod, Row

SETTLE_S, DOUBT_S = 60.0, 600.0
DELAYS_S = (0.0, 5.0, 59.0, 100.0, 700.0, 3000.0)
"""Seconds until an ordered pod is known, at most SETTLE_S if the order was answered, or a deleted pod is gone."""
_ORDER = (
    *("late", "lost on its way", "its answer is lost", "it says no and does it", "two pods", "dearer"),
    *("taken", "busy", "no", "done, and its answer makes no sense"),
)
TAKEN, ORDER_LOST = _ORDER.index("taken"), _ORDER.index("lost on its way")
DENIED_AND_DONE = _ORDER.index("it says no and does it")
LISTS = (
    *("empty", "half", "with what is gone", "twice", "a part is silent", "broken", "busy"),
    *("its answer makes no sense", "no price makes sense"),
)
_FIND = ("broken", "busy", "its answer makes no sense")
_DESTROY = (
    *("late", "not done", "it says yes and does not", "done, it says no"),
    "done, and its answer makes no sense",
)
NUM_FATES = math.lcm(len(_ORDER), len(LISTS), len(_FIND), len(_DESTROY))
Fates = Mapping[int, tuple[int, float]]
"""By the number of a request: the number of its fate, and the seconds that the fate takes."""
TWIN = "b"
"""The suffix of the id of a second pod that one order made."""


@dataclass
class RealPod:
    """A pod that costs money until it is deleted."""

    id: str
    label: str
    price: float
    ordered_at: float
    known_at: float
    """The time from which the provider knows of the pod."""
    was_denied: bool = False
    """Whether its order was answered with a refusal."""
    deleted_at: float | None = None

    def lives(self, now: float) -> bool:
        return self.deleted_at is None or now < self.deleted_at

    def is_known(self, now: float) -> bool:
        return self.known_at <= now and self.lives(now)


class ReadyMachine:
    """A machine that answers, and on which no peer was ever started."""

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        return Answer(0, "", "") if script == "true" else Answer(1, "", "there is no such file")

    async def close(self) -> None:
        pass


@dataclass
class HostileProvider:
    """`before_order` is called with each order that the provider gets."""

    repeatable: bool
    clock: Callable[[], float] = time.time
    before_order: Callable[[Row], None] = lambda order: None
    pods_made: list[RealPod] = field(default_factory=list)
    name = "hostile"
    settle_s, doubt_s, keeps_time = SETTLE_S, DOUBT_S, False

    def begin(self, fates: Fates, step: Callable[[], None]) -> None:
        """Begin a new command with these fates. `step` is called wherever the command may be killed."""
        self._fates, self._step, self._num_requests = fates, step, 0

    async def check(self) -> None:
        pass

    async def offers(self) -> list[Offer]:
        common = {"provider": self.name, "gpu_type": "A100", "gpu_count": 8, "num_available": 9}
        return [Offer(id=f"o{price}", price_per_hour=price, **common) for price in (1.0, 1.2)]

    async def create(self, order: Row) -> str:
        fate, delay_s = self._next(_ORDER)
        self.before_order(order)
        match fate:
            case "lost on its way":
                raise OutcomeUnknown("the answer was lost, and so was the order")
            case "taken":
                raise NoCapacity("taken")
            case "busy":
                raise Unavailable("too many requests")
            case "no":
                raise ProviderError("no")
        is_answered = fate not in (
            *("its answer is lost", "it says no and does it"),
            "done, and its answer makes no sense",
        )
        made = self._made(order, delay_s)
        if is_answered:
            made.known_at = min(made.known_at, self.clock() + SETTLE_S)
        made.was_denied = fate == "it says no and does it"
        if fate == "two pods":
            twin = replace(made, id=f"{made.id}{TWIN}")
            self.pods_made.append(twin)
        if fate == "dearer":
            made.price *= 1.6
        self._step()
        if is_answered:
            return made.id
        if fate == "done, and its answer makes no sense":
            raise RecursionError("nested too deeply")
        raise NoCapacity("taken, it says") if made.was_denied else OutcomeUnknown("the answer was lost")

    def _made(self, order: Row, delay_s: float) -> RealPod:
        now = self.clock()
        for pod in self.pods_made:
            if self.repeatable and pod.label == order.label:
                return pod
        pod = RealPod(f"id{len(self.pods_made)}", order.label, order.offer.price_per_hour, now, now + delay_s)
        self.pods_made.append(pod)
        return pod

    async def pods(self) -> Listing:
        fate, _ = self._next(LISTS)
        once_known = [pod for pod in self.pods_made if pod.known_at <= self.clock()]
        known = [pod for pod in once_known if pod.lives(self.clock())]
        match fate:
            case "broken":
                raise ProviderError("500")
            case "busy":
                raise Unavailable("502")
            case "its answer makes no sense":
                raise TypeError("a list, and not a number")
            case "no price makes sense":
                return Listing(pods=[self._shown(pod, price=math.nan) for pod in known])
            case "a part is silent":
                return Listing(pods=[], silent={"a machine": "does not answer"})
        lists = {"empty": [], "half": known[::2], "with what is gone": once_known, "twice": known * 2}
        return Listing(pods=[self._shown(pod) for pod in lists.get(fate, known)])

    async def find(self, pod_id: str) -> Pod | None:
        fate, _ = self._next(_FIND)
        if fate == "broken":
            raise ProviderError("500")
        if fate == "busy":
            raise Unavailable("502")
        if fate == "its answer makes no sense":
            raise OverflowError("no number of GPUs is infinite")
        known = [pod for pod in self.pods_made if pod.id == pod_id and pod.is_known(self.clock())]
        return self._shown(known[0]) if known else None

    async def destroy(self, pod_id: str) -> None:
        fate, delay_s = self._next(_DESTROY)
        if fate == "not done":
            raise ProviderError("500, and not done")
        if fate == "it says yes and does not":
            return
        for pod in self.pods_made:
            if pod.id == pod_id and pod.is_known(self.clock()) and pod.deleted_at is None:
                pod.deleted_at = self.clock() + delay_s
        self._step()
        if fate == "done, it says no":
            raise ProviderError("500, but done")
        if fate == "done, and its answer makes no sense":
            raise KeyError("status")

    async def machine(self, pod: Pod, host_key: str) -> ReadyMachine:
        return ReadyMachine()

    async def host_key(self, pod: Pod) -> str:
        return ""

    def _next(self, kinds: Sequence[str]) -> tuple[str, float]:
        self._step()
        self._num_requests += 1
        if self._num_requests not in self._fates:
            return "well", 0.0
        number, delay_s = self._fates[self._num_requests]
        return kinds[number % len(kinds)], delay_s

    def _shown(self, pod: RealPod, price: float | None = None) -> Pod:
        price = pod.price if price is None else price
        return Pod(id=pod.id, label=pod.label, is_ready=True, gpu_count=8, price_per_hour=price)
