"""Rounds of real peers in a virtual swarm: leaders that die, go silent or disagree; members that are late or leave."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from diloco.sim.schedules import lost_pieces
from peers.core import effects
from peers.core.plans import ABSENT_COMMITS
from peers.core.weights import Aggregation
from peers.daemon.worker_monitor import standing_of
from peers.protocol.certificates import Plan
from peers.protocol.messages import Abort, Certificates, Decline, Message, Propose, Vote
from tests.unit.peers.core.made import SETTINGS, with_settings
from tests.unit.peers.core.swarm import Swarm, founded


def at_the_end_of_an_epoch(swarm: Swarm) -> str:
    """Run until just before an epoch's end. Returns the leader of the next attempt, which nobody has begun."""
    swarm.run(1)
    return next(iter(swarm.live.values())).machine.round.leader_of(0)


def last(swarm: Swarm, name: str):
    return swarm[name].machine.certificate


def is_sound(swarm: Swarm) -> bool:
    return len(swarm.heads()) == 1 and lost_pieces(swarm) == ""


@pytest.mark.parametrize("num", [1, 2, 3, 5, 9])
def test_all_commit_together_at_the_first_attempt(num):
    names = "abcdefghi"[:num]
    swarm = founded(names)
    assert swarm.reach(6, 60)
    for node in swarm.live.values():
        assert node.commits == [(epoch, 0, num) for epoch in range(1, 7)]
        assert node.answers == ["begin", *["contributed"] * 6]
    assert is_sound(swarm)


def test_the_leader_changes_with_every_head_and_attempt():
    swarm = founded("abcde")
    leaders = set()
    for _ in range(12):
        assert swarm.reach(max(swarm.epochs()) + 1, 60)
        round_ = swarm["a"].machine.round
        assert sorted(round_.leader_of(attempt) for attempt in range(5)) == list("abcde")
        assert round_.leader_of(5) == round_.leader_of(0)
        leaders.add(round_.leader_of(0))
        assert len({node.machine.round.leader_of(0) for node in swarm.live.values()}) == 1
    assert len(leaders) >= 3


def test_a_leader_that_is_dead_is_passed_over():
    swarm = founded("abc")
    leader = at_the_end_of_an_epoch(swarm)
    swarm.kill(leader)
    before = swarm.now
    assert swarm.reach(max(swarm.epochs()) + 1, 60)
    assert swarm.now - before < 6


@pytest.mark.parametrize("kind", [Propose, Certificates])
def test_a_silent_leader_costs_an_attempt(kind):
    swarm = founded("abcd")
    leader = at_the_end_of_an_epoch(swarm)
    swarm.tamper = lambda sender, to, message: (
        None if sender == leader and isinstance(message, kind) else message
    )
    before, epoch = swarm.now, max(swarm.epochs())
    assert swarm.reach(epoch + 1, 60)
    assert swarm.now - before < 15
    assert is_sound(swarm)
    assert last(swarm, "a").plan.attempt <= 1


def test_a_leader_that_aborts_every_attempt_costs_one_each_time_that_it_leads():
    swarm = founded("abcd")

    def aborts(sender: str, to: str, message: Message) -> Message:
        if sender == "d" and isinstance(message, Propose):
            return Abort(head=message.plan.parent, attempt=message.plan.attempt, reason="no")
        return message

    swarm.tamper = aborts
    assert swarm.reach(max(swarm.epochs()) + 12, 200)
    assert max(attempt for _, attempt, _ in swarm["a"].commits) <= 2
    assert is_sound(swarm)


def test_a_leader_that_is_silent_in_every_attempt_does_not_stop_the_others():
    swarm = founded("abc")
    swarm.tamper = lambda sender, to, message: (
        None if sender == "c" and isinstance(message, Propose | Certificates) else message
    )
    assert swarm.reach(max(swarm.epochs()) + 12, 300)
    assert is_sound(swarm)


@pytest.mark.parametrize("at", [0.0, 4.995, 5.015, 5.1, 5.255, 5.265])
@pytest.mark.parametrize("victim", "abc")
def test_whoever_dies_and_whenever_the_others_commit_within_seconds(victim, at):
    """`at`: in training; when one is ready; in a reduction; with the plan, votes or the certificate under way."""
    swarm = founded("abc")
    swarm.run(at)
    swarm.kill(victim)
    epoch = max(swarm.epochs())
    assert swarm.reach(epoch + 2, 25)


