"""What a peer answers its worker at every stage of a round, and what becomes of the worker's work."""

from __future__ import annotations

import itertools

import pytest

from peers.core import effects, events
from peers.core.round import Stage
from peers.protocol.certificates import Body, Certificate
from peers.protocol.messages import Abort, Ask, Certificates, Propose, Status, Vote
from tests.unit.peers.core.driven import Driven
from tests.unit.peers.core.made import Keys, commit, digest, genesis, with_settings, work
from tests.unit.peers.core.swarm import founded
from tests.unit.peers.core.test_round_hostile import led_by_another, plan_at, reduced

GENESIS = genesis("abc")


def answers(driven: Driven) -> list[str]:
    return [answer.how for answer in driven.of(effects.Answer)]


def certify(plan, anchor: str = "anchor") -> Certificate:
    body = Body(plan=plan, anchor=digest(anchor), momentum=digest("momentum"))
    return Certificate(body=body, signatures=tuple(Keys(n).sign(body.signed_bytes) for n in plan.signers))


def hand_out(driven: Driven, certificate: Certificate, sender: str = "b") -> list[effects.Effect]:
    return driven.say(sender, Certificates(head=certificate.head, certificates=(certificate,)))


def voted() -> tuple[Driven, str, Certificate]:
    """`a`, which has voted; the leader; and the certificate that the votes would make."""
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    reduced(a, plan)
    assert a.peer.round.stage is Stage.VOTE
    return a, leader, certify(plan)


def test_a_worker_begins_where_its_peer_stands():
    a = Driven.at(GENESIS, "bc")
    (begin,) = a.of(effects.Answer)
    assert (begin.how, begin.epoch, begin.local_step, begin.data_base) == ("begin", 0, 0, 0)
    assert a.peer.phase == "training"


def test_a_worker_that_comes_late_enters_the_epoch_where_the_others_are():
    n = Driven("n")
    n.announce(GENESIS, "abc", local_step=6, step_s=1000.0)
    n.run(3)
    n.fetched()
    (begin,) = n.of(effects.Answer)
    assert begin.local_step == 6


def test_a_worker_without_a_state_waits_for_one():
    a = Driven("a")
    a.run(5)
    assert answers(a) == []
    assert a.peer.phase == "waiting"


def test_a_peer_without_a_worker_fetches_nothing_as_a_newcomer():
    a = Driven("a", has_worker=False)
    a.announce(GENESIS, "bc")
    a.run(5)
    assert a.of(effects.Fetch) == []


def test_a_worker_that_has_contributed_goes_on_from_the_new_anchor():
    a, _, certificate = voted()
    made = hand_out(a, certificate)
    kinds = [type(effect) for effect in made if isinstance(effect, effects.Apply | effects.Answer)]
    assert kinds == [effects.Apply, effects.Answer]
    assert answers(a) == ["begin", "contributed"]
    assert a.peer.epoch == 1
    hand_out(a, certificate)
    a.run(3)
    assert answers(a) == ["begin", "contributed"]


def test_a_held_result_is_applied_also_after_the_attempt_was_given_up():
    a, leader, certificate = voted()
    a.say(leader, Abort(head=certificate.plan.parent, attempt=0, reason="no"))
    assert a.peer.round.attempt >= 1
    assert a.of(effects.Apply, hand_out(a, certificate))
    assert answers(a) == ["begin", "contributed"]


