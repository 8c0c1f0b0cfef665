"""Every waiting time is derived from measurements, and every one is bounded."""

from __future__ import annotations

import math

import pytest

from peers.core.timing import (
    ENOUGH_ROUNDS,
    FETCH_S,
    FIRST_GRACE_S,
    LEAST_ROUND_S,
    PATIENCE,
    PATIENCE_BEATS,
    REGAIN,
    ROUND_TRIPS,
    SHARED_BY,
    SILENT_BEATS,
    SLOWEST_LINK,
    SLOWEST_PEER,
    STREAMS_S,
    Timing,
)
from peers.core.weights import Aggregation
from peers.net.states.server import MAX_DOWNLOADS
from peers.timing import BEAT_PEERS, BEAT_S, FULL_MESH, STALL_S
from tests.unit.peers.core.made import with_settings


def a_timing(**settings) -> Timing:
    return Timing.of(with_settings(**settings))


def learned(epochs: float = 60.0, gathers: float = 2.0, rounds: float = 3.0, **settings) -> Timing:
    timing = a_timing(**settings)
    for _ in range(16):
        timing.gathered(gathers, gathers, complete=True)
        timing.committed(round_s=rounds, epoch_s=epochs + gathers)
    return timing


def test_before_anything_is_known_waiting_times_are_those_of_few_peers_nearby():
    timing = a_timing()
    assert timing.beat_s == BEAT_S
    assert timing.silence_s == SILENT_BEATS * BEAT_S
    assert timing.regain_s == REGAIN * timing.silence_s
    assert timing.reaction_s == 2 * BEAT_S
    assert timing.attempt_s == LEAST_ROUND_S
    assert timing.prompt_s == STREAMS_S
    assert timing.fetch_timeout_s == FETCH_S


def test_more_peers_say_their_status_more_rarely_and_are_given_as_many_beats():
    timing = a_timing()
    timing.num_peers = 3 * BEAT_PEERS
    assert timing.beat_s == timing.status_s == 3 * BEAT_S
    assert timing.silence_s == SILENT_BEATS * 3 * BEAT_S


def test_however_many_peers_there_are_each_has_few_channels_and_a_loss_is_noticed_as_soon():
    timing = a_timing()
    timing.num_peers = FULL_MESH
    at_full_mesh = timing.silence_s
    timing.num_peers = 1000
    assert timing.silence_s == at_full_mesh <= 12.0
    assert timing.status_s == 1000 / BEAT_PEERS * BEAT_S
    assert timing.reaction_s == STALL_S < timing.status_s


@pytest.mark.parametrize(
    ("num_peers", "rule", "seconds"),
    [
        (BEAT_PEERS, "mean", STREAMS_S),
        (FULL_MESH, "mean", STREAMS_S * FULL_MESH / BEAT_PEERS),
        # Among so many, one hears of the attempt STALL_S later than another.
        (200, "mean", STREAMS_S + STALL_S),
        (900, "mean", STREAMS_S * 60 / BEAT_PEERS),
        (200, "trimmed-mean", STREAMS_S * 200 / BEAT_PEERS),
    ],
)
def test_opening_takes_as_long_as_the_streams_that_a_member_has(num_peers, rule, seconds):
    timing = a_timing(aggregation=Aggregation(rule=rule))
    timing.num_peers = num_peers
    assert timing.connect_s == seconds


def test_far_peers_are_given_round_trips():
    timing = a_timing()
    timing.round_trip_s = 2.0
    assert timing.silence_s == timing.reaction_s == ROUND_TRIPS * 2.0


def test_the_first_round_and_a_fetch_are_given_time_for_their_bytes():
    timing = a_timing()
    timing.set_sizes(fragment_bytes=10**9, state_bytes=4 * 10**9)
    assert timing.attempt_s == pytest.approx(2 * 10**9 / SLOWEST_LINK)
    assert timing.fetch_timeout_s == pytest.approx(FETCH_S + SHARED_BY * 4 * 10**9 / SLOWEST_LINK)