def test_a_dead_member_is_taken_off_the_roster():
    swarm = founded("abcd")
    swarm.kill("d")
    assert swarm.reach(max(swarm.epochs()) + 8, 100)
    assert {member.peer_id for member in last(swarm, "a").plan.roster} == set("abc")


def test_of_two_the_one_that_is_left_goes_on_after_a_while_and_not_at_once():
    swarm = founded("ab")
    epoch = max(swarm.epochs())
    swarm.kill("b")
    assert not swarm.reach(epoch + 1, 2.9)
    assert swarm.reach(epoch + 2, 30)
    swarm.start("b")
    assert swarm.reach(max(swarm.epochs()) + 2, 30)
    assert swarm["a"].commits[-1][2] == 2
    assert is_sound(swarm)


def test_one_of_three_does_not_go_on_alone_before_the_others_are_gone():
    swarm = founded("abc")
    swarm.run(1)
    epoch = max(swarm.epochs())
    swarm.partition("a", "bc")
    swarm.run(5.5)
    assert swarm["a"].machine.epoch == epoch
    swarm.heal_partition("a", "bc")
    assert swarm.reach(epoch + 2, 60)
    assert all(len(apply.certificate.plan.signers) > 1 for apply in swarm["a"].effects(effects.Apply))


def test_peers_that_have_struck_each_other_commit_again_once_their_link_is_well():
    for names in ("ab", "abc", "abcd"):
        swarm = founded(names)
        until, epoch = swarm.now + 40, max(swarm.epochs())
        swarm.reduces = lambda name, plan, until=until, swarm=swarm: (
            ("link", frozenset(set(plan.signers) - {name})) if swarm.now < until else None
        )
        swarm.run(40)
        assert swarm.reach(epoch + 2, 40), names
        assert is_sound(swarm)
        assert max(node.machine.round.attempt for node in swarm.live.values()) < 1000


def test_peers_that_all_hear_each_other_stay_together():
    """Even if one worker after another stops and comes back."""
    swarm = founded("abcd")
    for _ in range(5):
        leader = at_the_end_of_an_epoch(swarm)
        swarm[leader].hang()
        swarm.run(30)
        swarm[leader].trains = True
        swarm.crash_worker(leader, back_after_s=0.0)
        swarm.run(10)
    assert swarm.reach(max(swarm.epochs()) + 2, 60)
    assert is_sound(swarm)
    assert all(num >= 3 for node in swarm.live.values() for _, _, num in node.commits)


def test_users_with_different_graces_commit_together():
    swarm = Swarm("a", settings=with_settings(grace_s=2.0))
    swarm.settings = SETTINGS
    swarm.start("b")
    swarm.start("c").train_in(40.0)
    assert swarm.reach(4, 400)
    assert all(num >= 2 for node in swarm.live.values() for _, _, num in node.commits)


def test_a_leader_without_work_leads_and_proposes_once():
    swarm = founded("abcd")
    leader = at_the_end_of_an_epoch(swarm)
    swarm[leader].hang()
    epoch, before = max(swarm.epochs()), len(swarm[leader].done)
    swarm.run_until(lambda: min(node.machine.epoch for node in swarm.live.values()) > epoch, 60)
    proposals = [
        effect.message.plan
        for _, effect in swarm[leader].done[before:]
        if isinstance(effect, effects.Send) and isinstance(effect.message, Propose)
    ]
    made = {plan.digest for plan in proposals if plan.epoch == epoch + 1 and plan.attempt == 0}
    assert len(made) == 1
    assert leader not in proposals[0].signers
    assert len(proposals) == 3


def test_a_newcomer_is_in_the_next_roster_with_the_lowest_free_rank():
    swarm = founded("abc")
    swarm.start("d")
    assert swarm.reach(max(swarm.epochs()) + 3, 25)
    roster = {member.peer_id: member.world_rank for member in last(swarm, "a").plan.roster}
    assert roster.keys() == set("abcd")
    assert swarm["d"].machine.world_rank == 3
    assert swarm["d"].answers[-1] == "contributed"


@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("train_s", [8.0, 10.0])
def test_a_newcomer_that_is_somewhat_slower_is_in_the_first_commit_of_its_work(num, train_s):
    swarm = founded("abc"[:num])
    swarm.start("d").train_in(train_s)
    assert swarm.run_until(lambda: "contributed" in swarm["d"].answers, 60)
    assert swarm["d"].answers[:2] == ["begin", "contributed"]


