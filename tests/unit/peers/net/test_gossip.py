import random

import pytest

from peers.net.gossip import Gossip, key_of
from peers.protocol.limits import MAX_COUNT, MAX_MESSAGE_BYTES
from peers.protocol.mesh import MAX_NEWS, News
from peers.protocol.records import MAX_SPOKEN_BYTES, Lost
from peers.protocol.wire import encode
from peers.timing import PROBE_S
from tests.support.announcements import spoken

SILENCE_S = 60.0


def word(peer_id, number=1, incarnation=1, lost=()):
    return spoken(peer_id, incarnation=incarnation, number=number, lost=lost)


class Town:
    """Peers that pass on what they hear, without a network: everything arrives, but in any order."""

    def __init__(self, count, seed=0):
        self.chance, self.now = random.Random(seed), 0.0
        self.peers = {f"p{number}": Gossip(f"p{number}") for number in range(count)}
        self.numbers = dict.fromkeys(self.peers, 0)
        self.num_told = 0
        for peer_id in self.peers:
            self.say(peer_id)
        for one in self.peers:
            # Every peer has heard every other once.
            for other in self.peers.keys() - {one}:
                self.peers[one].heard(word(other), b"", self.now, other)

    def say(self, peer_id, lost=()):
        self.numbers[peer_id] += 1
        said = word(peer_id, self.numbers[peer_id], lost=lost)
        for neighbour in self.peers[peer_id].neighbours & self.peers.keys():
            self.peers[neighbour].heard(said, b"", self.now, peer_id)
        return said

    def pass_on(self):
        """Pass on until nobody has any news. Returns how many rounds that takes."""
        rounds = 0
        while True:
            told = [
                (by, neighbour, one)
                for by, gossip in self.peers.items()
                for neighbour, news in gossip.due(gossip.neighbours & self.peers.keys())
                for one in news
            ]
            if not told:
                return rounds
            rounds += 1
            self.num_told += len(told)
            self.chance.shuffle(told)
            for by, neighbour, one in told:
                gossip = self.peers[neighbour]
                if gossip.is_news(one.peer_id, (one.incarnation, one.number)):
                    newest = self.peers[by].newest(one.peer_id)
                    assert newest is not None
                    gossip.heard(newest, b"", self.now, by)

    def ask(self):
        """Every peer asks a neighbour for what it has missed."""
        for peer_id, gossip in self.peers.items():
            asked = self.peers[self.chance.choice(sorted(gossip.neighbours & self.peers.keys()))]
            for one in asked.missing(peer_id, gossip.versions(), self.now + 1):
                newest = asked.newest(one.peer_id)
                assert newest is not None
                gossip.heard(newest, b"", self.now, "the one asked")

    def knowing(self, peer_id, number):
        return sum(
            (known := gossip.newest(peer_id)) is not None and known.number >= number
            for gossip in self.peers.values()
        )


@pytest.mark.parametrize("count", [33, 50, 200])
def test_what_one_says_reaches_all_in_a_few_rounds_and_everybody_once(count):
    town = Town(count)
    town.pass_on()
    town.num_told = 0
    said = town.say("p0")
    assert town.pass_on() <= 6
    assert town.knowing("p0", said.number) == count - 1
    assert town.num_told == count - 1 - len(town.peers["p0"].neighbours)


@pytest.mark.parametrize("seed", range(5))
def test_who_has_missed_something_gets_it_by_asking_its_neighbours(seed):
    town = Town(50, seed)
    town.pass_on()
    said = town.say("p0")
    # Lose what the neighbours pass on.
    for gossip in town.peers.values():
        list(gossip.due(gossip.neighbours))
    missed = 49 - town.knowing("p0", said.number)
    assert missed == 49 - len(town.peers["p0"].neighbours)
    for _ in range(8):
        town.ask()
    assert town.knowing("p0", said.number) == 49
    assert town.peers["p1"].missing("p2", town.peers["p2"].versions(), town.now + 1) == ()


def test_what_is_young_is_no_answer_since_it_is_still_on_its_way():
    gossip = Gossip("me")
    gossip.heard(word("a"), b"old", 1.0, "a")
    gossip.heard(word("b"), b"young", 2.0, "b")
    assert [one.record for one in gossip.missing("c", {}, 2.0)] == [b"old"]
    assert gossip.missing("c", {key_of("a"): (1, 1)}, 2.0) == ()
    assert [one.record for one in gossip.missing("c", {key_of("a"): (1, 0)}, 3.0)] == [b"old", b"young"]


def test_an_older_word_is_no_news_and_changes_nothing():
    gossip = Gossip("me")
    assert gossip.heard(word("a", number=5), b"5", 0.0, "a")
    assert not gossip.heard(word("a", number=4), b"4", 0.0, "b")
    assert not gossip.heard(word("me", number=9), b"", 0.0, "b")
    assert gossip.here["a"].number == 5
    assert gossip.heard(word("a", number=1, incarnation=2), b"1", 0.0, "b")
    assert gossip.here["a"].incarnation == 2


def kill(town, peer_id):
    """Remove this peer; its neighbours lose their channels to it and report the loss."""
    neighbours = town.peers[peer_id].neighbours & town.peers.keys()
    del town.peers[peer_id]
    for neighbour in neighbours:
        gossip = town.peers[neighbour]
        assert gossip.lose(peer_id, town.now, by_own_channel=True)
        town.say(neighbour, lost=gossip.lost_lately(town.now))


def take_rumours(town):
    for gossip in town.peers.values():
        for said in list(gossip.here.values()):
            for lost in gossip.rumoured(said):
                gossip.lose(lost, town.now, by_own_channel=False)


