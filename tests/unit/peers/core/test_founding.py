"""How a run begins, whichever founder dies, lies or stays silent."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from peers.core import effects, events
from peers.core.founding import NO_HEAD, genesis_of
from peers.protocol.certificates import Body, Certificate
from peers.protocol.limits import MAX_ATTEMPT, MAX_EPOCH
from peers.protocol.messages import (
    Ask,
    Certificates,
    Found,
    Message,
    Offer,
    Status,
    Vote,
    decode_message,
)
from peers.protocol.wire import encode
from peers.timing import BEAT_S
from tests.unit.peers.core.driven import Driven
from tests.unit.peers.core.made import (
    OFFER,
    SETTINGS,
    Keys,
    chain_of,
    commit,
    digest,
    genesis,
    status,
    verify,
    with_settings,
)
from tests.unit.peers.core.swarm import Swarm


def founders(names: str, galaxy_size: int = 0, **settings) -> Swarm:
    return Swarm(names, settings=with_settings(galaxy_size=galaxy_size or len(names), **settings))


def begun(swarm: Swarm, names: str) -> bool:
    """Whether all of them are on one genesis."""
    return len({swarm[name].machine.head for name in names}) == 1 and swarm[names[0]].machine.head != ""


@pytest.mark.parametrize("num", [1, 2, 3, 8])
def test_founders_sign_one_genesis_and_begin_together_at_step_0(num):
    names = "abcdefgh"[:num]
    swarm = founders(names)
    assert swarm.run_until(lambda: begun(swarm, names), 5)
    certificate = swarm["a"].machine.certificate
    assert certificate is not None
    assert certificate.is_genesis
    assert certificate.is_signed(verify)
    assert sorted(certificate.plan.signers) == list(names)
    assert sorted(member.world_rank for member in certificate.plan.roster) == list(range(num))
    assert (certificate.plan.epoch, certificate.plan.tokens) == (0, 0)
    for node in swarm.live.values():
        (begin,) = node.effects(effects.Answer)
        assert (begin.how, begin.epoch, begin.local_step) == ("begin", 0, 0)


def test_nobody_begins_before_as_many_are_there_as_the_galaxy_is_large():
    swarm = founders("ab", galaxy_size=3)
    swarm.run(100)
    assert swarm.heads() == {""}
    swarm.start("c")
    assert swarm.run_until(lambda: begun(swarm, "abc"), 5)


def test_fewer_begin_when_the_time_for_founders_has_passed():
    swarm = founders("ab", galaxy_size=3, founders_timeout_s=60.0)
    swarm.run(59)
    assert swarm.heads() == {""}
    assert swarm.run_until(lambda: begun(swarm, "ab"), 10)
    assert swarm["a"].machine.certificate.plan.signers == ("a", "b")


def test_nobody_founds_a_run_beside_one_that_it_is_connected_with_and_has_not_heard_of_yet():
    a = Driven(settings=with_settings(galaxy_size=1), has_worker=False)
    a.feed(events.Connected("b"))
    a.feed(events.StateOffered(OFFER))
    a.feed(events.WorkerWaits())
    a.run(1)
    assert a.peer.head == ""
    newer = chain_of(genesis("bc"), "bc", 3)[-1]
    a.announce(newer, "bc")
    a.run(5)
    assert [fetch.path[-1] for fetch in a.of(effects.Fetch)] == [newer]


def test_nobody_founds_a_run_beside_one_whose_certificate_it_has_from_a_member_that_has_died_since():
    run = genesis("abc")
    newest = commit(run, "abc")
    n = Driven("n", has_worker=False, settings=with_settings(galaxy_size=1))
    n.know([run, newest])
    n.announce(newest, "a")
    n.run(3)
    n.announce(newest, "bc")
    n.run(30)
    n.hush("a")
    n.feed(events.Disconnected("a"))
    n.run(20)
    n.feed(events.StateOffered(OFFER))
    n.feed(events.WorkerWaits())
    n.run(10)
    assert n.peer.certificate is None
    assert [fetch.path[-1].head for fetch in n.of(effects.Fetch)] == [newest.head]


def test_who_is_connected_and_says_nothing_is_waited_for_once_and_briefly():
    a = Driven(settings=with_settings(galaxy_size=1), has_worker=False)
    a.feed(events.Connected("b"))
    a.feed(events.StateOffered(OFFER))
    a.run(2)
    a.feed(events.Disconnected("b"))
    a.feed(events.Connected("b"))
    a.run(2)
    assert a.peer.certificate is not None
    assert a.peer.certificate.is_genesis


def test_who_is_connected_is_told_at_once_where_this_peer_stands():
    a = Driven.at(genesis("ab"), "b")
    (told,) = a.of(effects.Send, a.feed(events.Connected("c")))
    assert (told.peer_id, told.message.head) == ("c", a.peer.head)


def test_a_founder_that_comes_later_than_the_genesis_is_a_newcomer():
    swarm = founders("ab")
    swarm.run(3)
    swarm.start("c")
    assert swarm.reach(2, 60)
    assert swarm.run_until(
        lambda: {m.peer_id for m in swarm["a"].machine.certificate.plan.roster} == set("abc"), 60
    )


@pytest.mark.parametrize("victim", "abc")
@pytest.mark.parametrize("at", [0.02, 0.515, 0.525, 0.535, 1.0])
def test_whichever_founder_dies_the_others_begin_without_it(victim, at):
    swarm = founders("abc", galaxy_size=2)
    swarm.run(at)
    swarm.kill(victim)
    rest = "abc".replace(victim, "")
    assert swarm.run_until(lambda: begun(swarm, rest), 30)


@pytest.mark.parametrize("silent", "abc")
def test_a_leader_that_proposes_nothing_costs_an_attempt(silent):
    swarm = founders("abc")
    swarm.tamper = lambda sender, to, message: (
        None if sender == silent and isinstance(message, Found) else message
    )
    assert swarm.run_until(lambda: begun(swarm, "abc"), 20)
    assert swarm["a"].machine.certificate.plan.attempt <= 2


def keeps_the_genesis(to: str, message: Message) -> Message | None:
    return None if isinstance(message, Certificates) else message


def never_signs(to: str, message: Message) -> Message | None:
    return None if isinstance(message, Vote | Found) else message


def shows_each_another_state(to: str, message: Message) -> Message:
    if getattr(message, "offer", None) is None:
        return message
    return replace(message, offer=replace(OFFER, anchor=digest("for", to)))


@pytest.mark.parametrize(
    ("liar", "lie"), [("a", keeps_the_genesis), ("d", never_signs), ("d", shows_each_another_state)]
)
def test_the_other_founders_begin_without_one_that(liar, lie):
    """Nor does any of them sign twice meanwhile."""
    swarm = founders("abcd", galaxy_size=3)
    swarm.tamper = lambda sender, to, message: lie(to, message) if sender == liar else message
    assert swarm.run_until(lambda: begun(swarm, "abcd".replace(liar, "")), 120)


def test_a_founder_out_of_turn_cannot_use_up_the_attempts_of_the_others():
    swarm = founders("abc", galaxy_size=3)
    beats = iter(range(2, 10**6))

    def pushes() -> None:
        for name in "abc":
            swarm.say("d", name, status(None, "waiting", sequence=next(beats), offer=OFFER))
            ahead = swarm[name].machine._founding.signed + 4
            body = genesis_of(swarm.settings, {p: (-1, OFFER) for p in "abcd"}, ahead)
            swarm.say("d", name, Found(body=body))
        swarm.at(swarm.now + 0.2, pushes)

    pushes()
    assert swarm.run_until(lambda: begun(swarm, "abc"), 120)


def test_a_head_without_a_certificate_does_not_keep_a_run_from_being_founded():
    swarm = founders("abc")
    beats = iter(range(2, 10**6))

    def announces() -> None:
        for name in "abc":
            swarm.say("z", name, status(None, head=digest("made up"), sequence=next(beats)))
        swarm.at(swarm.now + BEAT_S, announces)

    announces()
    assert swarm.run_until(lambda: begun(swarm, "abc"), 60)


def test_a_genesis_of_an_epoch_that_nobody_can_count_on_from_is_no_beginning():
    a = Driven("a")
    late = genesis("z", epoch=MAX_EPOCH + 1)
    a.announce(late, "z")
    a.run(10)
    assert a.of(effects.Fetch) == []


# One founder, and what it signs


def founder(me: str = "a", others: str = "bc", **kwargs) -> Driven:
    driven = Driven(me, settings=with_settings(galaxy_size=3), **kwargs)
    driven.announce(None, others, "waiting", offer=OFFER)
    return driven


def proposal(names: str = "abc", attempt: int = 0, **changes) -> Body:
    body = genesis_of(SETTINGS, {name: (-1, OFFER) for name in names}, attempt)
    return replace(body, plan=replace(body.plan, **changes)) if changes else body


def votes_for(driven: Driven, body: Body, *senders: str) -> list[Vote]:
    """The votes that the peer sends when each of `senders` proposes this body; one of them is its leader."""
    before = len(driven.effects)
    for sender in senders or ("b", "c"):
        driven.say(sender, Found(body=body))
    return driven.of(Vote, driven.effects[before:])


def first_proposal(driven: Driven) -> Body:
    """A proposal for the next attempt that another founder leads."""
    return proposal(attempt=driven.peer._founding.signed + 1)


def test_a_founder_signs_what_it_would_propose_itself_and_writes_that_down_first():
    a = founder()
    body = first_proposal(a)
    (vote,) = votes_for(a, body)[:1]
    assert verify("a", body.signed_bytes, vote.signature)
    kinds = [type(effect) for effect in a.effects if not isinstance(effect, effects.Broadcast)]
    assert kinds.index(effects.Pledge) < kinds.index(effects.Send)
    assert effects.Pledge(NO_HEAD, body.plan.attempt) in a.effects


def test_a_proposal_that_comes_before_the_status_of_a_founder_is_signed_once_that_has_come():
    a = founder()
    attempt = first_proposal(a).plan.attempt
    bodies = [proposal("abcd", attempt=number) for number in range(attempt, attempt + 2)]
    assert not any(votes_for(a, body, "b", "c", "d") for body in bodies)
    before = len(a.effects)
    a.announce(None, "d", "waiting", offer=OFFER)
    (vote,) = a.of(Vote, a.effects[before:])
    assert vote.plan in {body.plan.digest for body in bodies}


@pytest.mark.parametrize(
    "changes",
    [
        {"roster": genesis("abz").plan.roster},
        {"roster": genesis("bc").plan.roster},
        {"roster": genesis("ab").plan.roster},
        {"roster": genesis({"a": 0, "b": 1, "c": 9}).plan.roster},
        {"epoch": 1},
        {"tokens": 1},
        {"data_base": 1},
        {"parent": digest("another")},
        {"manifest": digest("another")},
        {"fragment": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_founder_does_not_sign_anything_else(changes):
    a = founder()
    assert votes_for(a, proposal(attempt=first_proposal(a).plan.attempt, **changes)) == []


@pytest.mark.parametrize("field", ["anchor", "momentum"])
def test_a_founder_does_not_sign_another_state(field):
    a = founder()
    assert votes_for(a, replace(first_proposal(a), **{field: digest("evil")})) == []


def test_a_founder_never_signs_twice_at_an_attempt():
    a = founder()
    body = first_proposal(a)
    assert votes_for(a, body)
    a.announce(None, "d", "waiting", offer=OFFER)
    assert votes_for(a, proposal("abcd", attempt=body.plan.attempt), "b", "c", "d") == []
    assert votes_for(a, body) == []


def test_a_founder_that_comes_back_does_not_sign_again_what_it_has_pledged():
    a = founder(pledges={NO_HEAD: 6})
    for attempt in range(7):
        assert votes_for(a, proposal(attempt=attempt)) == []
    assert votes_for(a, proposal(attempt=7)) + votes_for(a, proposal(attempt=8))


def test_founders_of_whom_one_comes_back_with_pledges_still_begin():
    swarm = Swarm("bc", settings=with_settings(galaxy_size=3))
    swarm.start("a").pledges[NO_HEAD] = 5
    swarm.kill("a")
    swarm.start("a")
    assert swarm.run_until(lambda: begun(swarm, "abc"), 60)
    assert swarm["a"].machine.certificate.plan.attempt > 5


def test_a_vote_that_is_not_signed_by_its_sender_does_not_count():
    a = founder("a", "b", pledges=None)
    a = Driven("a", settings=with_settings(galaxy_size=2))
    a.announce(None, "b", "waiting", offer=OFFER)
    a.run(10)
    body = a.of(Found)[-1].body
    good = a.vote("b", body.plan)
    forged = replace(good, signature=Keys("c").sign(body.signed_bytes))
    a.say("b", forged)
    a.say("z", good)
    assert a.peer.head == ""
    a.say("b", replace(good, head=""))
    assert a.peer.head == body.head


# What the genesis says


def test_the_state_that_most_founders_offer_is_the_one():
    other = replace(OFFER, anchor=digest("another"))
    body = genesis_of(SETTINGS, {"a": (-1, OFFER), "b": (-1, other), "c": (-1, OFFER)}, 0)
    assert body.anchor == OFFER.anchor


def test_of_states_that_equally_many_offer_all_founders_choose_the_same():
    other = replace(OFFER, anchor=digest("another"))
    one = genesis_of(SETTINGS, {"a": (-1, OFFER), "b": (-1, other)}, 0)
    again = genesis_of(SETTINGS, {"b": (-1, other), "a": (-1, OFFER)}, 0)
    assert one == again
    assert one.anchor == min(OFFER.anchor, other.anchor)


CHECKPOINT = chain_of(genesis("abc"), "abc", 7)[-1]


def offer_of(certificate: Certificate) -> Offer:
    body = certificate.body
    return Offer(anchor=body.anchor, momentum=body.momentum, certificate=certificate)


def test_founders_that_come_from_a_checkpoint_go_on_from_it():
    trained = offer_of(CHECKPOINT)
    body = genesis_of(SETTINGS, {"a": (-1, trained), "b": (-1, trained), "c": (-1, OFFER)}, 0)
    plan = body.plan
    assert (plan.epoch, plan.parent) == (7, CHECKPOINT.head)
    assert (plan.data_base, plan.tokens) == (CHECKPOINT.plan.data_base, CHECKPOINT.plan.tokens)
    assert (body.anchor, body.momentum) == (CHECKPOINT.body.anchor, CHECKPOINT.body.momentum)


def test_founders_keep_the_ranks_they_claim_and_the_others_take_the_lowest_free():
    claimed = {"a": (-1, OFFER), "b": (4, OFFER), "c": (0, OFFER), "d": (4, OFFER), "e": (-1, OFFER)}
    body = genesis_of(SETTINGS, claimed, 0)
    ranks = {member.peer_id: member.world_rank for member in body.plan.roster}
    assert ranks == {"c": 0, "b": 4, "d": 1, "a": 2, "e": 3}
    assert list(ranks.values()) == sorted(ranks.values()) or list(ranks) == ["c", "d", "a", "e", "b"]


def test_a_founder_with_another_state_than_the_genesis_fetches_it_from_the_others():
    c = Driven("c", settings=with_settings(galaxy_size=3), has_worker=False)
    c.feed(events.StateOffered(replace(OFFER, anchor=digest("own"))))
    c.feed(events.WorkerWaits())
    c.announce(genesis("abc"), "ab")
    c.run(5)
    (fetch,) = c.of(effects.Fetch)
    assert fetch.path[-1] == genesis("abc")
    made = c.fetched()
    assert [answer.how for answer in c.of(effects.Answer, made)] == ["begin"]


def test_founders_that_have_waited_long_for_the_last_one_still_wait_for_each_other():
    # Epochs are so short that one is over before the others have announced that they train.
    swarm = Swarm("ab", settings=with_settings(galaxy_size=3), train_s=0.001)
    swarm.run(60)
    swarm.start("c")
    assert swarm.reach(1, 20)
    assert sorted(swarm["a"].machine.certificate.plan.signers) == ["a", "b", "c"]


def test_two_strangers_that_announce_huge_attempts_neither_end_a_founder_nor_use_up_its_attempts():
    a = Driven("a")
    a.announce(None, "yz", "waiting", offer=OFFER)
    a.announce(None, "yz", "waiting", offer=OFFER, attempt=MAX_ATTEMPT)
    a.run(5)
    assert 0 < a.of(Status)[-1].attempt < 1000


def test_a_founder_that_has_signed_at_the_last_attempt_says_nothing_that_others_cannot_read():
    a = Driven("a", pledges={NO_HEAD: MAX_ATTEMPT})
    assert decode_message(encode(a.of(Status)[-1])).attempt == MAX_ATTEMPT


def connected_to_a_silent_peer() -> Driven:
    a = Driven("a", settings=with_settings(galaxy_size=1), has_worker=False)
    a.feed(events.Connected("z"))
    a.feed(events.StateOffered(OFFER))
    a.feed(events.WorkerWaits())
    return a


def test_a_peer_that_never_sends_a_status_holds_no_founding_up_whatever_else_it_sends():
    a = connected_to_a_silent_peer()
    for _ in range(20):
        a.run(1)
        a.say("z", Ask(head=digest("any")))
    assert a.peer.head


def test_proposals_of_peers_that_are_no_founders_are_not_kept():
    a = Driven("a")
    a.announce(genesis("z"), "z")
    body = genesis_of(SETTINGS, {"a": (-1, OFFER), "z": (-1, OFFER)}, 0)
    for sender in "xz":
        a.say(sender, Found(body=body))
    assert not a.of(Vote)
    assert not a.peer._founding._proposals


@pytest.mark.parametrize("has_heard_of_them", [False, True])
def test_peers_that_connect_without_end_and_say_nothing_hold_no_founding_up(has_heard_of_them):
    a = connected_to_a_silent_peer()
    for number in range(60):
        a.run(1)
        a.feed(events.StillHere(frozenset("z")) if has_heard_of_them else events.Connected(f"z{number}"))
    assert a.peer.head
