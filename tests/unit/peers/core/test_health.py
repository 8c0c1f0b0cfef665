"""Which peers are live, and which are healthy, by one peer's own evidence."""

from __future__ import annotations

import random

import pytest

from peers.core.health import FADE_EPOCHS, STRIKES, Swarm
from peers.core.timing import REGAIN, ROUND_TRIPS, SILENT_BEATS, Timing
from peers.core.turn import Turn
from peers.protocol.messages import Offer
from peers.timing import BEAT_S
from tests.unit.peers.core.made import SETTINGS, commit, digest, genesis, status

SILENCE_S = SILENT_BEATS * BEAT_S
REGAIN_S = REGAIN * SILENCE_S
HEAD = genesis("ab")


def a_swarm(*names: str) -> Swarm:
    swarm = Swarm(Timing.of(SETTINGS))
    for name in names:
        swarm.heard(name, status(HEAD), 0.0)
    swarm.head_moved(0.0, HEAD.head, 0, (), is_first=True)
    return swarm


def look(swarm: Swarm, now: float) -> float:
    """Notice silent peers. Returns the time of the next check."""
    turn = Turn(now)
    swarm.notice_silence(turn)
    return turn.deadline


def test_a_peer_is_there_until_it_has_been_silent_for_some_heartbeats():
    swarm = a_swarm("b")
    assert look(swarm, 0.1) == pytest.approx(SILENCE_S)
    look(swarm, SILENCE_S - 0.1)
    assert swarm.is_live("b")
    look(swarm, SILENCE_S)
    assert not swarm.is_live("b")
    assert [name for name, _ in swarm.live()] == []


def test_whom_the_mesh_has_not_lost_is_not_silent_and_whom_it_has_lost_does_not_come_back_by_that():
    swarm = a_swarm("b", "c")
    look(swarm, SILENCE_S - 0.1)
    swarm.still_here({"b", "a stranger"}, SILENCE_S - 0.1)
    look(swarm, SILENCE_S)
    assert (swarm.is_live("b"), swarm.is_live("c")) == (True, False)
    swarm.still_here({"b", "c"}, SILENCE_S)
    look(swarm, SILENCE_S + 0.1)
    assert (swarm.is_live("b"), swarm.is_live("c")) == (True, False)


def test_who_has_sent_a_status_was_heard_also_once_it_is_gone():
    swarm = a_swarm("b")
    swarm.expect("c", 0.0)
    assert [(swarm.was_heard(name), swarm.is_here(name)) for name in "bcz"] == [
        (True, True),
        *[(False, False)] * 2,
    ]
    look(swarm, SILENCE_S + REGAIN_S)
    assert [(swarm.was_heard(name), swarm.is_here(name)) for name in "bc"] == [(True, False), (False, False)]


@pytest.mark.parametrize("seed", range(20))
def test_live_peers_by_head_are_those_that_one_finds_by_going_through_all(seed):
    rng, swarm, now = random.Random(seed), a_swarm(), 0.0
    heads, phases = (HEAD, commit(HEAD, "a"), None), ("training", "ready", "waiting", "fetching", "leaving")
    for sequence in range(2, 300):
        now += rng.uniform(0.0, 0.4)
        name = rng.choice("abcdefgh")
        match rng.randrange(6):
            case 0 | 1:
                swarm.heard(name, status(rng.choice(heads), rng.choice(phases), sequence=sequence), now)
            case 2:
                swarm.heard(name, None, now)
            case 3:
                swarm.disconnected(name, now)
            case 4:
                swarm.expect(name, now)
            case _:
                look(swarm, now)
        known = {n: health.status for n, health in swarm._peers.items() if health.is_live}
        assert dict(swarm.live()) == known
        by_head = {said.head: {n for n in known if known[n].head == said.head} for said in known.values()}
        assert {head: set(swarm.live_at(head)) for head in swarm.heads} == by_head


def test_a_silent_peer_is_gone_only_after_it_has_had_its_time_to_come_back():
    swarm = a_swarm("b")
    look(swarm, SILENCE_S)
    assert not swarm.is_gone("b")
    look(swarm, SILENCE_S + REGAIN_S - 0.1)
    assert not swarm.is_gone("b")
    look(swarm, SILENCE_S + REGAIN_S)
    assert swarm.is_gone("b")


def test_anything_that_a_peer_says_brings_it_back():
    swarm = a_swarm("b")
    look(swarm, 10 * SILENCE_S)
    swarm.heard("b", None, 10 * SILENCE_S)
    look(swarm, 10 * SILENCE_S)
    assert swarm.is_live("b")
    assert not swarm.is_gone("b")