def test_who_only_says_that_it_trains_is_waited_for_in_a_few_commits():
    swarm = founded("abc")
    swarm.start("d").trains = False
    assert swarm.run_until(lambda: swarm["d"].machine.phase == "training", 20)
    assert swarm.reach(max(swarm.epochs()) + ABSENT_COMMITS, 120)
    before = swarm.now
    assert swarm.reach(max(swarm.epochs()) + 4, 60)
    assert swarm.now - before < 4 * (5.0 + 1.5)


def test_strangers_without_end_that_only_say_that_they_train_double_an_epoch_at_the_most():
    swarm = founded("abc")
    assert swarm.reach(max(swarm.epochs()) + 4, 60)
    for number in range(20):
        swarm.start(f"stranger {number}").trains = False
        before, epoch = swarm.now, swarm["a"].machine.epoch
        assert swarm.run_until(lambda epoch=epoch: swarm["a"].machine.epoch > epoch, 30)
        assert swarm.now - before < 2 * 5.0 + 2.5
        if number > 2:
            swarm.kill(f"stranger {number - 3}")


@pytest.mark.parametrize("others", ["a", "abc"])
def test_a_newcomer_that_enters_late_in_an_epoch_is_in_its_commit_though_another_is_waited_for(others):
    swarm = founded(others)
    swarm.start("slow").train_in(20.0)
    swarm.run(3)
    swarm.start("fast").train_in(1.5)
    assert swarm.run_until(lambda: swarm["a"].machine.epoch == 3, 20)
    assert last(swarm, "a").plan.signer_set == {*others, "fast"}
    assert last(swarm, "a").plan.attempt == 0


def test_a_member_that_hears_late_of_a_commit_waits_for_a_newcomer_as_long_as_the_others_do():
    swarm = founded("abc")
    swarm.start("slow").train_in(30.0)
    leader = at_the_end_of_an_epoch(swarm)
    late, other = (name for name in "abc" if name != leader)
    swarm.tamper = lambda sender, to, message: (
        None if to == late and isinstance(message, Certificates) else message
    )
    assert swarm.run_until(lambda: swarm[leader].machine.epoch == swarm[other].machine.epoch == 3, 20)
    swarm.run(3.5)
    assert swarm[late].machine.epoch == 2
    swarm.tamper = lambda sender, to, message: message
    assert swarm.reach(4, 60)
    assert swarm["a"].commits[-1] == (4, 0, 3)


def test_strangers_that_never_contribute_do_not_lengthen_the_grace():
    swarm = founded("abc")
    for number in range(20):
        if number % 2:
            swarm.start(f"stranger {number}").trains = False
        epoch = swarm["a"].machine.epoch
        assert swarm.run_until(lambda epoch=epoch: swarm["a"].machine.epoch > epoch, 30)
        if number % 2:
            swarm.kill(f"stranger {number}")
    assert all(swarm[name].machine.timing.grace_s(5.0) < 1.5 for name in "abc")


def test_a_member_that_only_says_that_it_trains_leads_as_the_others_expect():
    swarm = founded("abc")
    swarm["c"].hang()
    assert swarm.reach(max(swarm.epochs()) + ABSENT_COMMITS, 200)
    epoch = max(swarm.epochs())
    assert swarm.reach(epoch + 12, 200)
    late = swarm["a"].commits[epoch:]
    assert late == [(number, 0, 2) for number in range(epoch + 1, epoch + 13)]


def test_a_member_that_never_contributes_is_not_waited_for_again_each_time_it_comes_back():
    swarm = founded("abcd")
    assert swarm.reach(8, 60)
    for node in swarm.live.values():
        node.train_in(60.0)
    swarm["d"].hang()
    for number in range(16):
        swarm.partition("abc", "d")
        swarm.run(17)
        swarm.heal_partition("abc", "d")
        before, epoch = swarm.now, swarm["a"].machine.epoch
        assert swarm.run_until(lambda epoch=epoch: swarm["a"].machine.epoch > epoch, 600)
        assert number < ABSENT_COMMITS or swarm.now - before < 60 + 7


