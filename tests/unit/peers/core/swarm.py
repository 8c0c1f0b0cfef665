"""The virtual swarm with named peers, fixed durations, and faults that a test defines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

from diloco.sim.network import Quality
from diloco.sim.peer import VirtualPeer
from diloco.sim.swarm import Durations, VirtualSwarm
from diloco.sim.values import Pieces, State
from peers.core import effects, events
from peers.core.effects import Effect
from peers.core.settings import Settings
from peers.protocol.certificates import Plan
from peers.protocol.messages import Message
from tests.unit.peers.core.made import OFFER, SETTINGS, with_settings


class Mean(random.Random):
    """Makes every duration the mean of its range."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


class Node(VirtualPeer):
    """One process of one peer. Its effects take no time, so that a test never looks between two of them."""

    swarm: Swarm

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.trains = True
        """If false, its worker hangs as soon as it has an answer."""
        self.done: list[tuple[float, Effect]] = []
        """The effects that it carried out, each with its time."""

    def effects(self, kind: type) -> list:
        return [effect for _, effect in self.done if isinstance(effect, kind)]

    @property
    def answers(self) -> list[str]:
        return [answer.how for answer in self.effects(effects.Answer)]

    @property
    def commits(self) -> list[tuple[int, int, int]]:
        """Epoch, attempt and number of members of each commit that it has applied."""
        plans = [apply.certificate.plan for apply in self.effects(effects.Apply)]
        return [(plan.epoch, plan.attempt, len(plan.signers)) for plan in plans]

    @property
    def forks(self) -> list[effects.Tell]:
        """Its reports of forks that it lost."""
        return [tell for tell in self.effects(effects.Tell) if tell.kind == "fork"]

    def train_in(self, epoch_s: float) -> None:
        """Make its worker take `epoch_s` for an epoch."""
        self.worker.step_s = epoch_s / self.swarm.settings.steps_per_epoch

    def hang(self) -> None:
        """Make its worker stop training without ending."""
        self.trains = False
        self.worker.stop()
        self.swarm.truth.idle_until[self.peer_id] = math.inf

    def carry_out(self, effect: Effect) -> None:
        self.done.append((self.swarm.clock.now, effect))
        super().carry_out(effect)

    def answer(self, answer: effects.Answer) -> None:
        super().answer(answer)
        if not self.trains:
            self.hang()

    def reduced(self, plan: Plan, parts: dict[str, Pieces]) -> None:
        if (failure := self.swarm.reduces(self.peer_id, plan)) is not None:
            self.post(events.ReduceFailed(plan.digest, *failure))
            return
        self.garbles = self.garbles or self.swarm.garbles(self.peer_id, plan)
        super().reduced(plan, parts)

    def _take_time(self, end: Callable[[], None]) -> None:
        end()


class Swarm(VirtualSwarm):
    """A swarm that checks all invariants after every event, such as that no peer signs twice.

    `tamper(sender, receiver, message)`: what arrives instead, or None if nothing does. `reduces(name, plan)`: why this
    member's reduction fails, and its suspects, or None if it succeeds. `garbles(name, plan)`: if its digests are wrong.
    """

    peer_type = Node

    def __init__(
        self, names: Iterable[str] = "", *, settings: Settings = SETTINGS, train_s: float = 5.0
    ) -> None:
        durations = Durations(
            load_s=(0.5, 0.5),  # Long enough for it to hear the others.
            step_s=train_s / settings.steps_per_epoch,
            reduce_s=(0.2, 0.2),
            fetch_s=(0.2, 0.2),
        )
        quality = Quality(delay_s=(0.01, 0.01))
        super().__init__(0, settings=settings, durations=durations, quality=quality, rng=Mean(0))
        self.tamper: Callable[[str, str, Message], Message | None] = lambda sender, to, message: message
        self.network.tamper = lambda *sent: self.tamper(*sent)
        self.reduces: Callable[[str, Plan], tuple | None] = lambda name, plan: None
        self.garbles: Callable[[str, Plan], bool] = lambda name, plan: False
        for name in names:
            self.start(name)

    def start(self, name: str) -> Node:
        if name not in self.disks:
            self._add(name)
            self.offers[name] = State("", 0, OFFER.anchor, OFFER.momentum)
        super().start(name)
        return self[name]

    def world_rank_of(self, peer_id: str) -> int:
        return -1

    def say(self, sender: str, to: str, message: Message) -> None:
        """Deliver a message at once. The sender need not exist."""
        if to in self.live:
            self[to].post(events.Received(sender, message))

    def __getitem__(self, name: str) -> Node:
        return self.live[name]

    def epochs(self) -> set[int]:
        return {node.machine.epoch for node in self.live.values()}

    def reach(self, epoch: int, within_s: float) -> bool:
        """Run until all peers have reached this epoch, on one chain. Returns whether they did so within `within_s`."""
        return self.run_until(lambda: min(self.epochs()) >= epoch and len(self.heads()) == 1, within_s)


def founded(names: str, **settings) -> Swarm:
    """A swarm of these peers that has begun and committed twice."""
    swarm = Swarm(names, settings=with_settings(galaxy_size=len(names), **settings))
    assert swarm.reach(2, 100)
    return swarm
