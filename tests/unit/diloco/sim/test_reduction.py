"""How reductions and downloads end when something goes wrong meanwhile, at each of those who take part."""

from __future__ import annotations

import random

import pytest

from diloco.sim.clock import Clock
from diloco.sim.download import REPEAT_S, Downloads
from diloco.sim.network import Network
from diloco.sim.reduction import OPEN_S, STALL_S, Reductions
from diloco.sim.values import Pieces, State, digest
from peers.core import events
from peers.protocol.certificates import Body, Contributor, Member, Plan, Work

NAMES = ("a", "b", "c")
WORK = Work(tokens=1, norm=1.0, step=0, based_on=0)
PLAN = Plan(
    manifest=digest("manifest"),
    parent=digest("head"),
    epoch=1,
    fragment=0,
    attempt=0,
    contributors=tuple(
        Contributor(peer_id=p, world_rank=i, work=WORK, weight=0.33) for i, p in enumerate(NAMES)
    ),
    roster=tuple(Member(peer_id=p, world_rank=i) for i, p in enumerate(NAMES)),
    data_base=0,
    tokens=0,
)
TIMEOUT_S = 30.0


class FakePeer:
    slowness = 1.0

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.is_frozen = False
        self.outcomes: list[str | frozenset[str]] = []
        """`done`, or the suspects."""
        self.told_by: frozenset[str] = frozenset()
        """The peers that reported the last suspects."""
        self.states: dict[str, State] = {}

    def post(self, event) -> None:
        if isinstance(event, events.ReduceFailed):
            self.told_by = event.told_by
        if isinstance(event, events.ReduceFailed | events.FetchFailed):
            self.outcomes.append(event.suspects)

    fetch_failed = post

    def reduced(self, plan: Plan, parts: dict[str, Pieces]) -> None:
        assert set(parts) == set(plan.signers)
        self.outcomes.append("done")

    def state_of(self, head: str) -> State | None:
        return self.states.get(head)

    def fetched(self, state: State) -> None:
        self.outcomes.append("done")


class World:
    def __init__(self, seed: int = 1) -> None:
        self.clock, rng = Clock(), random.Random(seed)
        self.network = Network(self.clock, rng)
        self.peers = {name: FakePeer(name) for name in NAMES}
        for peer in self.peers.values():
            self.network.open(peer)
        self.reductions = Reductions(self.clock, rng, self.network, (1.0, 1.0))
        self.downloads = Downloads(self.clock, rng, self.network, self.peers, (1.0, 1.0))
        self.clock.advance(2.0)
        self.began_at = self.clock.now

    def begin(self, *names: str) -> None:
        for index, name in enumerate(names):
            self.reductions.begin(self.peers[name], PLAN, frozenset({index}), TIMEOUT_S)

    def cut(self, sender: str, receiver: str) -> None:
        self.network.cut(sender, receiver)
        self.reductions.links_changed()

    def at(self, seconds: float) -> None:
        self.clock.advance(self.began_at + seconds)

    def outcomes(self) -> list:
        return [peer.outcomes for peer in self.peers.values()]


def test_all_members_get_the_result_once_all_have_begun():
    world = World()
    world.begin("a", "b")
    world.at(OPEN_S - 1)
    assert world.outcomes() == [[], [], []]
    world.begin("c")
    world.at(OPEN_S + 0.5)
    assert world.outcomes() == [["done"], ["done"], ["done"]]


def test_who_is_so_slow_that_the_time_runs_out_is_suspected_by_the_others():
    world = World()
    world.peers["b"].slowness = 100.0
    world.begin(*NAMES)
    world.at(TIMEOUT_S + 1)
    assert world.outcomes() == [[{"b"}], [set()], [{"b"}]]


def test_who_does_not_begin_is_suspected_by_all_others():
    world = World()
    world.begin("a", "b")
    world.at(OPEN_S + 1)
    assert {"c"} in world.peers["a"].outcomes and {"c"} in world.peers["b"].outcomes


def test_the_death_of_a_member_ends_it_for_those_who_have_not_finished():
    world = World()
    world.begin(*NAMES)
    world.at(0.5)
    world.network.close("c")
    world.reductions.end("c", "died")
    world.at(2.0)
    assert all(outcome in ([{"c"}], [{"b"}], [{"a"}]) for outcome in world.outcomes()[:2])
    assert [{"c"}] in world.outcomes()[:2]
    assert world.outcomes()[2] == []


def test_a_member_that_dies_late_may_leave_some_with_the_result_and_others_without():
    mixed = 0
    for seed in range(40):
        world = World(seed)
        world.begin(*NAMES)
        world.at(1.1)
        world.network.close("c")
        world.reductions.end("c", "died")
        world.at(3.0)
        mixed += ["done"] in world.outcomes()[:2] and ["done"] != world.outcomes()[0] != world.outcomes()[1]
    assert mixed > 3


