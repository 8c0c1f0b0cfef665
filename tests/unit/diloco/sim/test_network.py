"""Virtual links: what arrives, in which order, and who is told when a channel breaks."""

from __future__ import annotations

import random

import pytest

from diloco.sim.clock import Clock
from diloco.sim.network import Network, Quality
from peers.core import events
from peers.core.events import Event
from peers.protocol.messages import Ask, Certificates, Message

HEAD = "a" * 64


def ask(number: int) -> Ask:
    return Ask(head=f"{number:064x}")


class Port:
    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.heard: list[tuple[str, Message]] = []
        self.lost: list[str] = []

    def post(self, event: Event) -> None:
        match event:
            case events.Received(sender, message):
                self.heard.append((sender, message))
            case events.Disconnected(peer_id):
                self.lost.append(peer_id)


class Links:
    """Three ports, connected."""

    def __init__(self, quality: Quality | None = None) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, random.Random(1), quality)
        self.a, self.b, self.c = self.ports = [Port(name) for name in "abc"]
        for port in self.ports:
            self.network.open(port)
        self.clock.advance(2.0)

    def send(self, count: int) -> list[str]:
        """Send messages from a to b. Returns the heads in the messages that arrived."""
        for number in range(count):
            self.network.send("a", "b", ask(number))
        self.clock.advance(self.clock.now + 5.0)
        return [message.head for _, message in self.b.heard]


def test_messages_arrive_in_order_and_once():
    assert Links().send(50) == [f"{number:064x}" for number in range(50)]


def test_a_broadcast_reaches_everybody_but_its_sender():
    links = Links()
    links.network.broadcast("a", ask(1))
    links.clock.advance(5.0)
    assert [port.heard for port in links.ports] == [[], [("a", ask(1))], [("a", ask(1))]]


def test_messages_are_encoded_and_decoded_on_their_way():
    links = Links()
    message = Certificates(head=HEAD, certificates=())
    links.network.send("a", "b", message)
    links.network.send("a", "b", Ask(head="not a hash"))
    links.clock.advance(5.0)
    [(_, received)] = links.b.heard
    assert received == message and received is not message
    assert links.network.num_refused == 1


def test_bad_links_lose_double_and_reorder():
    assert len(Links(Quality(loss=0.5)).send(100)) == pytest.approx(50, abs=20)
    assert len(Links(Quality(duplication=0.5)).send(100)) == pytest.approx(150, abs=20)
    heads = Links(Quality(reordering=0.5)).send(100)
    assert sorted(heads) == [f"{number:064x}" for number in range(100)] != heads


def test_a_message_may_be_replaced_or_kept_from_one_receiver():
    links = Links()
    links.network.tamper = lambda sender, receiver, message: ask(7) if receiver == "b" else None
    links.network.broadcast("a", ask(1))
    links.clock.advance(5.0)
    assert [port.heard for port in links.ports] == [[], [("a", ask(7))], []]


def test_a_link_cut_both_ways_is_told_to_both_ends_and_opens_again():
    links = Links()
    links.network.cut("a", "b")
    links.network.cut("b", "a")
    links.clock.advance(4.0)
    assert (links.a.lost, links.b.lost, links.c.lost) == (["b"], ["a"], [])
    assert links.send(1) == []
    links.network.heal("a", "b")
    links.network.heal("b", "a")
    links.clock.advance(links.clock.now + 1.0)
    assert len(links.send(1)) == 1


def test_a_link_cut_one_way_is_silent():
    links = Links()
    links.network.cut("a", "b")
    assert links.send(3) == []
    links.network.send("b", "a", ask(7))
    links.clock.advance(20.0)
    assert links.a.heard == [("b", ask(7))]
    assert links.a.lost == links.b.lost == []
    assert not links.network.is_linked("a", "b")


def test_what_is_under_way_when_a_link_is_cut_is_lost():
    links = Links()
    links.network.send("a", "b", ask(1))
    links.network.cut("a", "b")
    links.clock.advance(5.0)
    assert links.b.heard == []


def test_the_others_are_told_of_a_death_and_hear_the_next_life():
    links = Links()
    links.network.send("b", "a", ask(1))
    links.network.close("b")
    links.clock.advance(4.0)
    assert links.a.heard == [("b", ask(1))]
    assert (links.a.lost, links.c.lost) == (["b"], ["b"])
    links.b = Port("b")
    links.network.open(links.b)
    links.clock.advance(6.0)
    assert len(links.send(1)) == 1
