from __future__ import annotations

import math

from peers.round.deadlines import FIRST_GATHER_S, LEAST_GATHER_S, LEAST_STALL_S, MOST_STALL_S, Deadlines


def after(*gathers: float, epoch_s: float = 20.0, complete: bool = True) -> float:
    deadlines = Deadlines()
    for seconds in gathers:
        deadlines.epoch_took(epoch_s, of_it_round_s=1.0)
        deadlines.gathered(seconds, complete=complete)
    return deadlines.timing(0).gather_s


def test_the_first_rounds_wait_long_and_longer_where_epochs_do():
    assert after() == after(1.0, epoch_s=1.0) == FIRST_GATHER_S
    assert after(1.0, epoch_s=600.0) == 1200.0


def test_in_the_first_round_others_may_be_as_late_as_the_epoch_was_long():
    deadlines = Deadlines()
    assert deadlines.timing(0, epoch_so_far_s=900.0).gather_s == 1800.0
    deadlines.epoch_took(20.0, of_it_round_s=1.0)
    assert deadlines.timing(0, epoch_so_far_s=900.0).gather_s == 40.0


def test_work_of_an_epoch_before_is_kept_for_the_length_of_one():
    deadlines = Deadlines()
    assert deadlines.timing(0).carry_s == FIRST_GATHER_S
    deadlines.epoch_took(600.0, of_it_round_s=1.0)
    assert deadlines.timing(0).carry_s == 1200.0


def test_a_swarm_in_step_is_kept_waiting_for_nobody_who_falls_far_behind():
    assert after(0.1, 0.2, 0.1, 0.2, epoch_s=20.0) == LEAST_GATHER_S
    assert after(0.1, 0.2, 0.1, 0.2, epoch_s=1000.0) == 100.0


def test_a_peer_that_is_always_late_is_waited_for_and_one_late_arrival_changes_little():
    usual = after(100.0, 110.0, 105.0, 95.0, 100.0, epoch_s=600.0)
    assert 110.0 < usual < 200.0
    assert after(100.0, 110.0, 105.0, 95.0, 100.0, 590.0, epoch_s=600.0) < 1.3 * usual


def test_where_peers_are_left_out_again_and_again_the_deadline_grows():
    deadlines = Deadlines()
    seen = []
    for _ in range(24):
        waited = deadlines.timing(0).gather_s
        deadlines.epoch_took(100.0, of_it_round_s=1.0)
        deadlines.gathered(min(waited, 90.0), complete=waited >= 90.0)
        seen.append(waited)
    assert seen[-1] >= 90.0


def test_who_never_comes_does_not_make_each_wait_longer_than_the_one_before():
    deadlines, waited = Deadlines(), []
    for _ in range(24):
        timing = deadlines.timing(0)
        wait_s = min(timing.gather_s, timing.longest_gather_s)
        deadlines.epoch_took(60.0 + wait_s, of_it_round_s=1.0, trained_s=60.0)
        deadlines.gathered(wait_s, complete=False)
        waited.append(wait_s)
    assert waited[-1] == 8 * 60.0 and max(waited[4:]) == 8 * 60.0
    # Members are patient by what they have seen all epochs take.
    assert deadlines.timing(0).gather_s >= 8 * 60.0


def test_who_trains_a_few_times_as_long_is_waited_for():
    deadlines = Deadlines()
    for _ in range(24):
        timing = deadlines.timing(0)
        wait_s = min(timing.gather_s, timing.longest_gather_s)
        waited = min(wait_s, 300.0)
        deadlines.epoch_took(60.0 + waited, of_it_round_s=1.0, trained_s=60.0)
        deadlines.gathered(waited, complete=wait_s >= 300.0)
    assert min(deadlines.timing(0).gather_s, deadlines.timing(0).longest_gather_s) >= 300.0


def test_nobody_judges_others_by_the_part_of_an_epoch_that_it_came_for():
    deadlines = Deadlines()
    deadlines.epoch_took(101.0, of_it_round_s=1.0, trained_s=1.0)
    for _ in range(3):
        # It brought work of an epoch before.
        deadlines.epoch_took(101.0, of_it_round_s=1.0)
    assert deadlines.timing(0).gather_s == 202.0 and deadlines.timing(0).longest_gather_s == math.inf


def test_who_trains_while_it_averages_knows_its_pace_by_all_steps_of_an_epoch():
    deadlines = Deadlines()
    for _ in range(4):
        deadlines.epoch_took(101.0, of_it_round_s=1.0, trained_s=1.0, steps_s=60.0)
    assert deadlines.timing(0).longest_gather_s == 8 * 60.0


def test_silence_ends_an_attempt_the_sooner_the_shorter_rounds_are():
    deadlines = Deadlines()
    assert deadlines.timing(0).stall_s == MOST_STALL_S
    deadlines.epoch_took(20.0, of_it_round_s=0.1)
    assert LEAST_STALL_S < deadlines.timing(0).stall_s < 1.5 * LEAST_STALL_S
    deadlines.attempt_timed_out(60.0)
    assert deadlines.timing(0).stall_s == MOST_STALL_S


def test_flags_bound_what_is_learned():
    assert Deadlines(strategy="NO_WAIT").timing(0).gather_s == 15.0
    given = Deadlines(strategy="NO_WAIT", matchmaking_s=0.0, averaging_timeout_s=7.0)
    assert (given.timing(0).gather_s, given.timing(10**12).attempt_s) == (0.0, 7.0)


def test_an_attempt_is_given_the_time_of_its_bytes_until_rounds_have_been_seen():
    deadlines = Deadlines()
    assert deadlines.timing(10**9).attempt_s == 20.0 + 4 * 1000.0
    deadlines.epoch_took(60.0, of_it_round_s=5.0)
    assert deadlines.timing(10**9).attempt_s == 40.0
    deadlines.attempt_timed_out(30.0)
    assert deadlines.timing(10**9).attempt_s == 140.0
