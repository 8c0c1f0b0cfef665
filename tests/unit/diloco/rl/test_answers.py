from __future__ import annotations

import pytest

from diloco.rl.answers import number_of, parsed, same_answer


@pytest.mark.parametrize(
    "text", ["1200", "1,200", "1200.0", " $1,200 ", "+1200", "1200.", "1.2e3", "2400/2", "€1200"]
)
def test_one_number_in_any_spelling_is_that_number(text):
    assert same_answer(text, "1200")


@pytest.mark.parametrize(
    "text", ["", "  ", "12,00", "1 200", "1200 apples", "1201", "--1200", "1e999999999", "5/0"]
)
def test_anything_else_is_another_answer(text):
    assert not same_answer(text, "1200")


def test_a_negative_amount_keeps_its_sign():
    assert number_of("-$5") == -5 == number_of("$-5")


def test_answers_that_are_no_numbers_are_compared_as_text():
    assert same_answer(" Heads\n", "heads") and not same_answer("tails", "heads")


def test_a_strict_completion_is_reasoning_and_answer_and_nothing_else():
    text = "<start_working_out>2+2<end_working_out>\n<SOLUTION> 4 </SOLUTION>"
    read = parsed(text)
    assert (read.answer, read.reasoning, read.trailing, read.is_strict) == ("4", "2+2", "", True)
    assert parsed(
        text.replace("start_working_out", "think").replace("<end_working_out>", "</think>")
    ).is_strict
    assert not parsed(text + " indeed").is_strict and parsed(text + " indeed").trailing == "indeed"
    assert not parsed("<SOLUTION>4</SOLUTION><think>2+2</think>").is_strict


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "<SOLUTION></SOLUTION>",
        "<SOLUTION>4",
        "<SOLUTION>4</SOLUTION><SOLUTION>5</SOLUTION>",
        "</SOLUTION>",
    ],
)
def test_without_exactly_one_answer_there_is_none(text):
    assert not parsed(text).has_answer
