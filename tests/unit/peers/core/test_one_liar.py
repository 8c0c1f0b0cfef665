"""One member that lies, or a stranger with no more than a channel, costs the others time and nothing else.

Each of these once stopped a swarm for good, split it, or slowed it without bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import count

import pytest
from msgspec.structs import replace

from peers.core import effects
from peers.core.chain import MAX_OWN
from peers.core.peer import MAX_PLEDGES
from peers.protocol.certificates import Body, Certificate, Plan
from peers.protocol.messages import Abort, Certificates, Decline, Message, Propose, Status, Vote
from tests.support.exhaustive import exhaustive_but
from tests.unit.peers.core.driven import Driven
from tests.unit.peers.core.made import Keys, commit, digest, genesis, vote_of, work
from tests.unit.peers.core.swarm import Node, Swarm, founded
from tests.unit.peers.core.test_round_hostile import led_by_another, plan_at, reduced

Tamper = Callable[[str, str, Message], Message | None]


def assert_they_go_on(swarm: Swarm, honest: str, *, epochs: int, seconds: float) -> None:
    """Within `seconds` the honest peers make at least `epochs` commits, on one chain, and lose none of them."""
    before = min(swarm[name].machine.epoch for name in honest)
    swarm.run(seconds)
    reached = [swarm[name].machine.epoch for name in honest]
    assert min(reached) >= before + epochs
    assert max(reached) - min(reached) <= 1
    assert not any(swarm[name].forks for name in honest)


def say_for_ever(swarm: Swarm, sender: str, status_for: Callable[[Node], Status]) -> None:
    """Have the stranger `sender` send statuses to every live peer, without end."""
    sequence = count(1)

    def beat() -> None:
        for node in swarm.live.values():
            if node.machine.round is not None:
                swarm.say(sender, node.peer_id, replace(status_for(node), sequence=next(sequence)))
        swarm.at(swarm.now + 0.2, beat)

    beat()


@pytest.mark.parametrize("names", exhaustive_but(("abcde",), ["abcd", "abcde", "abcdef"]))
@pytest.mark.parametrize("accuses", [True, False])
def test_one_that_never_votes_or_declines_and_names_others_each_time(names, accuses):
    swarm, liar, turn = founded(names), names[-1], count()

    def tamper(sender: str, to: str, message: Message) -> Message | None:
        if sender == liar and isinstance(message, Vote):
            others = [name for name in names if name not in (liar, to)]
            n = next(turn)
            suspect, accuser = others[n % len(others)], others[(n + 1) % len(others)]
            decline = Decline(
                head=message.head,
                attempt=message.attempt,
                reason="lost it",
                suspects=(suspect,),
                told_by=(accuser,),
            )
            return decline if accuses else None
        return None if sender == liar and isinstance(message, Propose) else message

    swarm.tamper = tamper
    assert_they_go_on(swarm, names[:-1], epochs=25, seconds=300)


@pytest.mark.parametrize("names", ["abcd", "abcde"])
@pytest.mark.parametrize("declines", [False, True])
def test_a_leader_that_says_it_has_lost_everybody_else(names, declines):
    swarm, liar, honest = founded(names), names[-1], names[:-1]

    def tamper(sender: str, to: str, message: Message) -> Message | None:
        if sender == liar and isinstance(message, Propose):
            plan = message.plan
            lost = tuple(name for name in honest if name != to)
            abort = Abort(head=plan.parent, attempt=plan.attempt, reason="lost them", lost=lost)
            swarm.at(swarm.now + 0.05, lambda: swarm.say(liar, to, abort))
        if declines and sender == liar and isinstance(message, Vote):
            return Decline(head=message.head, attempt=message.attempt, reason="no")
        return message

    swarm.tamper = tamper
    assert_they_go_on(swarm, honest, epochs=110, seconds=600)
    if len(names) > 4:
        # Half a strike fades before the liar leads again. Among four it leads too often for that.
        assert not any(swarm[name].machine.swarm._struck & set(honest) for name in honest)


@pytest.mark.parametrize("names", ["abc", "abcd", "abcde"])
def test_a_leader_that_says_it_has_lost_one_member_each_time_it_leads_does_not_have_it_left_out(names):
    swarm, liar, victim = founded(names), names[-1], names[1]

    def tamper(sender: str, to: str, message: Message) -> Message:
        if sender == liar and isinstance(message, Propose):
            plan = message.plan
            return Abort(head=plan.parent, attempt=plan.attempt, reason="lost it", lost=(victim,))
        return message

    swarm.tamper = tamper
    swarm.run(400)
    made = committed(swarm["a"])
    assert len(made) > 50
    assert sum(victim in certificate.plan.signers for certificate in made) > 0.7 * len(made)
    assert not swarm["a"].machine.swarm.term(victim)


@pytest.mark.parametrize("phase", ["waiting", "ready"])
def test_a_stranger_that_tells_each_member_another_world_rank(phase):
    swarm = founded("abcd")

    def status_for(node: Node) -> Status:
        peer, round_ = node.machine, node.machine.round
        leads = round_.leader_of(round_.attempt) == node.peer_id
        mine = work(based_on=peer.epoch) if phase == "ready" else None
        return Status(
            incarnation=1,
            sequence=0,
            world_rank=1023 if leads else 41,
            phase=phase,
            head=peer.head,
            epoch=peer.epoch,
            work=mine,
        )

    say_for_ever(swarm, "z", status_for)
    swarm.run(30)
    swarm.start("n")
    # Where the stranger claims to be ready, its first attempt on each head fails.
    assert_they_go_on(swarm, "abcd", epochs=20, seconds=300)
    taken_in = ["n" in c.plan.signers for c in committed(swarm["a"])]
    assert sum(taken_in) >= 10


@pytest.mark.parametrize("names", exhaustive_but(("abcd",), ["abcd", "abcde"]))
def test_one_that_votes_at_once_and_then_slows_everybody_down(names):
    swarm, liar = founded(names), names[-1]
    swarm.reductions.reduce_s = (1.0, 1.0)

    def tamper(sender: str, to: str, message: Message) -> Message:
        if to == liar and isinstance(message, Propose):
            vote = vote_of(liar, Body(plan=message.plan, anchor=digest("made"), momentum=digest("up")))
            swarm.at(swarm.now + 0.02, lambda: swarm.say(liar, sender, vote))
        return message

    swarm.tamper, swarm[liar].slowness = tamper, 15.0
    assert_they_go_on(swarm, names[:-1], epochs=18, seconds=300)


@pytest.mark.parametrize("names", exhaustive_but(("abcde",), ["abcd", "abcde", "abcdef"]))
def test_an_owner_of_a_share_that_sends_other_bits_to_just_as_many_as_make_a_tie(names):
    swarm, liar = founded(names), names[-1]

    def garbles(name: str, plan: Plan) -> bool:
        victims = [signer for signer in plan.signers if signer != liar][: max(1, len(plan.signers) // 2 - 1)]
        return liar in plan.signers and name in (*victims, liar)

    swarm.garbles = garbles
    assert_they_go_on(swarm, names[:-1], epochs=8, seconds=300)


def test_one_that_votes_as_late_as_it_may_does_so_no_later_each_time():
    swarm, liar = founded("abcde"), "e"

    def tamper(sender: str, to: str, message: Message) -> Message | None:
        if sender != liar or not isinstance(message, Vote):
            return message

        def later() -> None:
            lead = swarm[to].machine.round._lead
            if lead is None or lead.plan.digest != message.plan:
                return
            if len(lead.votes) < len(lead.plan.signers) - 1 or swarm.now < lead.deadline - 0.6:
                swarm.at(swarm.now + 0.1, later)
            else:
                swarm.say(liar, to, message)

        swarm.at(swarm.now + 0.2, later)
        return None

    swarm.tamper = tamper
    assert_they_go_on(swarm, "abcd", epochs=30, seconds=300)
    assert_they_go_on(swarm, "abcd", epochs=30, seconds=300)


@pytest.mark.parametrize("who", ["a stranger", "a member"])
def test_one_that_says_it_trains_and_is_never_ready_is_not_waited_for_longer_and_longer(who):
    swarm = founded("abcde")
    usual = epochs_in(swarm, 300)
    if who == "a stranger":
        say_for_ever(
            swarm,
            "z",
            lambda node: Status(
                incarnation=1,
                sequence=0,
                world_rank=-1,
                phase="training",
                head=node.machine.head,
                epoch=node.machine.epoch,
            ),
        )
    else:

        def tamper(sender: str, to: str, message: Message) -> Message | None:
            if sender == "e" and isinstance(message, Status) and message.phase == "ready":
                return replace(message, phase="training", work=None)
            return None if sender == "e" and isinstance(message, Propose) else message

        swarm.tamper = tamper
    swarm.run(300)
    assert epochs_in(swarm, 300) >= 0.75 * usual


@pytest.mark.parametrize("is_preferred", [True, False])
def test_a_commit_that_is_here_waits_for_no_state_that_is_held_back(is_preferred):
    """The peer fetches a rival commit on the same head, whose state nobody sends, when its own certificate arrives."""
    a, leader = led_by_another()
    plan = plan_at(a)
    liar = next(name for name in "bcde" if name != leader)
    a.say(leader, Propose(plan=plan))
    reduced(a, plan)
    body = a.peer.round.voted_result
    rivals = (commit(a.peer.certificate, "abcde", salt=salt) for salt in range(100))
    # Equally many peers have signed each of the two, so the smaller hash decides.
    rival = next(rival for rival in rivals if (body.head < rival.head) == is_preferred)
    a.say(liar, Certificates(head=rival.head, certificates=(rival,)))
    a.announce(rival, [liar])
    a.run(2)
    assert a.peer.catch_up.target == rival
    certificate = Certificate(body=body, signatures=tuple(Keys(n).sign(body.signed_bytes) for n in "abcde"))
    made = a.say(leader, Certificates(head=certificate.head, certificates=(certificate,)))
    assert bool(a.of(effects.Apply, made)) == is_preferred
    assert (a.peer.catch_up.target is None) == is_preferred


def test_what_strangers_have_signed_on_this_peers_head_is_not_even_checked():
    checked: list[str] = []
    swarm = founded("abc")
    verify = swarm["a"].machine._verify

    def counted(peer_id: str, payload: bytes, signature: object) -> bool:
        checked.append(peer_id)
        return verify(peer_id, payload, signature)

    swarm["a"].machine._verify = counted
    head = swarm["a"].machine.certificate
    sybils = [f"z{n}" for n in range(200)]
    for signers in (sybils, [*sybils, "b"]):
        crowd = commit(head, signers)
        swarm.say("z", "a", Certificates(head=crowd.head, certificates=(crowd,)))
    assert checked == []
    # If it falsely names a majority, their forged signatures are checked before the crowd's.
    crowd = commit(head, [*sybils, "a", "b"])
    forged = tuple(Keys("z").sign(b"") if p in "ab" else s for p, s in signatures(crowd))
    crowd = Certificate(body=crowd.body, signatures=forged)
    swarm.say("z", "a", Certificates(head=crowd.head, certificates=(crowd,)))
    assert len(checked) == 1


def signatures(certificate: Certificate) -> Collection[tuple[str, object]]:
    return list(zip(certificate.plan.signers, certificate.signatures, strict=True))


def committed(node: Node) -> list[Certificate]:
    return [apply.certificate for apply in node.effects(effects.Apply)]


def epochs_in(swarm: Swarm, seconds: float) -> int:
    before = len(swarm["a"].commits)
    swarm.run(seconds)
    return len(swarm["a"].commits) - before


def test_who_went_on_alone_goes_back_to_where_most_stand_and_need_it():
    """One of four was cut off and committed alone; one of the other three spoils each of their attempts."""
    swarm, liar = founded("abcd"), "d"
    swarm.tamper = lambda sender, to, message: (
        None if sender == liar and isinstance(message, Vote | Propose) else message
    )
    swarm.partition("a", "bcd")
    swarm.run(60)
    alone, together = swarm["a"].machine.epoch, swarm["b"].machine.epoch
    assert alone > together + 2
    swarm.heal_partition("a", "bcd")
    assert swarm.run_until(lambda: min(swarm[name].machine.epoch for name in "abc") >= together + 3, 120)
    assert [tell.fields for tell in swarm["a"].forks] == [{"commits": alone - together}]
    assert not swarm["b"].forks + swarm["c"].forks


@pytest.mark.parametrize("names", exhaustive_but(("abcde",), ["abcd", "abcde", "abcdef"]))
def test_one_that_keeps_its_results_and_says_that_it_waits_for_another(names):
    """Each member's reduction times out and suspects another member, on the liar's word."""
    swarm, liar, turn = founded(names), names[-1], count()

    def reduces(name: str, plan: Plan) -> tuple[str, frozenset[str], frozenset[str]] | None:
        if liar not in plan.signers or name == liar:
            return None
        others = [other for other in plan.signers if other not in (liar, name)]
        named = others[next(turn) % len(others)] if others else liar
        return "took too long", frozenset({named}), frozenset({liar}) if others else frozenset()

    swarm.reduces = reduces
    assert_they_go_on(swarm, names[:-1], epochs=25, seconds=400)


@pytest.mark.parametrize("seconds", [60, 75, 90, 120, 180])
def test_two_sides_do_not_change_places_while_one_spoils_every_attempt(seconds):
    """Two of five went on alone; two others have left the liar out, so that both sides seem equally large."""
    swarm, liar = founded("abcde"), "d"
    swarm.tamper = lambda sender, to, message: (
        None if sender == liar and isinstance(message, Vote | Propose) else message
    )
    swarm.partition("ae", "bcd")
    swarm.run(seconds)
    swarm.heal_partition("ae", "bcd")
    together = swarm["b"].machine.epoch
    # How long it takes depends on whom the heads make the leaders, by chance.
    assert swarm.run_until(lambda: min(swarm[name].machine.epoch for name in "abce") >= together + 3, 150)
    assert max(len(swarm[name].forks) for name in "abce") <= 1


def test_nobody_goes_back_from_what_most_have_signed_though_one_of_them_says_that_it_stands_before_it():
    start = genesis("abcde")
    head = commit(start, "abcde")
    alone = commit(head, "ae", salt="alone")
    most = commit(alone, "abe", salt="more")
    peer = Driven.at(start, "bcde")
    peer.come_to([head], "bcde")
    peer.know([alone, most])
    peer.announce(most, "eb")
    peer.hush("cd")
    for _ in range(10):
        peer.run(3)
        if peer.peer.catch_up.target is not None:
            peer.fetched()
    assert peer.peer.head == most.head
    before = len(peer.effects)
    peer.announce(head, "bcd")
    peer.run(2)
    assert not [effect for effect in peer.effects[before:] if isinstance(effect, effects.Fetch)]


def test_where_others_stood_before_a_link_broke_sends_nobody_back():
    swarm = founded("abcde")
    swarm.partition("ae", "bcd")
    swarm.run(75)
    gone_on, before = swarm["b"].machine.epoch, len(swarm["a"].done)
    # Channels are open again a moment before any peer has announced its head.
    swarm.heal_partition("ae", "bcd")
    swarm.run(60)
    fetched = [effect for _, effect in swarm["a"].done[before:] if isinstance(effect, effects.Fetch)]
    assert fetched and all(effect.path[-1].plan.epoch >= gone_on for effect in fetched)


def test_a_pledge_is_kept_for_every_head_that_a_peer_may_go_back_to():
    swarm = founded("abcd")
    swarm.run(6)
    for name in "bcd":
        swarm[name].hang()
    swarm.run(20)
    head = swarm["b"].machine.head
    swarm.partition("a", "bcd")
    swarm.run(400)
    assert swarm["a"].machine.epoch > swarm["b"].machine.epoch + 64
    assert MAX_PLEDGES > MAX_OWN
    swarm.heal_partition("a", "bcd")
    swarm.run(20)
    assert swarm["a"].machine.head == head
