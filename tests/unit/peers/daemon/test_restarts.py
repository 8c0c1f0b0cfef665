"""When a worker that has ended is started again."""

from __future__ import annotations

import pytest

from peers.daemon.restarts import Restarts, last_line, restart_delay_s

HOT = "the weights are not finite any more"


def test_the_third_end_in_a_row_for_the_same_reason_is_the_last_whatever_was_trained_between():
    restarts = Restarts()
    for _ in range(2):
        assert restarts.ended(1, HOT).restarts
        restarts.progressed()
    end = restarts.ended(1, HOT)
    assert not end.restarts
    assert end.given_up() == f"the worker failed 3 times in a row for the same reason: {HOT}"


def test_commits_of_its_work_between_its_ends_put_the_last_one_off_but_not_for_ever():
    restarts = Restarts()
    for _ in range(3):
        assert restarts.ended(1, HOT).restarts
        restarts.committed()
    end = restarts.ended(1, HOT)
    assert not end.restarts
    assert end.given_up() == f"the worker failed 4 times in a row for the same reason: {HOT}"


def test_who_commits_several_times_between_its_ends_is_started_again_for_ever():
    restarts = Restarts()
    for _ in range(50):
        assert restarts.ended(1, HOT).restarts
        restarts.committed()
        restarts.committed()


def test_a_program_that_fails_after_each_training_is_given_up_however_much_it_commits_before():
    restarts = Restarts()
    for is_third in (False, False, True):
        for is_last in (False, False, True):
            restarts.committed(is_last=is_last)
        assert restarts.ended(1, "cannot save").restarts is not is_third


@pytest.mark.parametrize(("code", "said"), [(1, "too cold"), (137, "")])
def test_an_end_of_another_kind_makes_the_same_reason_count_anew(code, said):
    restarts = Restarts()
    for number in range(20):
        assert (restarts.ended(code, said) if number % 3 == 2 else restarts.ended(1, HOT)).restarts
        restarts.committed()
    # Commits from before the first of them do not count.
    assert [restarts.ended(1, f"{HOT}!").restarts for _ in range(3)] == [True, True, False]


def test_other_reasons_are_no_row_but_five_ends_without_progress_are():
    restarts = Restarts()
    assert [restarts.ended(1, f"reason {number}").restarts for number in range(5)] == [True] * 4 + [False]
    end = restarts.ended(1, "reason 5")
    assert "6 times in a row without progress, the last time: reason 5" in end.given_up()


def test_workers_that_are_killed_have_no_reason_and_come_back_as_long_as_they_progress():
    restarts = Restarts()
    for _ in range(10):
        end = restarts.ended(137, "step 3")
        assert end.restarts and end.reason == ""
        restarts.progressed()
    assert "it ended with 137" in end.given_up()


@pytest.mark.parametrize(
    ("code", "said"), [(0, ""), (2, "no such model"), (1, "the worker failed 3 times in a row: why")]
)
def test_who_has_finished_or_must_be_helped_or_has_given_up_itself_is_not_started_again(code, said):
    end = Restarts().ended(code, said)
    assert not end.restarts
    assert code != 1 or end.given_up() == said


def test_a_reason_is_told_once():
    restarts = Restarts()
    assert restarts.ended(1, HOT).in_words() == f"the worker ended with 1 and is started again: {HOT}"
    assert HOT not in restarts.ended(1, HOT).in_words()
    assert restarts.ended(137, "").in_words() == "the worker ended with 137 and is started again"


def test_delays_grow_up_to_a_bound():
    assert [restart_delay_s(deaths) for deaths in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 10.0]


def test_the_last_line_is_one_that_says_something():
    assert (last_line("a\n b \n\n"), last_line("")) == ("b", "")