def test_a_link_cut_both_ways_breaks_it_soon_and_each_end_suspects_the_other():
    world = World()
    world.begin(*NAMES)
    world.at(0.5)
    world.cut("a", "b")
    world.cut("b", "a")
    world.at(1.6)
    assert all(len(outcome) == 1 for outcome in world.outcomes())
    assert [{"b"}] == world.outcomes()[0] or [{"a"}] == world.outcomes()[1]


def test_a_member_whose_own_links_are_well_hears_whom_the_others_blame():
    seen = set()
    for seed in range(40):
        world = World(seed)
        world.begin(*NAMES)
        world.at(0.5)
        world.cut("a", "b")
        world.cut("b", "a")
        world.at(1.6)
        (suspects,) = world.peers["c"].outcomes
        seen.add((suspects, world.peers["c"].told_by))
    a, b = frozenset("a"), frozenset("b")
    assert seen == {(a, frozenset()), (b, frozenset()), (a, b), (b, a)}


def test_a_link_cut_one_way_stalls_it():
    world = World()
    world.begin(*NAMES)
    world.at(0.5)
    world.cut("a", "b")
    world.at(STALL_S)
    assert world.outcomes()[0] == world.outcomes()[1] == []
    world.at(STALL_S + 2)
    assert world.outcomes()[1] in ([{"a"}], [{"c"}])


@pytest.mark.parametrize(("frozen_s", "ends_well"), [(2.0, True), (20.0, False)])
def test_a_frozen_member_delays_it_and_is_suspected_if_it_takes_too_long(frozen_s, ends_well):
    world = World()
    world.begin(*NAMES)
    world.at(0.5)
    world.peers["c"].is_frozen = True
    world.reductions.frozen("c")
    world.at(frozen_s)
    world.peers["c"].is_frozen = False
    world.at(TIMEOUT_S)
    assert (world.outcomes() == [["done"]] * 3) == ends_well
    assert ends_well or [{"c"}] in world.outcomes()[:2]


def test_who_gives_up_takes_the_others_along_and_hears_no_more_of_it():
    world = World()
    world.begin(*NAMES)
    world.at(0.5)
    world.reductions.end("b")
    world.at(3.0)
    assert world.outcomes()[1] == []
    assert [{"b"}] in (world.outcomes()[0], world.outcomes()[2])


BODY = Body(plan=PLAN, anchor=digest("anchor"), momentum=digest("momentum"))
STATE = State(BODY.head, 1, BODY.anchor, BODY.momentum)


def test_a_download_needs_one_donor_that_is_heard_to_its_end():
    world = World()
    world.peers["b"].states[STATE.head] = STATE
    world.downloads.begin(world.peers["a"], BODY, ("b", "c"), TIMEOUT_S)
    world.at(2.0)
    assert world.peers["a"].outcomes == ["done"]
    world.downloads.begin(world.peers["a"], BODY, ("b", "c"), TIMEOUT_S)
    world.cut("b", "a")
    world.at(4.0)
    assert world.peers["a"].outcomes == ["done", {"b", "c"}]


def test_a_donor_serves_the_state_that_it_had_when_the_download_began():
    world = World()
    world.peers["b"].states[STATE.head] = STATE
    world.downloads.begin(world.peers["a"], BODY, ("b",), TIMEOUT_S)
    world.peers["b"].states.clear()
    world.at(2.0)
    assert world.peers["a"].outcomes == ["done"]


@pytest.mark.parametrize(("follows", "takes_s"), [(True, REPEAT_S), (False, 8.0)])
def test_commits_are_repeated_faster_than_a_state_is_transferred(follows, takes_s):
    world = World()
    world.downloads.fetch_s = (8.0, 8.0)
    world.peers["b"].states[STATE.head] = STATE
    world.downloads.begin(world.peers["a"], BODY, ("b",), TIMEOUT_S, follows=follows)
    world.at(takes_s - 0.1)
    assert world.peers["a"].outcomes == []
    world.at(takes_s + 0.1)
    assert world.peers["a"].outcomes == ["done"]


def test_values_that_do_not_match_the_digests_are_not_taken():
    world = World()
    world.peers["b"].states[STATE.head] = State(STATE.head, 1, digest("false"), STATE.momentum)
    world.downloads.begin(world.peers["a"], BODY, ("b",), TIMEOUT_S)
    world.at(2.0)
    assert world.peers["a"].outcomes == [{"b"}]


def test_a_download_that_was_ended_brings_nothing():
    world = World()
    world.peers["b"].states[STATE.head] = STATE
    world.downloads.begin(world.peers["a"], BODY, ("b",), TIMEOUT_S)
    world.downloads.end("a")
    world.at(5.0)
    assert world.peers["a"].outcomes == []
