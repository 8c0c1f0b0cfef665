"""One real Peer among simulated ones, which send only what a test makes them send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from peers.core import effects, events
from peers.core.settings import Settings
from peers.protocol.certificates import Body, Certificate, Plan, Work
from peers.protocol.messages import Ask, Certificates, Message, Vote, decode_message
from peers.protocol.wire import encode
from tests.unit.peers.core.made import OFFER, SETTINGS, a_peer, digest, status, vote_of, work

BEAT_S = 0.4
Peers = Iterable[str]


class Driven:
    """Drives the peer `me`, which has a worker, and collects the effects that it asks for.

    The peers in `others` repeat their statuses while time passes. They answer requests for the certificates in `known`,
    except for the peers in `mute`.
    """

    def __init__(
        self,
        me: str = "a",
        *,
        settings: Settings = SETTINGS,
        pledges: Mapping[str, int] | None = None,
        has_worker: bool = True,
    ) -> None:
        self.now, self.me = 0.0, me
        self.peer = a_peer(me, settings=settings, pledges=pledges)
        self.effects: list[effects.Effect] = []
        self.others: dict[str, dict] = {}
        self.known: dict[str, Certificate] = {}
        self.mute: set[str] = set()
        """Peers that do not answer requests."""
        self._sequence = 0
        if has_worker:
            self.feed(events.StateOffered(OFFER))
            self.feed(events.WorkerWaits())

    @classmethod
    def at(cls, genesis: Certificate, others: Peers = "", me: str = "a", **kwargs) -> Driven:
        """A peer that has begun from this genesis, as have `others`."""
        driven = cls(me, **kwargs)
        driven.feed(
            events.Received(
                others[0] if others else "z", Certificates(head=genesis.head, certificates=(genesis,))
            )
        )
        driven.announce(genesis, others)
        assert driven.peer.head == genesis.head
        return driven

    def feed(self, event: events.Event | None) -> list[effects.Effect]:
        made = self.peer.handle(event, self.now)
        self.effects += made
        return made

    def say(self, sender: str, message: Message) -> list[effects.Effect]:
        return self.feed(events.Received(sender, decode_message(encode(message))))

    def announce(
        self, certificate: Certificate | None, names: Peers, phase: str = "training", **others
    ) -> None:
        """From now on, these peers announce this certificate as their newest."""
        if certificate is not None:
            self.known[certificate.head] = certificate
        for name in names:
            self.others[name] = {"certificate": certificate, "phase": phase, **others}
            self._beat(name)

    def hush(self, names: Peers) -> None:
        """From now on, these peers send no statuses."""
        for name in names:
            self.others.pop(name, None)

    def know(self, certificates: Iterable[Certificate]) -> None:
        self.known |= {certificate.head: certificate for certificate in certificates}

    def run(self, seconds: float) -> list[effects.Effect]:
        """Let time pass. Returns the effects that the peer asks for meanwhile."""
        before, end = len(self.effects), self.now + seconds
        while self.now < end:
            moment = min(self.now + BEAT_S, end)
            while self.now < self.peer.deadline < moment:
                self.now = self.peer.deadline
                self._answer(self.feed(None))
            self.now = moment
            for name in list(self.others):
                self._beat(name)
            self._answer(self.feed(None))
        return self.effects[before:]

    def ready(self, handed: Work | None = None) -> list[effects.Effect]:
        return self.feed(events.WorkReady(handed or work()))

    def fetched(self) -> list[effects.Effect]:
        assert self.peer.catch_up.target is not None
        return self.feed(events.Fetched(self.peer.catch_up.target.head))

    def come_to(self, path: Sequence[Certificate], holders: Peers) -> None:
        """Make the peer adopt these commits from `holders`, whose newest certificate is the last of them."""
        self.know(path)
        self.announce(path[-1], holders)
        for _ in range(30):
            if self.peer.catch_up.target is None:
                self.run(1)
        self.fetched()
        assert self.peer.head == path[-1].head

    def leads(self, attempt: int) -> bool:
        """Whether the peer leads this attempt on its own head."""
        return self.peer.round.leader_of(attempt) == self.me

    def vote(self, sender: str, plan: Plan, *, anchor: str = "", momentum: str = "") -> Vote:
        body = Body(plan=plan, anchor=anchor or digest("anchor"), momentum=momentum or digest("momentum"))
        return vote_of(sender, body)

    def of(self, kind: type, made: Sequence[effects.Effect] | None = None) -> list:
        """The effects of this kind, or the sent messages of this kind."""
        made = self.effects if made is None else made
        if issubclass(kind, (effects.Send, effects.Broadcast)) or kind.__module__ == effects.__name__:
            return [effect for effect in made if isinstance(effect, kind)]
        return [
            effect.message
            for effect in made
            if isinstance(effect, (effects.Send, effects.Broadcast)) and isinstance(effect.message, kind)
        ]

    def _beat(self, name: str) -> None:
        if name not in self.others:
            return
        self._sequence += 1
        stands = dict(self.others[name])
        said = status(stands.pop("certificate"), stands.pop("phase"), sequence=self._sequence, **stands)
        self._answer(self.say(name, said))

    def _answer(self, made: Sequence[effects.Effect]) -> None:
        for effect in made:
            if not isinstance(effect, effects.Send) or not isinstance(effect.message, Ask):
                continue
            if effect.peer_id in self.mute or effect.peer_id not in self.others:
                continue
            found, head = [], effect.message.head
            while len(found) < 32 and head != effect.message.have and head in self.known:
                found.append(self.known[head])
                head = self.known[head].plan.parent
            answer = Certificates(head=effect.message.head, certificates=tuple(found[::-1]))
            self._answer(self.say(effect.peer_id, answer))


def fetched_heads(driven: Driven) -> list[str]:
    return [fetch.path[-1].head for fetch in driven.of(effects.Fetch)]