def test_a_peer_that_restarts_comes_back_as_the_same_member():
    swarm = founded("abc")
    rank = swarm["b"].machine.world_rank
    swarm.kill("b")
    swarm.run(2)
    swarm.start("b")
    assert swarm.reach(max(swarm.epochs()) + 3, 100)
    assert swarm["b"].machine.world_rank == rank
    assert is_sound(swarm)


def test_a_peer_that_restarts_after_its_vote_does_not_sign_another_plan_of_that_attempt():
    swarm = founded("abc")
    leader = at_the_end_of_an_epoch(swarm)
    voter = next(name for name in "abc" if name != leader)
    swarm.tamper = lambda sender, to, message: None if isinstance(message, Vote) and to == leader else message
    head = swarm[voter].machine.head
    assert swarm.run_until(lambda: head in swarm[voter].pledges, 20)
    swarm.kill(voter)
    swarm.tamper = lambda sender, to, message: message
    swarm.start(voter)
    assert swarm.reach(max(swarm.epochs()) + 2, 100)


def test_a_vote_whose_leader_is_lost_is_resolved_by_a_certificate_from_anybody():
    swarm = founded("abc")
    leader = at_the_end_of_an_epoch(swarm)
    first, second = (name for name in "abc" if name != leader)
    swarm.tamper = lambda sender, to, message: (
        None if isinstance(message, Certificates) and (sender, to) == (leader, second) else message
    )
    epoch = max(swarm.epochs())
    assert swarm.run_until(lambda: swarm[first].machine.epoch > epoch, 20)
    swarm.kill(leader)
    assert swarm.run_until(lambda: swarm[second].machine.head == swarm[first].machine.head, 3)
    # It still holds the result of its reduction, so it need not fetch the state.
    assert swarm[second].effects(effects.Apply)[-1].certificate == last(swarm, first)
    assert swarm[second].answers[-1] == "contributed"


def test_the_odd_one_out_is_found_and_fetches_its_state_anew():
    swarm = founded("abcd")
    swarm.run(1)
    swarm["c"].garbles = True
    epoch, head = max(swarm.epochs()), swarm["c"].machine.head
    assert swarm.reach(epoch + 2, 60)
    assert swarm["c"].effects(effects.Fetch)[0].path[-1].head == head
    assert all(swarm[name].effects(effects.Fetch) == [] for name in "abd")
    assert all(swarm[name].machine.swarm._peers["c"].strikes > 0 for name in "abd")
    assert is_sound(swarm)


def test_a_member_whose_digests_always_differ_does_not_stop_the_others():
    swarm = founded("abcd")
    swarm.garbles = lambda name, plan: name == "c"
    epoch = max(swarm.epochs())
    assert swarm.run_until(lambda: min(swarm[name].machine.epoch for name in "abd") >= epoch + 8, 300)


def test_a_reduction_that_fails_at_one_member_is_tried_again():
    swarm = founded("abc")
    failed: list[int] = []

    def once(name: str, plan: Plan) -> tuple[str, frozenset[str]] | None:
        if name == "b" and not failed:
            failed.append(plan.attempt)
            return "a stream broke", frozenset("c")
        return None

    swarm.reduces = once
    epoch = max(swarm.epochs())
    assert swarm.reach(epoch + 2, 40)
    assert is_sound(swarm)


@pytest.mark.parametrize("rule", ["trimmed-mean", "centered-clip"])
def test_under_a_robust_rule_two_of_three_wait_for_the_third(rule):
    swarm = founded("abc", aggregation=Aggregation(rule=rule))
    swarm.run(1)
    epoch = max(swarm.epochs())
    swarm.kill("c")
    swarm.run(60)
    assert swarm.epochs() == {epoch}
    assert {swarm[name].machine.num_lacking for name in "ab"} == {1}
    assert (
        standing_of(swarm["a"].machine).waits_for == "1 more peer, the least that its aggregation rule needs"
    )
    swarm.start("c")
    assert swarm.reach(epoch + 2, 60)
    assert {swarm[name].machine.num_lacking for name in "abc"} == {0}


def test_at_the_last_step_all_contribute_and_leave():
    swarm = founded("abc")
    swarm.run(1)
    epoch = max(swarm.epochs())
    for name in "abc":
        swarm.finish(name)
    swarm.run(10)
    assert swarm.epochs() == {epoch + 1}
    assert {node.machine.phase for node in swarm.live.values()} == {"leaving"}
    assert all(node.answers[-1] == "contributed" for node in swarm.live.values())