def test_newcomers_that_fill_the_places_of_a_donor_with_a_slow_link_all_receive_the_state():
    timing, state_bytes = a_timing(), 10**9
    timing.set_sizes(fragment_bytes=state_bytes // 2, state_bytes=state_bytes)
    assert timing.fetch_timeout_s > MAX_DOWNLOADS * state_bytes / SLOWEST_LINK


def test_who_has_a_stream_begins_within_a_reaction_and_what_rounds_take_here():
    assert learned(rounds=0.3).prompt_s == pytest.approx(2 * BEAT_S + 0.3)
    assert learned(rounds=60.0).prompt_s == STREAMS_S


def test_an_attempt_takes_a_few_usual_rounds_beside_what_connections_take():
    timing = learned(rounds=10.0, epochs=20.0)
    assert STREAMS_S + 4 * 10.0 < timing.attempt_s < STREAMS_S + 4 * 10.0 + 3 * timing.silence_s
    assert learned(rounds=10.0, attempt_timeout_s=7.0).attempt_s == 7.0


def test_an_attempt_may_take_as_long_as_an_epoch_but_votes_may_not():
    timing = learned(rounds=1.0, epochs=600.0)
    assert timing.attempt_s == 600.0
    assert timing.vote_s == learned(rounds=1.0, epochs=5.0).vote_s < 20.0
    assert learned(rounds=1.0, epochs=600.0, attempt_timeout_s=90.0).attempt_s == 90.0


def test_an_attempt_that_failed_late_makes_the_next_one_longer_up_to_the_first():
    timing = learned(rounds=1.0)
    timing.attempt_failed(0.9)
    lengths = [timing.attempt_s]
    for _ in range(8):
        timing.attempt_failed(0.75 * timing.attempt_s)
        lengths.append(timing.attempt_s)
    assert lengths == sorted(lengths)
    assert lengths[1] > 2 * lengths[0]
    assert timing.usual_round_s == LEAST_ROUND_S


def test_one_slow_round_among_many_changes_nothing():
    timing = learned(rounds=1.0)
    before = timing.attempt_s
    timing.committed(round_s=500.0, epoch_s=60.0)
    assert timing.attempt_s == before


def test_the_first_commits_wait_for_those_whose_models_still_compile():
    assert a_timing().grace_s(5.0) == FIRST_GRACE_S
    assert a_timing().grace_s(300.0) == 300.0
    assert a_timing(grace_s=4.0).grace_s(300.0) == 4.0


def test_the_grace_is_learned_from_how_far_apart_the_peers_are():
    assert learned(gathers=2.0, epochs=60.0).grace_s(60.0) == pytest.approx(6.0)
    assert learned(gathers=20.0, epochs=60.0).grace_s(60.0) == pytest.approx(20.0)
    assert learned(gathers=0.0, epochs=5.0).grace_s(5.0) == pytest.approx(2 * BEAT_S)
    few = a_timing()
    for _ in range(ENOUGH_ROUNDS - 1):
        few.gathered(0.1, 0.1, complete=True)
    assert few.grace_s(1.0) == FIRST_GRACE_S


def test_who_fetches_the_last_commit_is_given_what_a_round_takes():
    timing = learned(rounds=28.0, gathers=2.0, epochs=30.0)
    assert timing.grace_s(30.0) == pytest.approx(3.0)
    assert timing.grace_s(30.0, is_fetching=True) == 28.0


def test_who_has_just_come_waits_as_long_as_the_others_for_a_member_that_is_on_its_way():
    late, members = [250.0], learned(rounds=2.0, gathers=1.0, epochs=600.0)
    fresh = a_timing()
    fresh.committed(round_s=2.0, epoch_s=120.0)
    assert members.grace_s(600.0, due_in_s=late) == fresh.grace_s(600.0, due_in_s=late) > 250.0
    assert members.grace_s(600.0, due_in_s=[301.0]) < 100.0


@pytest.mark.parametrize("most", [0.0, 1.5, 5.0])
def test_the_users_bound_on_the_grace_holds_whatever_was_learned(most):
    assert learned(gathers=20.0, grace_s=most).grace_s(60.0) == most


def test_a_peer_that_takes_many_times_as_long_as_the_others_is_not_waited_for():
    assert learned(gathers=10_000.0, epochs=10.0).grace_s(10.0) == pytest.approx(SLOWEST_PEER * 10.0)


def test_a_member_that_is_never_ready_does_not_make_the_others_wait_ever_longer():
    """The length of an epoch includes the wait, so a wait learned from it must not increase itself."""
    timing, waits = a_timing(), []
    for _ in range(300):
        wait = timing.grace_s(60.0)
        timing.gathered(wait, wait, complete=False)
        timing.committed(round_s=1.0, epoch_s=60.0 + wait)
        waits.append(wait)
    assert max(waits) <= SLOWEST_PEER * 60.0


def test_who_was_left_out_by_little_is_waited_for_a_little_longer_next_time():
    timing = learned(gathers=10.0, epochs=20.0)
    before = timing.grace_s(20.0)
    for _ in range(16):
        timing.gathered(before, before, complete=False)
    assert before < timing.grace_s(20.0) <= 2 * before


def test_without_faults_a_worker_is_given_its_usual_wait_and_a_little_more():
    newcomer, timing = a_timing(), learned()
    assert newcomer.patience_s == newcomer.first_round_s
    for _ in range(ENOUGH_ROUNDS):
        timing.answered(4.0)
    assert timing.patience_s == PATIENCE * 4.0 + PATIENCE_BEATS * timing.beat_s


def test_pauses_between_failures_double_up_to_the_time_of_silence():
    timing = a_timing()
    pauses = [timing.pause_s(failures) for failures in range(12)]
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert pauses[2] == 2 * pauses[1]
    assert pauses[-1] == timing.silence_s
    assert timing.pause_s(10**9) == timing.silence_s


def test_no_waiting_time_is_ever_infinite_or_negative():
    timing = learned()
    for seconds in (0.0, math.inf, 1e15):
        timing.gathered(seconds, seconds, complete=False)
    times = (timing.grace_s(10.0), timing.attempt_s, timing.silence_s, timing.reaction_s, timing.beat_s)
    assert all(0 < seconds < math.inf for seconds in times)