def test_a_result_that_is_no_longer_held_is_fetched_and_the_work_is_in_it():
    a, leader, certificate = voted()
    a.say(leader, Abort(head=certificate.plan.parent, attempt=0, reason="no"))
    attempt = a.peer.round.attempt
    while (second := a.peer.round.leader_of(attempt)) == "a":
        attempt += 1
    plan = plan_at(a, attempt=attempt)
    a.say(second, Propose(plan=plan))
    while a.peer.round.attempt < attempt:
        a.run(1)
    if a.peer.round.stage is not Stage.REDUCE:
        a.say(second, Propose(plan=plan))
    assert a.peer.round.stage is Stage.REDUCE
    a.announce(certificate, "bcde")
    a.run(3)
    assert a.of(effects.Apply) == []
    assert [fetch.path[-1].head for fetch in a.of(effects.Fetch)] == [certificate.head]
    assert answers(a) == ["begin"]
    a.fetched()
    assert answers(a) == ["begin", "contributed"]
    assert effects.CancelReduce() in a.effects


def test_work_that_missed_the_commit_is_kept_while_the_new_state_comes_and_rebased_once_it_is_here():
    a = Driven.at(GENESIS, "bc")
    a.ready(work(40))
    newer = commit(GENESIS, "bc")
    a.announce(newer, "bc")
    a.run(3)
    assert answers(a) == ["begin", "keep"]
    keep = a.of(effects.Answer)[-1]
    assert (keep.epoch, keep.data_base) == (1, newer.plan.data_base)
    a.fetched()
    assert answers(a) == ["begin", "keep"]
    made = a.ready(work(90))
    assert effects.Rebase() in made
    said = a.of(Status, made)[-1]
    assert said.phase == "ready"
    assert (said.work.tokens, said.work.based_on) == (90, 0)


def test_work_that_is_handed_over_on_an_anchor_that_has_gone_is_rebased_and_the_worker_goes_on():
    a = Driven.at(GENESIS, "bc")
    a.come_to([commit(GENESIS, "bc")], "bc")
    made = a.ready(work(40))
    assert effects.Rebase() in made
    assert answers(a) == ["begin", "rebase"]
    assert a.of(effects.Answer)[-1].epoch == 1


def test_a_member_that_fetches_the_last_commit_is_waited_for_as_long_as_a_round_takes():
    """Where rounds follow each other without a pause, it would miss each next one as well."""
    for phase, waits in (("training", False), ("fetching", True)):
        a = Driven.at(GENESIS, "bc")
        a.come_to([last := commit(GENESIS, "abc")], "b")
        a.peer.timing._rounds.extend([28.0] * 8)
        a.peer.timing._gathers.extend([0.1] * 16)
        a.peer.timing._epochs.extend([30.0] * 8)
        a.announce(GENESIS if phase == "fetching" else last, "c", phase)
        a.announce(last, "b", "ready", work=work(based_on=1))
        for _ in range(2):
            # The first time, the worker is told that the others are an epoch ahead.
            a.ready(work(based_on=1))
        a.run(15)
        has_tried = a.peer.round.attempt > 0 or a.peer.round.stage is Stage.REDUCE
        assert has_tried is not waits


def test_a_worker_that_has_just_come_is_given_as_long_an_epoch_as_the_others():
    """Before it knows its own speed: else a slow one would train a whole number of steps, for many of their epochs."""
    a = Driven.at(GENESIS, "bc", settings=with_settings(epoch_s=0.0, steps_per_epoch=100))
    a.announce(GENESIS, "bc", step_s=2.0)
    a.run(1)
    assert a.peer.worker.step_s == 0
    assert a.peer.epoch_s == 200.0


def test_late_work_says_since_when_it_is_in_no_commit_until_it_is_in_one():
    swarm = founded("abc")
    swarm["c"].train_in(100.0)
    epoch = swarm["c"].machine.worker.epoch
    assert swarm.run_until(lambda: swarm["c"].answers[-1] in ("rebase", "keep"), 120)
    swarm["c"].train_in(5.0)
    swarm.run(60)
    first = next(
        apply.certificate
        for apply in swarm["c"].effects(effects.Apply)
        if apply.certificate.plan.epoch > epoch + 1 and "c" in apply.certificate.plan.signers
    )
    based_on = {c.peer_id: c.work.based_on for c in first.plan.contributors}
    assert based_on["c"] == epoch
    assert based_on["a"] == first.plan.epoch - 1
    newest = swarm["c"].machine.certificate
    assert {c.work.based_on for c in newest.plan.contributors} == {newest.plan.epoch - 1}


