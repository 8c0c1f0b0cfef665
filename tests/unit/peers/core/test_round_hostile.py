"""One peer in a round with others that may send any message."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from peers.core import effects, events
from peers.core.plans import Entry, plan_of
from peers.core.round import Stage
from peers.core.turn import Turn
from peers.core.weights import Aggregation
from peers.protocol.certificates import Body, Certificate, Plan
from peers.protocol.limits import MAX_ATTEMPT
from peers.protocol.messages import (
    Abort,
    Ask,
    Certificates,
    Decline,
    Found,
    Message,
    OddVote,
    Propose,
    Status,
    Vote,
    decode_message,
)
from peers.protocol.wire import encode
from tests.unit.peers.core.driven import Driven
from tests.unit.peers.core.made import (
    OFFER,
    SETTINGS,
    Keys,
    commit,
    digest,
    genesis,
    members,
    with_settings,
    work,
)
from tests.unit.peers.core.swarm import Swarm, founded

NAMES = "abcde"


def led_by_another(names: str = NAMES, **kwargs) -> tuple[Driven, str]:
    """All peers are ready. Returns `a` and the leader of attempt 0, which is another peer."""
    for salt in range(50):
        certificate = genesis(names, tokens=salt)
        driven = Driven.at(certificate, names[1:], **kwargs)
        leader = driven.peer.round.leader_of(0)
        if leader != "a":
            driven.announce(certificate, names[1:], "ready", work=work())
            driven.ready()
            return driven, leader
    raise AssertionError


def led_by_me(names: str = NAMES, **kwargs) -> Driven:
    """All peers are ready, and `a`, the leader of attempt 0, has proposed."""
    for salt in range(50):
        certificate = genesis(names, tokens=salt)
        driven = Driven.at(certificate, names[1:], **kwargs)
        if driven.peer.round.leader_of(0) == "a":
            driven.announce(certificate, names[1:], "ready", work=work())
            driven.ready()
            assert driven.of(Propose)
            return driven
    raise AssertionError


def plan_at(driven: Driven, names: str = NAMES, attempt: int = 0, **changes) -> Plan:
    entries = {name: Entry(-1, work()) for name in names}
    plan = plan_of(
        driven.peer.certificate, attempt, entries, off=(), data_width=len(names), settings=SETTINGS
    )
    return replace(plan, **changes)


def reduced(driven: Driven, plan: Plan, anchor: str = "anchor") -> list[effects.Effect]:
    return driven.feed(events.Reduced(plan.digest, digest(anchor), digest("momentum")))


def odd(driven: Driven, plan: Plan, sender: str, anchor: str) -> OddVote:
    vote = driven.vote(sender, plan, anchor=digest(anchor))
    return OddVote(peer_id=sender, anchor=vote.anchor, momentum=vote.momentum, signature=vote.signature)


def abort_with(driven: Driven, plan: Plan, votes: list[OddVote]) -> Abort:
    return Abort(head=plan.parent, attempt=plan.attempt, reason="digests differ", votes=tuple(votes))


def test_a_member_reduces_and_signs_what_its_leader_proposes():
    a, leader = led_by_another()
    plan = plan_at(a)
    (reduce,) = a.of(effects.Reduce, a.say(leader, Propose(plan=plan)))
    assert reduce.plan == plan
    made = reduced(a, plan)
    (vote,) = a.of(Vote, made)
    body = Body(plan=plan, anchor=digest("anchor"), momentum=digest("momentum"))
    assert vote.signature == Keys("a").sign(body.signed_bytes)
    assert effects.Pledge(plan.parent, 0) in made
    certificate = Certificate(body=body, signatures=tuple(Keys(n).sign(body.signed_bytes) for n in NAMES))
    made = a.say("e", Certificates(head=body.head, certificates=(certificate,)))
    assert [effect.certificate for effect in a.of(effects.Apply, made)] == [certificate]
    assert a.peer.head == body.head


@pytest.mark.parametrize(
    "changes",
    [
        {"roster": members("xyz")},
        {"roster": members("abcdexyzuvw")},
        {"roster": members("b")},
        {"data_base": 10**6},
        {"tokens": 0},
        {"epoch": 5},
        {"fragment": 1},
        {"manifest": digest("another")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_member_declines_a_plan_that_it_would_not_have_made(changes):
    a, leader = led_by_another()
    made = a.say(leader, Propose(plan=plan_at(a, **changes)))
    assert a.of(effects.Reduce, made) == []
    (decline,) = a.of(Decline, made)
    assert decline.attempt == 0
    assert a.peer.round.attempt == 1


@pytest.mark.parametrize("sender", ["b", "c", "d", "e", "z"])
def test_nobody_but_the_leader_of_an_attempt_is_followed(sender):
    a, leader = led_by_another()
    if sender != leader:
        made = a.say(sender, Propose(plan=plan_at(a)))
        assert a.of(effects.Reduce, made) == []


def test_a_group_of_two_out_of_five_is_declined_while_the_others_are_there():
    a, leader = led_by_another()
    made = a.say(leader, Propose(plan=plan_at(a, "a" + leader)))
    assert a.of(effects.Reduce, made) == []
    assert "no quorum" in a.of(Decline, made)[0].reason


def test_a_group_of_two_is_declined_also_when_the_others_have_been_lost_a_moment_ago():
    a, leader = led_by_another()
    for other in set("bcde") - {leader}:
        a.feed(events.Disconnected(other))
        a.hush(other)
    made = a.say(leader, Propose(plan=plan_at(a, "a" + leader)))
    assert a.of(effects.Reduce, made) == []


def test_a_group_of_two_is_taken_once_the_others_are_gone():
    a, leader = led_by_another()
    for other in set("bcde") - {leader}:
        a.hush(other)
    timing = a.peer.timing
    a.run(timing.silence_s + timing.regain_s)
    attempt = a.peer.round.attempt
    while a.peer.round.leader_of(attempt) != leader:
        attempt += 1
    a.run(0.1)
    made = a.say(leader, Propose(plan=plan_at(a, "a" + leader, attempt)))
    proposals = a.of(effects.Reduce, made) or a.of(effects.Reduce)
    assert [reduce.plan.signers for reduce in proposals][:1] == [tuple(sorted("a" + leader))]


def test_a_leader_that_changes_what_a_member_has_handed_over_is_declined():
    a, leader = led_by_another()
    plan = plan_at(a)
    mine = plan.contributors[0]
    for changed in (
        replace(mine, work=work(1)),
        replace(mine, work=work(norm=2.0)),
        replace(mine, work=work(based_on=1)),
    ):
        b, leader = led_by_another()
        made = b.say(leader, Propose(plan=replace(plan, contributors=(changed, *plan.contributors[1:]))))
        assert b.of(effects.Reduce, made) == []
        assert b.of(Decline, made)


def test_a_second_plan_at_the_same_attempt_is_declined():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    other = plan_at(a, "".join(n for n in NAMES if n != "e" or leader == "e"), tokens=400)
    other = plan_at(a, "abcd" if leader != "e" else "abce")
    made = a.say(leader, Propose(plan=other))
    assert a.of(effects.Reduce, made) == []
    assert a.of(Decline, made)
    assert a.of(Vote, a.feed(events.Reduced(other.digest, digest("x"), digest("y")))) == []


def test_a_member_signs_once_at_an_attempt_whatever_comes():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    reduced(a, plan)
    assert a.of(Vote, reduced(a, plan, "another")) == []
    a.say(leader, Propose(plan=plan))
    assert a.of(Vote, reduced(a, plan, "another")) == []
    a.say(leader, abort_with(a, plan, []))
    a.say(leader, Propose(plan=plan))
    assert a.of(Vote, reduced(a, plan, "another")) == []


def test_a_peer_that_comes_back_does_not_sign_at_an_attempt_that_it_has_pledged():
    for salt in range(50):
        certificate = genesis(NAMES, tokens=salt)
        a = Driven.at(certificate, "bcde", pledges={certificate.head: 3})
        assert a.peer.round.attempt >= 4
        a.announce(certificate, "bcde", "ready", work=work())
        a.ready()
        for attempt in range(4):
            leader = a.peer.round.leader_of(attempt)
            if leader != "a":
                made = a.say(leader, Propose(plan=plan_at(a, attempt=attempt)))
                assert a.of(effects.Reduce, made) == []
        if salt > 3:
            return


# Votes and their leader


def test_a_leader_counts_the_votes_and_tells_everybody():
    a = led_by_me()
    plan = a.of(Propose)[0].plan
    assert {send.peer_id for send in a.of(effects.Send) if isinstance(send.message, Propose)} == set("bcde")
    reduced(a, plan)
    for name in "bcd":
        assert a.of(Certificates, a.say(name, a.vote(name, plan))) == []
    made = a.say("e", a.vote("e", plan))
    (certificate,) = a.of(Certificates, made)[0].certificates
    assert certificate.plan == plan
    assert a.peer.head == certificate.head
    assert [answer.how for answer in a.of(effects.Answer, made)] == ["contributed"]


def test_votes_of_strangers_and_for_other_plans_do_not_count():
    a = led_by_me()
    plan = a.of(Propose)[0].plan
    reduced(a, plan)
    for name in "bcd":
        a.say(name, a.vote(name, plan))
    a.say("z", a.vote("z", plan))
    a.say("e", replace(a.vote("e", plan), plan=digest("another")))
    a.say("e", replace(a.vote("e", plan), head=digest("another")))
    assert a.peer.epoch == 0
    a.say("e", a.vote("e", plan))
    assert a.peer.epoch == 1


def test_a_vote_with_a_signature_of_somebody_else_ends_the_attempt_without_its_sender():
    a = led_by_me()
    plan = a.of(Propose)[0].plan
    reduced(a, plan)
    made = a.say("b", replace(a.vote("b", plan), signature=a.vote("c", plan).signature))
    assert a.of(Abort, made)[0].lost == ("b",)
    assert a.peer.round.attempt >= 1


def test_a_member_that_votes_differently_each_time_ends_in_one_vote():
    a = led_by_me()
    plan = a.of(Propose)[0].plan
    reduced(a, plan)
    for n in range(50):
        a.say("b", a.vote("b", plan, anchor=digest("another", n)))
    assert a.peer.epoch == 0
    for name in "bcde":
        a.say(name, a.vote(name, plan))
    assert a.peer.epoch == 1


def test_a_leader_that_shows_its_own_false_vote_many_times_convicts_nobody_else():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    reduced(a, plan)
    honest = [odd(a, plan, name, "anchor") for name in NAMES if name != leader]
    false = odd(a, plan, leader, "evil")
    a.say(leader, abort_with(a, plan, [*honest, *[false] * 9]))
    a.run(3)
    assert a.of(effects.Fetch) == []
    assert all(a.peer.swarm._peers[name].strikes == 0 for name in set("bcde") - {leader})


def test_a_leader_that_shows_only_some_votes_does_not_make_a_member_doubt_its_state():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    reduced(a, plan)
    votes = [odd(a, plan, "a", "anchor"), odd(a, plan, leader, "evil")]
    a.say(leader, abort_with(a, plan, votes))
    a.run(3)
    assert a.of(effects.Fetch) == []


def test_a_forged_vote_convicts_nobody():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    reduced(a, plan)
    forged = [
        replace(odd(a, plan, name, "evil"), signature=Keys(leader).sign(b"anything")) for name in "bcde"
    ]
    a.say(leader, abort_with(a, plan, [odd(a, plan, "a", "anchor"), *forged]))
    a.run(3)
    assert a.of(effects.Fetch) == []


def test_the_one_whose_digests_all_others_contradict_compares_its_state():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    reduced(a, plan, "spoilt")
    votes = [odd(a, plan, name, "spoilt" if name == "a" else "anchor") for name in NAMES]
    a.say(leader, abort_with(a, plan, votes))
    a.run(1)
    assert [fetch.path[-1].head for fetch in a.of(effects.Fetch)] == [a.peer.head]
    made = a.fetched()
    assert [adopt.certificate for adopt in a.of(effects.Adopt, made)] == [a.peer.certificate]
    assert a.peer.phase == "ready"


def test_an_abort_counts_from_its_leader_and_for_its_attempt_only():
    a, leader = led_by_another()
    plan = plan_at(a)
    a.say(leader, Propose(plan=plan))
    other = next(name for name in "bcde" if name != leader)
    a.say(other, abort_with(a, plan, []))
    a.say(leader, replace(abort_with(a, plan, []), attempt=7))
    a.say(leader, replace(abort_with(a, plan, []), head=digest("another")))
    assert a.peer.round.stage is Stage.REDUCE
    a.say(leader, abort_with(a, plan, []))
    assert a.peer.round.attempt >= 1
    assert effects.CancelReduce() in a.effects


@pytest.mark.parametrize("gives_a_reason", [True, False])
def test_a_leader_that_ends_its_reduction_is_given_a_moment_to_say_for_whose_fault(gives_a_reason):
    a, leader = led_by_another()
    plan = plan_at(a)
    other = next(name for name in "bcde" if name != leader)
    a.say(leader, Propose(plan=plan))
    made = a.feed(events.ReduceFailed(plan.digest, "a stream broke", frozenset({leader})))
    assert [decline.suspects for decline in a.of(Decline, made)] == [(leader,)]
    assert a.peer.round.attempt == 0
    if gives_a_reason:
        a.say(leader, replace(abort_with(a, plan, []), lost=(other,)))
    else:
        a.run(2 * a.peer.timing.reaction_s)
    assert a.peer.round.attempt == 1
    assert a.peer.round._blame.last_suspects == {other if gives_a_reason else leader}
    assert a.peer.swarm.strikes(leader) == (0 if gives_a_reason else 0.5)
    assert len(a.of(Decline)) == 1


def test_newcomers_stand_in_for_a_member_that_makes_attempts_fail_where_too_few_are_left_for_a_robust_rule():
    names, robust = "abc", with_settings(aggregation=Aggregation(rule="trimmed-mean"))
    a = Driven.at(genesis(names), "bc", settings=robust)
    a.announce(a.peer.certificate, "bcde", "ready", work=work())
    a.ready()
    groups = []
    for attempt in range(6):
        ready, _ = a.peer.round._group.ready_and_expected(
            Turn(a.now),
            Entry(-1, work()),
            is_training=False,
            attempt=attempt,
            suspects=frozenset("c") if attempt else frozenset(),
            last_suspects=frozenset(),
        )
        groups.append("".join(sorted(ready)))
    # The three members lead in turn.
    assert groups == ["abcde", "abc", "abde", "abc", "abde", "abc"]


@pytest.mark.parametrize("place", [0, 1])
def test_a_newcomer_that_never_votes_does_not_stop_the_last_one_of_the_roster(place):
    """Whether that member leads attempt 0 or attempt 1."""
    start = next(g for g in (genesis("ab", tokens=n) for n in range(50)) if Driven.at(g).leads(place))
    a = Driven.at(start, "b")
    a.hush("b")
    a.feed(events.Disconnected("b"))
    a.run(20)
    a.announce(start, "s", "ready", work=work())
    made = a.ready()
    for _ in range(120):
        for reduce in a.of(effects.Reduce, made):
            reduced(a, reduce.plan)
        made = a.run(0.5)
    assert a.of(effects.Apply)


def test_a_decline_of_a_stranger_or_of_another_attempt_does_not_end_an_attempt():
    a = led_by_me()
    for sender, attempt in (("z", 0), ("b", 3)):
        a.say(sender, Decline(head=a.peer.head, attempt=attempt, reason="no"))
    assert a.peer.round.attempt == 0
    made = a.say("b", Decline(head=a.peer.head, attempt=0, reason="no"))
    assert a.of(Abort, made)[0].lost == ("b",)


def test_a_member_cannot_have_the_leader_itself_or_strangers_left_out():
    a = led_by_me()
    made = a.say("b", Decline(head=a.peer.head, attempt=0, reason="no", suspects=("a", "z")))
    assert set(a.of(Abort, made)[0].lost) <= {"b"}


@pytest.mark.parametrize("is_hearsay", [False, True])
def test_of_a_member_and_the_one_it_accuses_the_one_that_has_missed_heartbeats_is_left_out(is_hearsay):
    for accuser, accused in (("b", "c"), ("c", "d"), ("d", "e")):
        a = led_by_me()
        a.hush(accused)
        a.run(2)
        told_by = tuple(sorted(set("bcde") - {accuser, accused})[:1]) if is_hearsay else ()
        decline = Decline(
            head=a.peer.head, attempt=0, reason="no streams with it", suspects=(accused,), told_by=told_by
        )
        made = a.say(accuser, decline)
        assert a.of(Abort, made)[0].lost == (accused,)


def test_a_member_that_accuses_everybody_does_not_have_the_silent_one_left_out():
    lost = []
    for accuser in "cde":
        a = led_by_me()
        a.hush("b")
        a.run(2)
        others = tuple(set("bcde") - {accuser})
        made = a.say(accuser, Decline(head=a.peer.head, attempt=0, reason="no", suspects=others))
        lost += a.of(Abort, made)[0].lost
    assert lost != ["b"] * 3


def test_an_attempt_is_never_more_than_can_be_read_back():
    a, _ = led_by_another("abc")
    for name in "bc":
        a.others[name]["attempt"] = MAX_ATTEMPT
    a.run(60)
    assert all(decode_message(encode(status)) == status for status in a.of(Status))


def test_one_liar_of_three_does_not_move_the_attempt():
    a, _ = led_by_another("abc")
    a.others["b"]["attempt"] = 500
    a.run(1)
    assert a.peer.round.attempt < 10


def test_proposals_of_the_far_future_are_not_kept():
    a, leader = led_by_another()
    for attempt in range(0, 5000, 5):
        a.say(leader, Propose(plan=plan_at(a, attempt=attempt)))
    assert len(a.peer.round._proposals) <= len(NAMES)


# Over many epochs, in a swarm

EPOCHS = 24
"""In so many epochs a liar costs fewer attempts, since it is left out for longer than it is let in."""


def attempts_lost(swarm: Swarm, name: str, since: int) -> int:
    return sum(attempt for epoch, attempt, _ in swarm[name].commits if epoch > since)


@pytest.mark.parametrize("names", ["abcde"])
def test_a_member_that_never_votes_does_not_cost_an_attempt_in_every_epoch(names):
    swarm, liar = founded(names), names[-1]
    swarm.tamper = lambda sender, to, message: (
        None if sender == liar and isinstance(message, Vote) else message
    )
    assert swarm.run_until(lambda: swarm["a"].machine.epoch >= 2 + EPOCHS, 400)
    assert attempts_lost(swarm, "a", 2) <= 3 * EPOCHS // 4


@pytest.mark.parametrize("names", ["abcde"])
def test_a_member_that_accuses_another_each_time_does_not_cost_an_attempt_in_every_epoch(names):
    swarm, liar = founded(names), names[-1]

    def accuses(sender: str, to: str, message: Message) -> Message:
        if sender == liar and isinstance(message, Vote):
            others = sorted(set(names) - {liar, to})
            return Decline(
                head=message.head,
                attempt=message.attempt,
                reason="it sends nothing",
                suspects=(others[message.attempt % len(others)],),
            )
        return message

    swarm.tamper = accuses
    assert swarm.run_until(lambda: swarm["a"].machine.epoch >= 2 + EPOCHS, 400)
    assert attempts_lost(swarm, "a", 2) <= 3 * EPOCHS // 4


def test_a_stranger_that_says_it_is_ready_and_does_nothing_does_not_cost_an_attempt_in_every_epoch():
    swarm = founded("abcd")
    sequence = iter(range(2, 10**6))

    def beats() -> None:
        for name in "abcd":
            at = swarm[name].machine
            swarm.say(
                "z",
                name,
                Status(
                    incarnation=1,
                    sequence=next(sequence),
                    world_rank=-1,
                    phase="ready",
                    head=at.head,
                    epoch=at.epoch,
                    work=work(based_on=at.epoch),
                ),
            )
        swarm.at(swarm.now + 0.4, beats)

    beats()
    assert swarm.run_until(lambda: swarm["a"].machine.epoch >= 2 + EPOCHS, 400)
    assert attempts_lost(swarm, "a", 2) <= 3 * EPOCHS // 4


# Anything at any time

GENESIS = genesis("abc")
PLANS = [
    plan_of(
        GENESIS,
        attempt,
        {name: Entry(-1, work()) for name in names},
        off=off,
        data_width=3,
        settings=SETTINGS,
    )
    for attempt in range(4)
    for names, off in (("abc", ""), ("ab", ""), ("bc", ""), ("ab", "c"), ("a", ""), ("abcz", ""))
]
BODIES = [Body(plan=plan, anchor=digest("r"), momentum=digest("m")) for plan in PLANS]
SIGNED = [
    Certificate(body=body, signatures=tuple(Keys(n).sign(body.signed_bytes) for n in body.plan.signers))
    for body in BODIES
]
FIXED: list[Message] = [
    *(Propose(plan=plan) for plan in PLANS),
    *(Certificates(head=certificate.head, certificates=(certificate,)) for certificate in SIGNED),
    *(
        Vote(
            head=body.plan.parent,
            attempt=body.plan.attempt,
            plan=body.plan.digest,
            anchor=body.anchor,
            momentum=body.momentum,
            signature=Keys(signer).sign(body.signed_bytes),
        )
        for body in BODIES[::4]
        for signer in "bcz"
    ),
    *(Decline(head=GENESIS.head, attempt=n, reason="", suspects=("a", "b")) for n in range(4)),
    *(Abort(head=GENESIS.head, attempt=n, reason="", lost=("a", "c")) for n in range(4)),
    Ask(head=GENESIS.head),
    Ask(head=digest("x")),
    Certificates(head=digest("x"), certificates=()),
    Found(body=GENESIS.body),
]
STATUSES = st.builds(
    Status,
    incarnation=st.integers(0, 2),
    sequence=st.integers(0, 50),
    world_rank=st.integers(-1, 9),
    phase=st.sampled_from(["waiting", "fetching", "training", "ready", "leaving"]),
    head=st.sampled_from([GENESIS.head, SIGNED[0].head, SIGNED[2].head, digest("x"), ""]),
    epoch=st.integers(0, 3),
    attempt=st.integers(0, 9),
    work=st.sampled_from([None, work(), work(based_on=1)]),
    offer=st.sampled_from([None, OFFER]),
)
SENDERS = st.sampled_from("abcz")


EVENTS = st.one_of(
    st.builds(events.Received, SENDERS, st.sampled_from(FIXED)),
    st.builds(events.Received, SENDERS, STATUSES),
    st.builds(events.Disconnected, SENDERS),
    st.builds(events.RoundTrip, SENDERS, st.sampled_from([0.0, 0.1, 50.0])),
    st.sampled_from(
        [
            events.WorkerWaits(),
            events.WorkReady(work()),
            events.WorkReady(work(5, last=True)),
            events.WorkerGone(),
            events.WorkerTrains(3, 0.5),
            events.ReduceFailed(digest("x"), "cut", frozenset("b")),
            events.StateOffered(OFFER),
        ]
    ),
)


@settings(max_examples=50)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.1, 1.0, 7.0, 100.0])), max_size=25), st.booleans())
def test_whatever_happens_a_peer_ends_its_rules_says_what_can_be_read_and_signs_once(happens, finishes):
    a = Driven.at(GENESIS, "bc")
    signed: dict[tuple[str, int], str] = {}
    for event, pause in happens:
        a.now += pause
        made = a.feed(event)
        if finishes:
            for reduce in a.of(effects.Reduce, made):
                made += a.feed(events.Reduced(reduce.plan.digest, digest("r"), digest("m")))
            for fetch in a.of(effects.Fetch, made):
                made += a.feed(events.Fetched(fetch.path[-1].head))
        for vote in a.of(Vote, made):
            assert signed.setdefault((vote.head, vote.attempt), vote.plan) == vote.plan
        for effect in made:
            if isinstance(effect, effects.Send | effects.Broadcast):
                assert decode_message(encode(effect.message)) == effect.message
        assert a.peer.deadline > a.now


def test_a_robust_group_of_two_is_not_formed():
    for rule in ("trimmed-mean", "centered-clip"):
        a = Driven.at(
            genesis("ab"),
            "b",
            settings=with_settings(aggregation=Aggregation(rule=rule)),
        )
        a.announce(genesis("ab"), "b", "ready", work=work())
        a.ready()
        a.run(30)
        assert a.of(Propose) == []
        assert a.of(effects.Reduce) == []


def test_one_member_alone_drives_another_slowly_through_its_attempts():
    three = genesis("abz")
    a = Driven.at(three, "bz")
    a.hush("b")
    a.feed(events.Disconnected("b"))
    for number in range(200):
        a.announce(three, "z", attempt=MAX_ATTEMPT - number % 2)
        a.run(0.05)
    assert a.peer.round.attempt < 200


def test_a_peer_that_has_signed_at_the_last_attempt_says_nothing_that_others_cannot_read():
    three = genesis("abc")
    a = Driven.at(three, "bc", pledges={three.head: MAX_ATTEMPT})
    assert decode_message(encode(a.of(Status)[-1])).attempt == MAX_ATTEMPT
    a.announce(three, "bc", "ready", work=work(), attempt=MAX_ATTEMPT)
    a.ready()
    a.run(30)
    assert not a.of(Propose)


def test_who_has_left_may_be_heard_at_different_times_and_nobody_is_blamed():
    """Otherwise a member could tell only the leader that it leaves, and all others would leave the leader out."""
    a, leader = led_by_another()
    gone = next(name for name in reversed(NAMES) if name != leader)
    others = NAMES.replace(gone, "")
    entries = {name: Entry(-1, work()) for name in others}
    plan = plan_of(a.peer.certificate, 0, entries, off={gone}, data_width=5, settings=SETTINGS)
    made = a.say(leader, Propose(plan=plan))
    assert "to remove members that are not gone" in a.of(Decline, made)[0].reason
    assert a.peer.swarm.strikes(leader) == 0
    # The same excuse does not cover any other fault of the plan.
    b, leader = led_by_another()
    wrong = replace(
        plan_of(b.peer.certificate, 0, entries, off=(), data_width=5, settings=SETTINGS), tokens=1
    )
    b.say(leader, Propose(plan=wrong))
    assert b.peer.swarm.strikes(leader) == 1


def proposed_without_e() -> tuple[Driven, Plan]:
    """`a` leads, and has proposed a plan that takes `e` off the roster because `e` is leaving."""
    certificate = next(
        one
        for salt in range(50)
        if Driven.at(one := genesis(NAMES, tokens=salt), NAMES[1:]).peer.round.leader_of(0) == "a"
    )
    a = Driven.at(certificate, NAMES[1:])
    a.announce(certificate, "e", "leaving")
    a.announce(certificate, "bcd", "ready", work=work())
    a.ready()
    a.run(1)
    return a, a.of(Propose)[-1].plan


def test_a_leader_that_takes_off_who_has_left_blames_nobody_who_has_not_heard_it():
    a, plan = proposed_without_e()
    assert "e" not in plan.roster_set
    a.say(
        "b", Decline(head=plan.parent, attempt=plan.attempt, reason="to remove members that are not gone: e")
    )
    assert a.peer.round.attempt == plan.attempt + 1
    assert [a.peer.swarm.strikes(name) for name in "bcd"] == [0, 0, 0]


def test_whom_a_decline_names_is_blamed_though_the_plan_takes_somebody_off():
    a, plan = proposed_without_e()
    a.say("b", Decline(head=plan.parent, attempt=plan.attempt, reason="its stream broke", suspects=("c",)))
    assert a.peer.swarm.strikes("b") > 0
    assert a.peer.swarm.strikes("c") > 0


def test_what_a_peer_has_signed_is_awaited_until_its_leader_cannot_have_committed_it():
    """Meanwhile an earlier attempt of others is not adopted: the later one, with this peer's work in it, may win."""
    a, leader = led_by_another()
    for _ in range(3):
        plan = plan_at(a, attempt=a.peer.round.attempt)
        leader = a.peer.round.leader_of(plan.attempt)
        if plan.attempt > 0 and leader != "a":
            break
        a.peer.round._leave_attempt(Turn(a.now), a.peer.round.attempt + 1)
    a.say(leader, Propose(plan=plan))
    a.feed(events.Reduced(plan.digest, digest("anchor"), digest("momentum")))
    a.hush(leader)
    a.feed(events.Disconnected(leader))
    assert a.peer.round.stage is Stage.GATHER
    others = NAMES.replace("a", "").replace(leader, "")
    earlier = commit(a.peer.certificate, others, attempt=0)
    a.know([earlier])
    a.announce(earlier, others)
    a.run(2)
    assert not a.of(effects.Fetch)
    a.run(30)
    assert a.of(effects.Fetch)