@pytest.mark.parametrize("seed", range(5))
def test_a_death_is_known_to_all_once_its_neighbours_have_said_so(seed):
    town = Town(50, seed)
    town.pass_on()
    kill(town, "p7")
    # While only some know of the death, the peers disagree on who passes news to whom, so several rounds are needed.
    for _ in range(8):
        town.pass_on()
        town.ask()
        take_rumours(town)
    assert not any("p7" in gossip.here for gossip in town.peers.values())
    # A peer that comes back sends something newer, and is heard.
    town.now += PROBE_S
    for gossip in town.peers.values():
        assert gossip.heard(word("p7", incarnation=2), b"", town.now, "p8")
        assert "p7" in gossip.here


def test_some_of_its_neighbours_cannot_talk_a_peer_away_and_others_not_at_all():
    town = Town(50)
    town.pass_on()
    watcher = town.peers["p0"]
    neighbours = sorted(town.peers["p7"].neighbours - {"p0"})
    strangers = sorted(town.peers.keys() - set(neighbours) - {"p0", "p7"})
    lost = (Lost(peer_id="p7", incarnation=1, number=10**6),)
    for number, liar in enumerate((*strangers, *neighbours[: len(neighbours) // 2])):
        said = word(liar, 100 + number, lost=lost)
        watcher.heard(said, b"", 0.0, liar)
        assert watcher.rumoured(said) == set()
    said = word(neighbours[-1], 1000, lost=lost)
    watcher.heard(said, b"", 0.0, neighbours[-1])
    assert watcher.rumoured(said) == {"p7"}


def test_a_rumour_about_older_words_is_over_once_there_is_a_newer_one():
    town = Town(50)
    town.pass_on()
    watcher = town.peers["p0"]
    lost = (Lost(peer_id="p7", incarnation=1, number=1),)
    watcher.heard(word("p7", number=2), b"", 0.0, "p9")
    for liar in town.peers["p7"].neighbours - {"p0"}:
        said = word(liar, 100, lost=lost)
        watcher.heard(said, b"", 0.0, liar)
        assert watcher.rumoured(said) == set()


def test_words_that_were_on_their_way_bring_nobody_back_to_whom_the_channel_has_just_broken():
    gossip = Gossip("me")
    for number in range(40):
        gossip.heard(word(f"p{number}"), b"", 0.0, f"p{number}")
    gossip.lose("p3", 10.0, by_own_channel=True)
    assert not gossip.heard(word("p3", number=2), b"", 10.1, "p4")
    assert "p3" not in gossip.here
    # The reported loss covers this word too, so that others take it for one from before the loss.
    assert gossip.lost_lately(10.2) == (Lost(peer_id="p3", incarnation=1, number=2),)
    assert gossip.heard(word("p3", number=3), b"", 10.1 + PROBE_S, "p4")
    assert gossip.heard(word("p3", number=4), b"", 10.2, "p3")
    assert gossip.lost_lately(10.3) == ()


def test_the_last_word_of_the_dead_that_comes_after_its_obituaries_brings_nobody_back():
    town = Town(50)
    town.pass_on()
    watcher = town.peers["p0"]
    lost = (Lost(peer_id="p7", incarnation=1, number=2),)
    for number, reporter in enumerate(sorted(town.peers["p7"].neighbours - {"p0"})):
        said = word(reporter, 100 + number, lost=lost)
        watcher.heard(said, b"", 0.0, reporter)
        if "p7" in watcher.rumoured(said):
            watcher.lose("p7", 0.0, by_own_channel=False)
    assert "p7" not in watcher.here
    assert not watcher.heard(word("p7", number=2), b"", 0.0, "p9")
    assert "p7" not in watcher.here
    assert watcher.heard(word("p7", number=3), b"", 0.0, "p9")
    assert "p7" in watcher.here


def test_of_whom_nothing_new_comes_is_silent():
    gossip = Gossip("me")
    gossip.heard(word("a"), b"", 0.0, "b")
    gossip.heard(word("c"), b"", 50.0, "b")
    assert gossip.silent(SILENCE_S + 1, SILENCE_S) == {"a"}


def test_a_new_neighbour_is_told_everything_a_message_at_a_time():
    gossip = Gossip("me")
    count = MAX_NEWS + 10
    for number in range(count):
        gossip.heard(word(f"p{number}"), b"r", 0.0, "p0")
    told = []
    while news := dict(gossip.due({"p0"})).get("p0"):
        assert len(news) <= MAX_NEWS
        told += news
    assert {one.peer_id for one in told} == {f"p{number}" for number in range(1, count)}
    assert not gossip.is_owed


def test_news_fit_into_a_message_however_long_the_words_are_and_whatever_their_order():
    gossip = Gossip("me")
    long = b"l" * MAX_SPOKEN_BYTES
    # Longest ids and greatest numbers; the long record comes last, when the message is almost half full.
    short = b"s" * (MAX_SPOKEN_BYTES // 2 // (MAX_NEWS - 1) - 1)
    for number in range(MAX_NEWS):
        peer_id = f"{number:0128}"
        record = short if number else long
        gossip.heard(word(peer_id, MAX_COUNT, MAX_COUNT), record, 0.0, peer_id)
    told = dict(gossip.due({"neighbour"}))["neighbour"]
    assert len(told) == MAX_NEWS and told[-1].record == long
    assert len(encode(News(told=told))) <= MAX_MESSAGE_BYTES


def test_in_a_full_mesh_nothing_is_passed_on_by_anybody_who_asks_first():
    gossip = Gossip("me")
    for number in range(5):
        gossip.heard(word(f"p{number}"), b"", 0.0, f"p{number}")
    assert gossip.is_full_mesh
    assert gossip.neighbours == gossip.here.keys()