def test_who_needs_longer_for_a_step_than_the_others_for_an_epoch_is_in_a_commit_once_in_an_epoch_of_its_own():
    swarm = founded("abc", grace_s=1.0)
    own_epoch_s = swarm.settings.steps_per_epoch * 8.0
    swarm["c"].train_in(own_epoch_s)
    swarm.run(5.5 * own_epoch_s)
    plans = [apply.certificate.plan for apply in swarm["a"].effects(effects.Apply)]
    with_it = [plan.epoch for plan in plans[3:] if "c" in plan.signers]
    assert len(with_it) in (4, 5)
    assert min(later - one for one, later in itertools.pairwise(with_it)) > 4


def test_work_that_was_voted_for_waits_to_know_whether_it_is_in_a_commit():
    """If the worker kept it in its weights and the commit came to light later, the work would count twice."""
    a, leader, certificate = voted()
    a.say(leader, Abort(head=certificate.plan.parent, attempt=0, reason="no"))
    others = commit(a.peer.certificate, "bcde", attempt=1)
    a.announce(others, "bcde")
    a.run(3)
    assert a.peer.catch_up.target == others
    assert answers(a) == ["begin"]
    a.feed(events.FetchFailed(others.head, "cut"))
    hand_out(a, certificate)
    assert answers(a) == ["begin", "contributed"]


def test_work_that_was_voted_for_in_vain_is_brought_to_the_next_commit_once_that_is_known():
    a, leader, certificate = voted()
    a.say(leader, Abort(head=certificate.plan.parent, attempt=0, reason="no"))
    a.come_to([commit(a.peer.certificate, "bcde", attempt=1)], "bcde")
    assert answers(a) == ["begin", "rebase"]


# A worker that ends, and one that comes after it


@pytest.mark.parametrize("comes_back", [False, True])
def test_work_of_a_worker_that_ended_while_it_was_reduced_is_still_committed(comes_back):
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    a.feed(events.WorkerGone())
    if comes_back:
        a.feed(events.WorkerWaits())
    reduced(a, plan)
    hand_out(a, certify(plan))
    assert a.peer.epoch == 1
    assert answers(a) == ["begin", "contributed", *["begin"] * comes_back]
    assert a.peer.phase == ("training" if comes_back else "waiting")


@pytest.mark.parametrize("stage", ["training", "ready", "reducing", "voted", "keeping"])
@pytest.mark.parametrize("comes", [events.WorkerGone(), events.WorkerWaits()])
def test_at_every_stage_the_worker_may_end_and_another_is_begun(stage, comes):
    a, leader = led_by_another()
    plan = plan_at(a)
    if stage == "training":
        a = Driven.at(GENESIS, "bc")
    if stage in ("reducing", "voted"):
        a.say(leader, Propose(plan=plan))
    if stage == "voted":
        reduced(a, plan)
    if stage == "keeping":
        a.announce(commit(a.peer.certificate, "bcde"), "bcde")
    a.feed(comes)
    a.feed(events.WorkerWaits())
    certificate = {"reducing": certify(plan), "voted": certify(plan)}.get(stage)
    if stage == "reducing":
        reduced(a, plan)
    if certificate is not None:
        hand_out(a, certificate)
    elif stage == "ready":
        newer = commit(a.peer.certificate, "bcde")
        a.announce(newer, "bcde")
        a.run(3)
        a.fetched()
    elif stage == "keeping":
        a.run(3)
        a.fetched()
    a.run(1)
    assert answers(a)[-1] == "begin"
    assert a.peer.phase == "training"
    assert answers(a).count("contributed") == (stage in ("reducing", "voted"))