def test_a_broken_channel_is_a_loss_at_once_and_does_not_make_it_gone():
    swarm = a_swarm("b")
    swarm.disconnected("b", 1.0)
    look(swarm, 1.1)
    assert not swarm.is_live("b")
    assert not swarm.is_gone("b")
    look(swarm, 1.0 + REGAIN_S)
    assert swarm.is_gone("b")


def test_who_says_that_it_leaves_is_neither_there_nor_waited_for():
    swarm = a_swarm("b", "c")
    swarm.heard("b", status(HEAD, "leaving", sequence=2), 1.0)
    assert not swarm.is_live("b")
    assert swarm.is_gone("b")
    assert swarm.has_left("b")
    assert not swarm.has_left("c")


def test_a_member_that_was_never_heard_has_its_time_and_is_gone_after_it():
    swarm = a_swarm()
    swarm.expect("b", 5.0)
    look(swarm, 5.0)
    assert not swarm.is_gone("b")
    look(swarm, 5.0 + SILENCE_S)
    look(swarm, 5.0 + SILENCE_S + REGAIN_S)
    assert swarm.is_gone("b")
    assert not swarm.is_gone("a stranger")


def test_an_older_status_that_comes_late_changes_nothing():
    swarm = a_swarm("b")
    assert swarm.heard("b", status(HEAD, "ready", sequence=5), 1.0)
    assert not swarm.heard("b", status(HEAD, "training", sequence=4), 1.1)
    assert not swarm.heard("b", status(HEAD, "training", sequence=5), 1.1)
    assert swarm.status("b").phase == "ready"


def test_a_restarted_peer_counts_anew_and_its_former_self_is_heard_no_more():
    swarm = a_swarm("b")
    swarm.heard("b", status(HEAD, sequence=90), 1.0)
    again = status(HEAD, "waiting")
    again = type(again)(incarnation=7, sequence=1, world_rank=-1, phase="waiting")
    assert swarm.heard("b", again, 2.0)
    assert not swarm.heard("b", status(HEAD, sequence=91), 2.1)
    assert swarm.status("b") == again


def test_nobody_has_been_silent_while_this_peer_itself_was_frozen():
    swarm = a_swarm("b")
    swarm.excuse_own_freeze(100.0)
    look(swarm, 100.0 + SILENCE_S / 2)
    assert swarm.is_live("b")
    look(swarm, 100.0 + SILENCE_S)
    assert not swarm.is_live("b")


def test_who_was_lost_before_a_freeze_is_no_more_lost_after_it():
    swarm = a_swarm("b")
    swarm.disconnected("b", 1.0)
    swarm.excuse_own_freeze(100.0)
    look(swarm, 101.1)
    assert not swarm.is_gone("b")


def test_a_peer_that_spoils_rounds_is_left_out_for_a_while():
    swarm = a_swarm("b")
    for _ in range(int(STRIKES) - 1):
        assert not swarm.strike("b", 10)
    assert not swarm.is_left_out("b", 10)
    assert swarm.strike("b", 10)
    assert swarm.is_left_out("b", 10)
    assert swarm.is_left_out("b", 13)
    assert not swarm.is_left_out("b", 14)


def contributes(swarm: Swarm, peer_id: str, epoch: int) -> None:
    swarm.head_moved(float(epoch), HEAD.head, epoch, {peer_id}, is_first=False)


def test_strikes_of_those_who_contribute_fade_also_those_of_the_first_epoch():
    for first in (0, 10):
        swarm = a_swarm("b")
        for _ in range(2):
            swarm.strike("b", first, 0.9)
        contributes(swarm, "b", first + 2 * FADE_EPOCHS)
        assert not swarm.strike("b", first + 2 * FADE_EPOCHS)
        assert not swarm.is_left_out("b", first + 2 * FADE_EPOCHS)


def test_one_strike_now_and_then_leaves_nobody_out_who_contributes():
    swarm = a_swarm("b")
    for epoch in range(0, 40 * FADE_EPOCHS, FADE_EPOCHS):
        assert not swarm.strike("b", epoch)
        contributes(swarm, "b", epoch + FADE_EPOCHS)


def test_who_only_spoils_attempts_is_left_out_however_seldom_it_does():
    swarm = a_swarm("b")
    epochs = range(0, 8 * FADE_EPOCHS, 2 * FADE_EPOCHS)
    assert [swarm.strike("b", epoch, 0.5) for epoch in epochs] == [False, False, False, True]


def test_who_spoils_the_next_round_whenever_it_is_back_is_left_out_for_longer_each_time():
    swarm, epoch, lengths = a_swarm("b"), 10, []
    for _ in range(3):
        swarm.strike("b", epoch)
    for _ in range(4):
        back = next(at for at in range(epoch, epoch + 10_000) if not swarm.is_left_out("b", at))
        lengths.append(back - epoch)
        epoch = back
        swarm.strike("b", epoch)
    assert lengths == sorted(set(lengths))


