"""Rounds of real peers on a pump: leaders that die, keep silent or differ, members that are late or leave."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from peers.core import effects, events
from peers.core.plans import ABSENT_COMMITS
from peers.core.weights import Aggregation
from peers.daemon.doing import standing_of
from peers.protocol.certificates import Plan
from peers.protocol.messages import Abort, Certificates, Decline, Message, Propose, Vote
from tests.unit.peers.core.made import digest, work
from tests.unit.peers.core.pump import Node, Pump, with_settings


def founded(names: str, **settings) -> Pump:
    """They have begun, and committed twice."""
    pump = Pump(names, settings=with_settings(galaxy_size=len(names), **settings))
    assert pump.reach(2, 100)
    return pump


def at_the_end_of_an_epoch(pump: Pump) -> str:
    """The leader of the attempt to come, which nobody has begun."""
    pump.run(1)
    return pump.up[0].peer.round.leader_of(0)


def last(pump: Pump, name: str):
    return pump[name].peer.certificate


def commits(node: Node) -> list[tuple[int, int, int]]:
    """Epoch, attempt and number of members of what it has applied."""
    plans = [apply.certificate.plan for apply in node.effects(effects.Apply)]
    return [(plan.epoch, plan.attempt, len(plan.signers)) for plan in plans]


def is_sound(pump: Pump) -> bool:
    return pump.signed_twice() == {} and len(pump.heads()) == 1


@pytest.mark.parametrize("num", [1, 2, 3, 5, 9])
def test_all_commit_together_at_the_first_attempt(num):
    names = "abcdefghi"[:num]
    pump = founded(names)
    assert pump.reach(6, 60)
    for node in pump.up:
        assert commits(node) == [(epoch, 0, num) for epoch in range(1, 7)]
        assert node.answers == ["begin", *["contributed"] * 6]
    assert is_sound(pump)


def test_everybody_answers_its_worker_exactly_once_for_every_hand_over():
    pump = founded("abc")
    handed = {name: 0 for name in "abc"}
    original = pump.feed

    def feed(name: str, event) -> None:
        handed[name] += isinstance(event, events.WorkReady)
        original(name, event)

    pump.feed = feed
    before = {name: len(pump[name].answers) for name in "abc"}
    assert pump.reach(max(pump.epochs()) + 4, 60)
    assert {name: len(pump[name].answers) - before[name] for name in "abc"} == handed


def test_the_leader_changes_with_every_head_and_attempt():
    pump = founded("abcde")
    leaders = set()
    for _ in range(12):
        assert pump.reach(max(pump.epochs()) + 1, 60)
        round_ = pump["a"].peer.round
        assert sorted(round_.leader_of(attempt) for attempt in range(5)) == list("abcde")
        assert round_.leader_of(5) == round_.leader_of(0)
        leaders.add(round_.leader_of(0))
        assert len({node.peer.round.leader_of(0) for node in pump.up}) == 1
    assert len(leaders) >= 3


def test_a_leader_that_is_dead_is_passed_over():
    pump = founded("abc")
    leader = at_the_end_of_an_epoch(pump)
    pump.kill(leader)
    before = pump.now
    assert pump.reach(max(pump.epochs()) + 1, 60)
    assert pump.now - before < 6
    assert pump.signed_twice() == {}


@pytest.mark.parametrize("kind", [Propose, Certificates])
def test_a_silent_leader_costs_an_attempt(kind):
    pump = founded("abcd")
    leader = at_the_end_of_an_epoch(pump)
    pump.tamper = lambda sender, to, message: (
        None if sender == leader and isinstance(message, kind) else message
    )
    before, epoch = pump.now, max(pump.epochs())
    assert pump.reach(epoch + 1, 60)
    assert pump.now - before < 15
    assert is_sound(pump)
    assert last(pump, "a").plan.attempt <= 1


def test_a_leader_that_aborts_every_attempt_costs_one_each_time_that_it_leads():
    pump = founded("abcd")

    def aborts(sender: str, to: str, message: Message) -> Message:
        if sender == "d" and isinstance(message, Propose):
            return Abort(head=message.plan.parent, attempt=message.plan.attempt, reason="no")
        return message

    pump.tamper = aborts
    assert pump.reach(max(pump.epochs()) + 12, 200)
    assert max(attempt for _, attempt, _ in commits(pump["a"])) <= 2
    assert is_sound(pump)


def test_a_leader_that_is_silent_in_every_attempt_does_not_stop_the_others():
    pump = founded("abc")
    pump.tamper = lambda sender, to, message: (
        None if sender == "c" and isinstance(message, Propose | Certificates) else message
    )
    assert pump.reach(max(pump.epochs()) + 12, 300)
    assert is_sound(pump)


@pytest.mark.parametrize("at", [0.0, 3.9, 4.15, 4.25, 4.3, 4.33])
@pytest.mark.parametrize("victim", "abc")
def test_whoever_dies_and_whenever_the_others_commit_within_seconds(victim, at):
    pump = founded("abc")
    pump.run(at)
    pump.kill(victim)
    epoch = max(pump.epochs())
    assert pump.reach(epoch + 2, 25)
    assert pump.signed_twice() == {}


def test_a_dead_member_is_taken_off_the_roster():
    pump = founded("abcd")
    pump.kill("d")
    assert pump.reach(max(pump.epochs()) + 8, 100)
    assert {member.peer_id for member in last(pump, "a").plan.roster} == set("abc")


def test_of_two_the_one_that_is_left_goes_on_after_a_while_and_not_at_once():
    pump = founded("ab")
    epoch = max(pump.epochs())
    pump.kill("b")
    assert not pump.reach(epoch + 1, 2.9)
    assert pump.reach(epoch + 2, 30)


def test_one_of_three_does_not_go_on_alone_before_the_others_are_gone():
    pump = founded("abc")
    pump.run(1)
    epoch = max(pump.epochs())
    pump.disconnect("ab", "ac")
    pump.run(5.5)
    assert pump["a"].peer.epoch == epoch
    pump.mend()
    assert pump.reach(epoch + 2, 60)
    assert all(len(apply.certificate.plan.signers) > 1 for apply in pump["a"].effects(effects.Apply))


def test_peers_that_have_struck_each_other_commit_again_once_their_link_is_well():
    for names in ("ab", "abc", "abcd"):
        pump = founded(names)
        until, epoch = pump.now + 40, max(pump.epochs())
        pump.reduces = lambda name, plan, until=until, pump=pump: (
            ("link", frozenset(set(plan.signers) - {name})) if pump.now < until else None
        )
        pump.run(40)
        assert pump.reach(epoch + 2, 40), names
        assert is_sound(pump)
        assert max(node.peer.round.attempt for node in pump.up) < 1000


def test_peers_that_all_hear_each_other_stay_together():
    """Whatever their workers do: one stops, comes back, and another stops."""
    pump = founded("abcd")
    for _ in range(5):
        leader = at_the_end_of_an_epoch(pump)
        pump[leader].trains = False
        pump.run(30)
        pump[leader].trains = True
        pump.feed(leader, events.WorkerWaits())
        pump.run(10)
    assert pump.reach(max(pump.epochs()) + 2, 60)
    assert is_sound(pump)
    assert all(num >= 3 for node in pump.up for _, _, num in commits(node))


def test_users_with_different_graces_commit_together():
    pump = Pump("", settings=with_settings(galaxy_size=3))
    pump.start("a", settings=with_settings(galaxy_size=3, grace_s=2.0))
    pump.start("b")
    pump.start("c", train_s=40.0)
    assert pump.reach(4, 400)
    assert pump.signed_twice() == {}
    assert all(num >= 2 for node in pump.up for _, _, num in commits(node))


def test_a_leader_without_work_leads_and_proposes_once():
    pump = founded("abcd")
    leader = at_the_end_of_an_epoch(pump)
    pump[leader].trains = False
    epoch, before = max(pump.epochs()), len(pump[leader].done)
    pump.run(60, lambda: min(node.peer.epoch for node in pump.up) > epoch)
    proposals = [
        effect.message.plan
        for _, effect in pump[leader].done[before:]
        if isinstance(effect, effects.Send) and isinstance(effect.message, Propose)
    ]
    made = {plan.digest for plan in proposals if plan.epoch == epoch + 1 and plan.attempt == 0}
    assert len(made) == 1
    assert leader not in proposals[0].signers
    assert len(proposals) == 3


def test_who_is_late_trains_on_and_brings_all_of_it_to_a_later_commit():
    pump = founded("abc")
    pump["c"].train_s = 200.0
    pump.run(60)
    pump["c"].train_s = 5.0
    pump.run(200)
    late = next(n for n, how in enumerate(pump["c"].answers) if how in ("keep", "rebase"))
    assert pump["c"].answers[late + 1 :][-1] == "contributed"
    assert is_sound(pump)


def test_a_newcomer_is_in_the_next_roster_with_the_lowest_free_rank():
    pump = founded("abc")
    pump.start("d")
    assert pump.reach(max(pump.epochs()) + 3, 60)
    roster = {member.peer_id: member.world_rank for member in last(pump, "a").plan.roster}
    assert roster.keys() == set("abcd")
    assert pump["d"].peer.world_rank == 3
    assert pump["d"].answers[-1] == "contributed"


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("train_s", [7.0, 8.5])
def test_a_newcomer_that_is_somewhat_slower_is_in_the_first_commit_of_its_work(num, train_s):
    pump = founded("abc"[:num])
    pump.start("d", train_s=train_s)
    assert pump.run(60, lambda: "contributed" in pump["d"].answers)
    assert pump["d"].answers[:2] == ["begin", "contributed"]


def test_who_only_says_that_it_trains_is_waited_for_in_a_few_commits():
    pump = founded("abc")
    pump.start("d", trains=False)
    assert pump.run(20, lambda: pump["d"].peer.phase == "training")
    assert pump.reach(max(pump.epochs()) + ABSENT_COMMITS, 120)
    before = pump.now
    assert pump.reach(max(pump.epochs()) + 4, 60)
    assert pump.now - before < 4 * (5.0 + 1.5)


def test_strangers_without_end_that_only_say_that_they_train_double_an_epoch_at_the_most():
    pump = founded("abc")
    assert pump.reach(max(pump.epochs()) + 4, 60)
    for number in range(20):
        pump.start(f"stranger {number}", trains=False)
        before, epoch = pump.now, pump["a"].peer.epoch
        assert pump.run(30, lambda epoch=epoch: pump["a"].peer.epoch > epoch)
        assert pump.now - before < 2 * 5.0 + 2.5
        if number > 2:
            pump.kill(f"stranger {number - 3}")


@pytest.mark.parametrize("others", ["a", "abc"])
def test_a_newcomer_that_enters_late_in_an_epoch_is_in_its_commit_though_another_is_waited_for(others):
    pump = founded(others)
    pump.start("slow", train_s=20.0)
    pump.run(3)
    pump.start("fast", train_s=1.5)
    assert pump.run(20, lambda: pump["a"].peer.epoch == 3)
    assert last(pump, "a").plan.signer_set == {*others, "fast"}
    assert last(pump, "a").plan.attempt == 0


def test_a_member_that_hears_late_of_a_commit_waits_for_a_newcomer_as_long_as_the_others_do():
    pump = founded("abc")
    pump.start("slow", train_s=30.0)
    pump.tamper = lambda sender, to, message: (
        None if to == "b" and isinstance(message, Certificates) else message
    )
    assert pump.run(20, lambda: {pump[name].peer.epoch for name in "ac"} == {3})
    pump.run(3.5)
    assert pump["b"].peer.epoch == 2
    pump.tamper = lambda sender, to, message: message
    assert pump.reach(4, 60)
    assert commits(pump["a"])[-1] == (4, 0, 3)


def test_strangers_that_never_contribute_do_not_lengthen_the_grace():
    pump = founded("abc")
    for number in range(20):
        if number % 2:
            pump.start(f"stranger {number}", trains=False)
        epoch = pump["a"].peer.epoch
        assert pump.run(30, lambda epoch=epoch: pump["a"].peer.epoch > epoch)
        if number % 2:
            pump.kill(f"stranger {number}")
    assert all(pump[name].peer.timing.grace_s(5.0) < 1.5 for name in "abc")


def test_a_member_that_only_says_that_it_trains_leads_as_the_others_expect():
    pump = founded("abc")
    pump["c"].trains = False
    assert pump.reach(max(pump.epochs()) + ABSENT_COMMITS, 200)
    epoch = max(pump.epochs())
    assert pump.reach(epoch + 12, 200)
    late = commits(pump["a"])[epoch:]
    assert late == [(number, 0, 2) for number in range(epoch + 1, epoch + 13)]


def test_a_member_that_never_contributes_is_not_waited_for_again_each_time_it_comes_back():
    pump = founded("abcd")
    assert pump.reach(8, 60)
    for node in pump.up:
        node.train_s = 60.0
    pump["d"].trains = False
    for number in range(16):
        pump.disconnect("ad", "bd", "cd")
        pump.run(17)
        pump.mend()
        before, epoch = pump.now, pump["a"].peer.epoch
        assert pump.run(600, lambda epoch=epoch: pump["a"].peer.epoch > epoch)
        assert number < ABSENT_COMMITS or pump.now - before < 60 + 7


def test_a_peer_that_restarts_comes_back_as_the_same_member():
    pump = founded("abc")
    rank = pump["b"].peer.world_rank
    pump.kill("b")
    pump.run(2)
    pump.start("b")
    assert pump.reach(max(pump.epochs()) + 3, 100)
    assert pump["b"].peer.world_rank == rank
    assert is_sound(pump)


def test_a_peer_that_restarts_after_its_vote_does_not_sign_another_plan_of_that_attempt():
    pump = founded("abc")
    leader = at_the_end_of_an_epoch(pump)
    voter = next(name for name in "abc" if name != leader)
    pump.tamper = lambda sender, to, message: None if isinstance(message, Vote) and to == leader else message
    head = pump[voter].peer.head
    assert pump.run(20, lambda: head in pump[voter].pledges)
    signed = list(pump[voter].signed)
    pump.kill(voter)
    pump.tamper = lambda sender, to, message: message
    node = pump.start(voter)
    node.signed = signed
    assert pump.reach(max(pump.epochs()) + 2, 100)
    assert pump.signed_twice() == {}


def test_a_vote_whose_leader_is_lost_is_resolved_by_a_certificate_from_anybody():
    pump = founded("abc")
    leader = at_the_end_of_an_epoch(pump)
    first, second = (name for name in "abc" if name != leader)
    pump.tamper = lambda sender, to, message: (
        None if isinstance(message, Certificates) and (sender, to) == (leader, second) else message
    )
    epoch = max(pump.epochs())
    assert pump.run(20, lambda: pump[first].peer.epoch > epoch)
    pump.kill(leader)
    assert pump.run(3, lambda: pump[second].peer.head == pump[first].peer.head)
    # It still holds the result, so that nothing is fetched.
    assert pump[second].effects(effects.Apply)[-1].certificate == last(pump, first)
    assert pump[second].answers[-1] == "contributed"


def test_the_odd_one_out_is_found_and_fetches_its_state_anew():
    pump = founded("abcd")
    pump.run(1)
    spoilt: list[str] = []

    def digests(name: str, plan: Plan) -> tuple[str, str]:
        is_spoilt = name == "c" and len(spoilt) < 1
        spoilt.extend([name] * is_spoilt)
        return digest("anchor", plan.digest, is_spoilt), digest("momentum", plan.digest)

    pump.digests = digests
    epoch, head = max(pump.epochs()), pump["c"].peer.head
    assert pump.reach(epoch + 2, 60)
    assert pump["c"].effects(effects.Fetch)[0].path[-1].head == head
    assert all(pump[name].effects(effects.Fetch) == [] for name in "abd")
    assert all(pump[name].peer.swarm._peers["c"].strikes > 0 for name in "abd")
    assert is_sound(pump)


def test_a_member_whose_digests_always_differ_does_not_stop_the_others():
    pump = founded("abcd")
    pump.digests = lambda name, plan: (
        digest("anchor", plan.digest, name == "c"),
        digest("momentum", plan.digest),
    )
    epoch = max(pump.epochs())
    assert pump.run(300, lambda: min(pump[name].peer.epoch for name in "abd") >= epoch + 8)
    assert pump.signed_twice() == {}


def test_a_reduction_that_fails_at_one_member_is_tried_again():
    pump = founded("abc")
    failed: list[int] = []

    def once(name: str, plan: Plan) -> tuple[str, frozenset[str]] | None:
        if name == "b" and not failed:
            failed.append(plan.attempt)
            return "a stream broke", frozenset("c")
        return None

    pump.reduces = once
    epoch = max(pump.epochs())
    assert pump.reach(epoch + 2, 40)
    assert is_sound(pump)


@pytest.mark.parametrize("rule", ["trimmed-mean", "centered-clip"])
def test_under_a_robust_rule_two_of_three_wait_for_the_third(rule):
    pump = founded("abc", aggregation=Aggregation(rule=rule))
    pump.run(1)
    epoch = max(pump.epochs())
    pump.kill("c")
    pump.run(60)
    assert pump.epochs() == {epoch}
    assert {pump[name].peer.num_lacking for name in "ab"} == {1}
    assert standing_of(pump["a"].peer).waits_for == "1 more peer, without which its rule averages nothing"
    pump.start("c")
    assert pump.reach(epoch + 2, 60)
    assert {pump[name].peer.num_lacking for name in "abc"} == {0}


def test_at_the_last_step_all_contribute_and_leave():
    pump = founded("abc")
    pump.run(1)
    for name in "abc":
        pump[name].trains = False
    epoch = max(pump.epochs())
    for name in "abc":
        pump.feed(name, events.WorkReady(work(50, last=True)))
    pump.run(10)
    assert pump.epochs() == {epoch + 1}
    assert {node.peer.phase for node in pump.up} == {"leaving"}
    assert all(node.answers[-1] == "contributed" for node in pump.up)


def test_a_peer_that_leaves_is_taken_off_and_not_waited_for():
    pump = founded("abc")
    pump.run(1)
    epoch = max(pump.epochs())
    pump.feed("c", events.Leave())
    pump.run(0.1)
    assert pump["c"].peer.phase == "leaving"
    pump["c"].is_up = False
    before = pump.now
    assert pump.reach(epoch + 2, 30)
    assert pump.now - before < 15
    assert {member.peer_id for member in last(pump, "a").plan.roster} == set("ab")


@pytest.mark.parametrize("proposes", [True, False])
def test_a_member_that_declines_each_time_is_left_out_of_the_next_attempt(proposes):
    pump = founded("abcd")

    def declines(sender: str, to: str, message: Message) -> Message | None:
        if sender == "d" and isinstance(message, Propose) and not proposes:
            return None
        if sender == "d" and isinstance(message, Vote):
            return Decline(head=message.head, attempt=message.attempt, reason="no")
        return message

    pump.tamper = declines
    epoch = max(pump.epochs())
    assert pump.run(120, lambda: min(pump[name].peer.epoch for name in "abc") >= epoch + 6)
    assert pump.signed_twice() == {}


def test_work_is_handed_over_with_the_epoch_since_which_it_is_in_no_commit():
    pump = founded("abc")
    assert pump.reach(5, 60)
    contributors = last(pump, "a").plan.contributors
    assert {contributor.work.based_on for contributor in contributors} == {4}


@pytest.mark.parametrize("num_fragments", [2, 3])
def test_fragments_take_turns_and_each_counts_its_own_epochs(num_fragments):
    pump = founded("abc", num_fragments=num_fragments)
    assert pump.reach(8, 100)
    plans = [apply.certificate.plan for apply in pump["a"].effects(effects.Apply)]
    assert [plan.fragment for plan in plans] == [(plan.epoch - 1) % num_fragments for plan in plans]
    assert {c.work.based_on for c in plans[-1].contributors} == {8 - num_fragments}


def test_a_message_that_comes_twice_or_late_changes_nothing():
    pump = founded("abc")
    original = pump.tamper

    def again(sender: str, to: str, message: Message) -> Message | None:
        for delay in (0.0, 0.7, 9.0):
            pump.after(delay, lambda: pump.say(sender, to, message) if to in pump.nodes else None)
        return original(sender, to, message)

    pump.tamper = again
    assert pump.reach(max(pump.epochs()) + 4, 60)
    assert is_sound(pump)
    assert all(num == 3 for node in pump.up for _, _, num in commits(node))


def test_nothing_is_sent_under_a_vote_before_it_is_pledged():
    pump = founded("abc")
    for node in pump.up:
        pledged: set[tuple[str, int]] = set()
        for _, effect in node.done:
            if isinstance(effect, effects.Pledge):
                pledged.add((effect.head, effect.attempt))
            if isinstance(effect, effects.Send) and isinstance(effect.message, Vote):
                assert (effect.message.head, effect.message.attempt) in pledged


def test_a_leader_that_alters_the_work_of_a_member_costs_an_attempt():
    pump = founded("abcd")
    leader = at_the_end_of_an_epoch(pump)

    def alters(sender: str, to: str, message: Message) -> Message:
        if sender == leader and isinstance(message, Propose) and to != leader:
            changed = tuple(
                replace(c, work=replace(c.work, tokens=1)) if c.peer_id == to else c
                for c in message.plan.contributors
            )
            return Propose(plan=replace(message.plan, contributors=changed))
        return message

    pump.tamper = alters
    epoch = max(pump.epochs())
    assert pump.reach(epoch + 1, 30)
    assert last(pump, "a").plan.attempt <= 2
    assert all(c.work.tokens == 100 for c in last(pump, "a").plan.contributors)


@pytest.mark.parametrize("newcomers", ["b", "bc"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_newcomers_that_hold_the_state_go_on_where_all_of_the_roster_is_gone(newcomers, comes_back):
    pump = founded("a")
    for name in newcomers:
        # Too late for a commit with the only member that there is.
        pump.start(name, train_s=6.0)
    assert pump.run(20, lambda: all(pump[name].peer.head == pump["a"].peer.head for name in newcomers))
    assert [member.peer_id for member in last(pump, "a").plan.roster] == ["a"]
    epoch = max(pump.epochs())
    pump.kill("a")
    assert pump.reach(epoch + 3, 60)
    if comes_back:
        pump.start("a")
    assert pump.run(60, lambda: len(pump.heads()) == 1 and min(pump.epochs()) > epoch + 3)
    assert {member.peer_id for member in last(pump, "b").plan.roster} >= set(newcomers)
    assert pump.signed_twice() == {}