def test_work_whose_worker_is_gone_is_told_as_lost_where_nobody_can_bring_it():
    a = Driven.at(GENESIS, "bc")
    a.ready(work(40))
    a.feed(events.WorkerGone())
    a.announce(commit(GENESIS, "bc"), "bc")
    a.run(3)
    assert [tell.kind for tell in a.of(effects.Tell)].count("lost_work") == 1
    assert "40 tokens" in next(tell.text for tell in a.of(effects.Tell) if tell.kind == "lost_work")


# Alone, while others download the state


def held() -> Driven:
    a = Driven.at(genesis("a"))
    a.peer.timing.set_sizes(fragment_bytes=10**9, state_bytes=2 * 10**9)
    a.feed(events.LogNeeded(True))
    a.ready()
    a.run(60)
    assert (
        a.of(effects.Reduce) == [] and a.peer.round.missing(a.peer._entry, a.now, is_training=False) == set()
    )
    return a


def newcomer_trains(a: Driven) -> None:
    a.announce(a.peer.certificate, "z", phase="training", world_rank=1)


@pytest.mark.parametrize(
    "ends",
    [
        lambda a: a.feed(events.LogNeeded(False)),
        lambda a: a.feed(events.WorkerGone()),
        newcomer_trains,
        lambda a: a.run(a.peer.timing.first_round_s - 60),
    ],
    ids=["nobody needs the log", "the worker is gone", "a joiner is in", "it took as long as a round"],
)
def test_a_lone_peer_waits_with_its_commit_while_joiners_need_its_log(ends):
    a = held()
    ends(a)
    a.run(a.peer.timing.grace_s(0.0) + 1)
    assert len(a.of(effects.Reduce)) == 1
    assert 60 <= a.peer.round.held_s <= a.peer.timing.first_round_s + 1


def test_of_two_contributors_nobody_waits_for_joiners():
    run = genesis("ab")
    me, other = ("a", "b") if Driven.at(run, "b").leads(0) else ("b", "a")
    leader = Driven.at(run, other, me)
    leader.announce(run, other, phase="ready", work=work())
    leader.feed(events.LogNeeded(True))
    leader.ready()
    assert len(leader.of(effects.Reduce)) == 1 and leader.peer.round.held_s == 0.0


# The last step, leaving


def test_who_has_committed_its_last_work_leaves():
    a = Driven.at(genesis("a"))
    a.ready(work(last=True))
    plan = a.of(effects.Reduce)[-1].plan
    made = a.feed(events.Reduced(plan.digest, digest("x"), digest("y")))
    assert answers(a)[-1] == "contributed"
    assert a.of(Status, made)[-1].phase == "leaving"
    assert a.peer.epoch == 1


@pytest.mark.parametrize("fails", ["after its last commit", "while its last work is reduced"])
def test_a_worker_that_fails_after_it_has_handed_over_its_last_work_begins_again_at_the_end(fails):
    a = Driven.at(genesis("a"))
    a.ready(work(last=True))
    if fails == "while its last work is reduced":
        a.feed(events.WorkerGone())
    plan = a.of(effects.Reduce)[-1].plan
    a.feed(events.Reduced(plan.digest, digest("x"), digest("y")))
    if fails == "after its last commit":
        a.feed(events.WorkerGone())
        assert a.peer.phase == "leaving"
    made = a.feed(events.WorkerWaits())
    (begin,) = a.of(effects.Answer, made)
    assert (begin.how, begin.epoch) == ("begin", 1)
    assert a.of(Status, made)[-1].phase == "training"
    assert a.of(Status, a.feed(events.Leave()))[-1].phase == "leaving"


def test_who_leaves_begins_nothing_and_still_hands_over_certificates():
    a = Driven.at(GENESIS, "bc")
    made = a.feed(events.Leave())
    assert a.of(Status, made)[-1].phase == "leaving"
    a.announce(GENESIS, "bc", "ready", work=work())
    a.ready()
    a.run(30)
    assert a.of(Propose) == []
    assert a.of(Certificates, a.say("b", Ask(head=GENESIS.head)))[0].certificates == (GENESIS,)