def test_strikes_do_not_grow_when_a_fork_is_lost_and_the_epoch_goes_back():
    swarm = a_swarm("b")
    swarm.strike("b", 100, STRIKES / 3)
    swarm.strike("b", 60, STRIKES / 3)
    assert not swarm.is_left_out("b", 60)


def test_nobody_is_struck_who_was_never_heard():
    swarm = a_swarm()
    assert not swarm.strike("b", 1, 100.0)
    assert not swarm.is_left_out("b", 1)


def test_a_newcomer_is_heard_though_thousands_have_come_and_gone():
    swarm = a_swarm()
    for n in range(4100):
        swarm.heard(f"gone {n}", status(HEAD), 0.0)
    look(swarm, 5.0)
    look(swarm, 1e4)
    swarm.heard("n", status(HEAD), 1e4)
    assert swarm.is_live("n")
    assert len(swarm._peers) <= 4096


def test_strangers_slow_down_nobodys_heartbeat():
    """Others would lose a peer again and again if its heartbeat were slower than they expect."""
    timing = Timing.of(SETTINGS)
    swarm = Swarm(timing)
    swarm.roster = frozenset("ab")
    swarm.heard("b", status(HEAD), 0.0)
    look(swarm, 0.1)
    before = timing.beat_s, timing.silence_s
    for n in range(200):
        swarm.heard(f"stranger {n}", status(None, "waiting"), 0.2)
        swarm.measured(f"stranger {n}", 900.0)
    look(swarm, 0.3)
    assert (timing.beat_s, timing.silence_s) == before


def test_the_round_trip_is_the_median_of_those_that_are_known():
    timing = Timing.of(SETTINGS)
    swarm = Swarm(timing)
    swarm.roster = frozenset("abcdefg")
    for peer_id in "bcdefg":
        swarm.heard(peer_id, status(HEAD), 0.0)
    # In a large swarm, a peer has channels to only a few others.
    swarm.measured("b", 0.4)
    swarm.measured("c", 0.5)
    swarm.measured("d", 60.0)
    look(swarm, 0.1)
    assert (timing.num_peers, timing.round_trip_s) == (7, 0.5)
    assert timing.silence_s == ROUND_TRIPS * 0.5


@pytest.mark.parametrize("phase", ["training", "fetching"])
def test_a_peer_that_was_lost_where_this_one_comes_to_has_its_time_to_be_back(phase):
    """Also if it fetches another state there: until it has moved, it may still take part in the next commit."""
    swarm, ahead = a_swarm("b"), commit(HEAD, "b")
    look(swarm, 1.0)
    # `b` is one commit ahead for long; then it is lost, and this peer arrives at the head where `b` stood.
    swarm.heard("b", status(ahead, phase, sequence=2), 1.5)
    for now in range(2, 31):
        swarm.heard("b", None, float(now))
        look(swarm, float(now))
    assert swarm.is_off_head("b", Turn(30.0))
    swarm.disconnected("b", 30.0)
    swarm.head_moved(31.0, ahead.head, 1, (), is_first=False)
    assert not swarm.is_off_head("b", Turn(31.0))
    assert not swarm.is_gone("b")


@pytest.mark.parametrize(("roster", "is_off"), [("bc", False), ("bcd", False), ("bcde", True)])
def test_a_majority_that_signed_the_head_that_this_peer_comes_to_is_not_taken_for_one_that_was_elsewhere(
    roster, is_off
):
    """The majority may already have left that head, by a commit that this peer does not know yet."""
    swarm, ahead = a_swarm("b", "c"), commit(HEAD, "bc")
    for now in range(1, 31):
        for name in "bc":
            swarm.heard(name, status(commit(ahead, "bc"), sequence=1 + now), float(now))
        look(swarm, float(now))
    assert swarm.is_off_head("b", Turn(30.0))
    swarm.roster = frozenset(roster)
    swarm.head_moved(31.0, ahead.head, 1, {"b", "c"}, is_first=False)
    assert swarm.is_off_head("b", Turn(31.0)) == swarm.is_off_head("c", Turn(31.0)) == is_off


def test_many_offers_of_one_peer_cost_one_check_per_silence_time():
    swarm, checked = a_swarm("b"), []

    def is_sound(now: float, offer: Offer) -> bool:
        return swarm.is_sound("b", offer, lambda offer: not checked.append(offer), now)

    one, other = (Offer(anchor=digest(name), momentum=digest(name)) for name in ("one", "other"))
    assert [is_sound(0.01 * beat, offer) for beat in range(100) for offer in (one, other)] == [
        True,
        False,
    ] * 100
    assert is_sound(SILENCE_S, other)
    assert checked == [one, other]
