"""A message pump around real peers: messages take a moment, workers train, reductions and downloads end as tests say.

Everything happens on a clock of its own, in the order of moments and then of making.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from peers.core import effects, events
from peers.core.peer import Peer
from peers.core.settings import Settings
from peers.protocol import messages
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Message, Status
from peers.protocol.wire import encode
from tests.unit.peers.core.made import OFFER, SETTINGS, Keys, digest, verify, work

DELAY_S = 0.01


@dataclass
class Node:
    """One process: a real Peer, and what its runtime has done for it."""

    name: str
    peer: Peer
    pledges: dict[str, int]
    train_s: float
    trains: bool = True
    """Its worker trains by itself."""
    is_up: bool = True
    done: list[tuple[float, effects.Effect]] = field(default_factory=list)
    signed: list[tuple[str, int, str]] = field(default_factory=list)
    """Head, attempt and plan of its votes."""
    state: Certificate | None = None
    states: set[str] = field(default_factory=set)
    reducing: Plan | None = None
    plan: Plan | None = None
    """Of the last reduction."""
    result: tuple[str, str] | None = None
    timer: float = float("inf")

    def effects(self, kind: type) -> list:
        return [effect for _, effect in self.done if isinstance(effect, kind)]

    @property
    def answers(self) -> list[str]:
        return [answer.how for answer in self.effects(effects.Answer)]


class Pump:
    """`tamper(sender, to, message)`: what arrives instead; None: nothing. `reduces(name, plan)`: a reason for this
    member's reduction to fail, with suspects; None: it comes to the digests that everybody gets."""

    def __init__(self, names: Iterable[str], *, settings: Settings = SETTINGS, train_s: float = 5.0) -> None:
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.settings = settings
        self.tamper: Callable[[str, str, Message], Message | None] = lambda sender, to, message: message
        self.reduces: Callable[[str, Plan], tuple[str, frozenset[str]] | None] = lambda name, plan: None
        self.digests: Callable[[str, Plan], tuple[str, str]] = lambda name, plan: (
            digest("anchor", plan.digest),
            digest("momentum", plan.digest),
        )
        self.reduce_s = 0.2
        self.fetch_s = 0.2
        self.cut: set[frozenset[str]] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._train_s = train_s
        for name in names:
            self.start(name)

    # What tests do

    def start(
        self,
        name: str,
        *,
        trains: bool = True,
        settings: Settings | None = None,
        train_s: float = 0.0,
        rank: int = -1,
    ) -> Node:
        """A process, perhaps after one of the same name; it keeps its pledges."""
        old = self.nodes.get(name)
        pledges = old.pledges if old else {}
        if old is not None:
            old.is_up = False
        peer = Peer(
            keys=Keys(name),
            verify=verify,
            settings=settings or self.settings,
            incarnation=next(self._order),
            world_rank=rank,
            pledges=pledges,
            now=self.now,
        )
        node = self.nodes[name] = Node(name, peer, pledges, train_s or self._train_s, trains)
        for other in self.up:
            # A channel begins with what both ends last said.
            said = [
                one.message for one in other.effects(effects.Broadcast) if isinstance(one.message, Status)
            ]
            if said and frozenset((name, other.name)) not in self.cut:
                self.feed(name, events.Received(other.name, said[-1]))
        self.feed(name, events.StateOffered(OFFER))
        self.feed(name, events.WorkerWaits())
        return node

    def kill(self, name: str) -> None:
        self.nodes[name].is_up = False
        for other in self.nodes:
            if other != name:
                self.feed(other, events.Disconnected(name))

    def disconnect(self, *pairs: str) -> None:
        """Of pairs like "ab"."""
        for one, other in pairs:
            self.cut.add(frozenset((one, other)))
            self.feed(one, events.Disconnected(other))
            self.feed(other, events.Disconnected(one))

    def mend(self) -> None:
        self.cut.clear()

    def feed(self, name: str, event: events.Event | None) -> None:
        node = self.nodes[name]
        if node.is_up:
            self._handle(node, event)

    def say(self, sender: str, to: str, message: Message) -> None:
        """From somebody whom no Peer plays."""
        self.feed(to, events.Received(sender, message))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        end = self.now + seconds
        while not until():
            if not self._events or self._events[0][0] > end:
                self.now = end
                return until()
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return True

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), happen))

    # What tests ask

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    @property
    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.is_up]

    def heads(self) -> set[str]:
        return {node.peer.head for node in self.up}

    def epochs(self) -> set[int]:
        return {node.peer.epoch for node in self.up}

    def reach(self, epoch: int, seconds: float) -> bool:
        """Everybody is there, on one chain."""
        return self.run(seconds, lambda: min(self.epochs()) >= epoch and len(self.heads()) == 1)

    def signed_twice(self) -> dict[str, set[tuple[str, int]]]:
        found: dict[str, set[tuple[str, int]]] = {}
        for name, node in self.nodes.items():
            plans = defaultdict(set)
            for head, attempt, plan in node.signed:
                plans[head, attempt].add(plan)
            if twice := {key for key, signed in plans.items() if len(signed) > 1}:
                found[name] = twice
        return found

    # The runtime

    def _handle(self, node: Node, event: events.Event | None) -> None:
        for effect in node.peer.handle(event, self.now):
            node.done.append((self.now, effect))
            self._carry_out(node, effect)
        if node.peer.deadline < node.timer:
            node.timer = node.peer.deadline
            self.after(max(0.0, node.peer.deadline - self.now), lambda: self._tick(node))

    def _tick(self, node: Node) -> None:
        node.timer = float("inf")
        if node.is_up:
            self._handle(node, None)

    def _carry_out(self, node: Node, effect: effects.Effect) -> None:
        match effect:
            case effects.Send(peer_id, message):
                self._send(node, peer_id, message)
            case effects.Broadcast(message):
                for other in list(self.nodes):
                    if other != node.name:
                        self._send(node, other, message)
            case effects.Pledge(head, attempt):
                node.pledges[head] = attempt
                if node.plan is not None and node.plan.parent == head:
                    # It signs the result now; a leader sends that vote to nobody.
                    node.signed.append((head, attempt, node.plan.digest))
            case effects.Reduce(plan, timeout_s):
                node.reducing, node.plan, node.result = plan, plan, None
                self.after(timeout_s, lambda: self._reduce_failed(node, plan))
                self._perhaps_reduced(plan)
            case effects.CancelReduce():
                node.reducing = None
            case effects.Apply(certificate):
                assert node.result == (certificate.body.anchor, certificate.body.momentum)
                assert node.state is not None and node.state.head == certificate.plan.parent
                self._now_at(node, certificate)
            case effects.Adopt(certificate):
                self._now_at(node, certificate)
            case effects.Fetch(path, donors, _):
                self._fetch(node, path[-1].head, donors)
            case effects.Answer() if node.trains:
                left = 1 - effect.local_step / self.settings.steps_per_epoch
                self.after(node.train_s * left, lambda: self._hand_over(node, effect.epoch))

    def _now_at(self, node: Node, certificate: Certificate) -> None:
        node.state = certificate
        node.states.add(certificate.head)

    def _send(self, node: Node, to: str, message: Message) -> None:
        if isinstance(message, messages.Vote):
            node.signed.append((message.head, message.attempt, message.plan))
        tampered = self.tamper(node.name, to, message)
        if tampered is None or to not in self.nodes or frozenset((node.name, to)) in self.cut:
            return
        decoded = messages.decode_message(encode(tampered))
        self.after(DELAY_S, lambda: self.feed(to, events.Received(node.name, decoded)))

    def _perhaps_reduced(self, plan: Plan) -> None:
        group = [self.nodes.get(name) for name in plan.signers]
        if any(node is None or node.reducing != plan for node in group):
            return
        for node in group:
            assert node is not None
            self.after(self.reduce_s, lambda node=node: self._reduced(node, plan))

    def _reduced(self, node: Node, plan: Plan) -> None:
        if node.reducing != plan:
            return
        lost = {o for o in plan.signers if frozenset((node.name, o)) in self.cut or not self.nodes[o].is_up}
        failure = self.reduces(node.name, plan) or (("cut", frozenset(lost)) if lost else None)
        node.reducing = None
        if failure is not None:
            self.feed(node.name, events.ReduceFailed(plan.digest, *failure))
            return
        node.result = self.digests(node.name, plan)
        self.feed(node.name, events.Reduced(plan.digest, *node.result))

    def _reduce_failed(self, node: Node, plan: Plan) -> None:
        if node.reducing == plan:
            missing = {o for o in plan.signers if o not in self.nodes or self.nodes[o].reducing != plan}
            node.reducing = None
            self.feed(node.name, events.ReduceFailed(plan.digest, "too long", frozenset(missing)))

    def _fetch(self, node: Node, head: str, donors: tuple[str, ...]) -> None:
        def ends() -> None:
            can = [
                o
                for o in donors
                if o in self.nodes
                and self.nodes[o].is_up
                and head in self.nodes[o].states
                and frozenset((node.name, o)) not in self.cut
            ]
            event = events.Fetched(head) if can else events.FetchFailed(head, "nobody", frozenset(donors))
            self.feed(node.name, event)

        self.after(self.fetch_s, ends)

    def _hand_over(self, node: Node, epoch: int) -> None:
        if node.is_up and node.trains and node.peer.worker.is_training and node.peer.worker.epoch == epoch:
            step = self.settings.steps_per_epoch * (epoch + 1)
            self.feed(node.name, events.WorkReady(work(step=step)))


def with_settings(**changes) -> Settings:
    return replace(SETTINGS, **changes)