def test_a_peer_that_leaves_is_taken_off_and_not_waited_for():
    swarm = founded("abc")
    swarm.run(1)
    epoch = max(swarm.epochs())
    swarm.leave("c", ends_after_s=0.2)
    swarm.run(0.1)
    assert swarm["c"].machine.phase == "leaving"
    before = swarm.now
    assert swarm.reach(epoch + 2, 30)
    assert swarm.now - before < 15
    assert {member.peer_id for member in last(swarm, "a").plan.roster} == set("ab")


@pytest.mark.parametrize("proposes", [True, False])
def test_a_member_that_declines_each_time_is_left_out_of_the_next_attempt(proposes):
    swarm = founded("abcd")

    def declines(sender: str, to: str, message: Message) -> Message | None:
        if sender == "d" and isinstance(message, Propose) and not proposes:
            return None
        if sender == "d" and isinstance(message, Vote):
            return Decline(head=message.head, attempt=message.attempt, reason="no")
        return message

    swarm.tamper = declines
    epoch = max(swarm.epochs())
    assert swarm.run_until(lambda: min(swarm[name].machine.epoch for name in "abc") >= epoch + 6, 120)


def test_work_is_handed_over_with_the_epoch_since_which_it_is_in_no_commit():
    swarm = founded("abc")
    assert swarm.reach(5, 60)
    contributors = last(swarm, "a").plan.contributors
    assert {contributor.work.based_on for contributor in contributors} == {4}


@pytest.mark.parametrize("num_fragments", [2, 3])
def test_fragments_take_turns_and_each_counts_its_own_epochs(num_fragments):
    swarm = founded("abc", num_fragments=num_fragments)
    assert swarm.reach(8, 100)
    plans = [apply.certificate.plan for apply in swarm["a"].effects(effects.Apply)]
    assert [plan.fragment for plan in plans] == [(plan.epoch - 1) % num_fragments for plan in plans]
    assert {c.work.based_on for c in plans[-1].contributors} == {8 - num_fragments}


def test_a_message_that_comes_twice_or_late_changes_nothing():
    swarm = founded("abc")
    original = swarm.tamper

    def again(sender: str, to: str, message: Message) -> Message | None:
        for delay in (0.0, 0.7, 9.0):
            swarm.at(swarm.now + delay, lambda: swarm.say(sender, to, message))
        return original(sender, to, message)

    swarm.tamper = again
    assert swarm.reach(max(swarm.epochs()) + 4, 60)
    assert is_sound(swarm)
    assert all(num == 3 for node in swarm.live.values() for _, _, num in node.commits)


def test_a_leader_that_alters_the_work_of_a_member_costs_an_attempt():
    swarm = founded("abcd")
    leader = at_the_end_of_an_epoch(swarm)

    def alters(sender: str, to: str, message: Message) -> Message:
        if sender == leader and isinstance(message, Propose) and to != leader:
            changed = tuple(
                replace(c, work=replace(c.work, tokens=1)) if c.peer_id == to else c
                for c in message.plan.contributors
            )
            return Propose(plan=replace(message.plan, contributors=changed))
        return message

    swarm.tamper = alters
    epoch = max(swarm.epochs())
    assert swarm.reach(epoch + 1, 30)
    assert last(swarm, "a").plan.attempt <= 2
    assert all(c.work.tokens >= 10 for c in last(swarm, "a").plan.contributors)


@pytest.mark.parametrize("newcomers", ["b", "bc"])
@pytest.mark.parametrize("comes_back", [False, True])
def test_newcomers_that_hold_the_state_go_on_where_all_of_the_roster_is_gone(newcomers, comes_back):
    swarm = founded("a")
    for name in newcomers:
        # Its worker is slower than that of `a`, so `a` commits without it.
        swarm.start(name).train_in(6.0)
    assert swarm.run_until(
        lambda: all(swarm[name].machine.head == swarm["a"].machine.head for name in newcomers), 20
    )
    assert [member.peer_id for member in last(swarm, "a").plan.roster] == ["a"]
    epoch = max(swarm.epochs())
    swarm.kill("a")
    assert swarm.reach(epoch + 3, 60)
    if comes_back:
        swarm.start("a")
    assert swarm.run_until(lambda: len(swarm.heads()) == 1 and min(swarm.epochs()) > epoch + 3, 60)
    assert {member.peer_id for member in last(swarm, "b").plan.roster} >= set(newcomers)