def test_who_is_leaving_signs_nothing_any_more():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    a.feed(events.Leave())
    assert a.of(Vote, reduced(a, plan)) == []


# Status


def test_a_status_is_said_at_every_change_and_heartbeat_and_each_has_a_new_number():
    a = Driven.at(GENESIS, "bc")
    a.run(10)
    statuses = a.of(Status)
    numbers = [status.sequence for status in statuses]
    assert numbers == sorted(set(numbers))
    assert 15 <= len(statuses) <= 40
    made = a.ready()
    assert a.of(Status, made)[-1].phase == "ready"


def test_progress_alone_waits_for_the_next_heartbeat():
    a = Driven.at(GENESIS, "bc")
    a.run(1)
    for step in range(1, 9):
        assert a.of(Status, a.feed(events.WorkerTrains(step, 0.01))) == []
    assert a.of(Status, a.run(1))[-1].local_step == 8


def test_there_is_always_a_next_moment_and_it_is_not_now():
    a = Driven.at(GENESIS, "bc")
    for _ in range(40):
        a.run(0.3)
        assert a.now < a.peer.deadline < a.now + 10


# Forks


def test_who_loses_a_fork_keeps_the_work_in_hand_and_says_what_is_lost():
    swarm = founded("abcde")
    swarm.partition("abc", "de")
    swarm.run(40)
    swarm.heal_partition("abc", "de")
    assert swarm.run_until(lambda: len(swarm.heads()) == 1, 60)
    losers = [node for node in swarm.live.values() if node.forks]
    assert {node.peer_id for node in losers} <= {"d", "e"}
    for node in losers:
        (tell,) = node.forks
        assert tell.fields["commits"] >= 1
    assert swarm.run_until(lambda: all(node.answers[-1] == "contributed" for node in swarm.live.values()), 60)


def test_a_fragment_that_is_not_the_one_to_be_averaged_is_not_brought_to_a_commit():
    """The worker trains the next epoch's fragment already, but the fetch of the state it goes with has failed."""
    a = Driven.at(GENESIS, "bc", settings=with_settings(num_fragments=2))
    a.ready(work(40))
    newer = commit(GENESIS, "bc", fragment=0, tokens=100)
    a.announce(newer, "bc")
    a.run(3)
    assert answers(a)[-1] == "keep"
    a.hush("bc")
    a.run(20)
    a.feed(events.FetchFailed(newer.head, "cut", frozenset("bc")))
    a.announce(GENESIS, "bc", "ready", work=work())
    assert a.peer.phase == "training"
    a.ready(work(80))
    a.run(2)
    assert all(status.work is None or status.work.tokens != 80 for status in a.of(Status))


def test_a_leader_that_was_frozen_does_not_blame_members_whose_votes_wait_to_be_read():
    run = next(run for salt in range(60) if leads(run := genesis("abcde", tokens=salt)))
    a = Driven.at(run, "bcde")
    a.announce(run, "bcde", "ready", work=work())
    a.ready()
    a.run(1)
    plan = a.of(Propose)[-1].plan
    a.feed(events.Reduced(plan.digest, digest("anchor"), digest("momentum")))
    for name in "bc":
        a.say(name, a.vote(name, plan))
    a.now += 600
    for name in "bcde":
        a._beat(name)
    assert [a.peer.swarm.strikes(name) for name in "bcde"] == [0, 0, 0, 0]
    for name in "de":
        a.say(name, a.vote(name, plan))
    assert a.peer.certificate is not None and a.peer.certificate.plan == plan


def leads(run: Certificate) -> bool:
    """Whether `a` leads the first attempt after this genesis."""
    driven = Driven.at(run, "bcde")
    return driven.peer.round is not None and driven.peer.round.leader_of(0) == "a"
