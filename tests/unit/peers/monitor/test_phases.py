from __future__ import annotations

import math

import pytest

from peers.monitor.phases import Doing, PhaseClock, in_short, in_words, training_left_s
from peers.protocol.reports import Phase, Point


def test_a_phase_knows_since_when_and_how_long_it_has_stood_still():
    clock = PhaseClock()
    assert clock.at(Doing("evaluating", "", 0, 100, "windows"), 10.0).for_s == 0
    phase = clock.at(Doing("evaluating", "", 25, 100, "windows"), 15.0)
    assert (phase.for_s, phase.idle_s, phase.left_s) == (5.0, 0.0, 15.0)
    phase = clock.at(Doing("evaluating", "", 25, 100, "windows"), 19.0)
    assert (phase.for_s, phase.idle_s) == (9.0, 4.0)


def test_another_phase_or_the_same_from_the_beginning_counts_anew():
    clock = PhaseClock()
    clock.at(Doing("evaluating", "", 50, 100, "windows"), 10.0)
    assert clock.at(Doing("evaluating", "", 1, 100, "windows"), 20.0).for_s == 0
    assert clock.at(Doing("training", "", 7, 100, "steps"), 30.0).for_s == 0


def test_what_was_done_before_it_was_looked_at_says_nothing_of_the_pace():
    clock = PhaseClock()
    clock.at(Doing("receiving the state", "", 800, 1000, "bytes"), 0.0)
    assert clock.at(Doing("receiving the state", "", 900, 1000, "bytes"), 10.0).left_s == 10.0


def test_the_rest_of_a_training_follows_its_last_points_rounds_included():
    points = [Point(time=10.0 * i, step=5 * i, loss=None, tokens_per_s=1.0) for i in range(5)]
    assert training_left_s(points, 20, 100) == 160.0
    assert training_left_s(points[:1], 5, 100) is None and training_left_s(points, 20, 0) is None


@pytest.mark.parametrize(
    ("phase", "words", "short"),
    [
        (Phase("starting", "loading the model"), "starting: loading the model", "starting"),
        (Phase("waiting for peers", "", 1, 3, "peers"), "waiting for peers, 1 of 3 are here", "waiting for peers 1/3"),
        (
            Phase("receiving the state", "", 2.5e8, 1e9, "bytes", 30.0, 10.0),
            "receiving the state, 250MB of 1GB, 25MB/s, 30 s left",
            "receiving the state 25%",
        ),
        (Phase("tokenizing", "stdlib", 5e6, 0, "bytes", None, 2.0), "tokenizing: stdlib, 5MB, 2.5MB/s", "tokenizing"),
        (Phase("training", "", 120, 900, "steps", 7200.0), "training, step 120 of 900, 2.0 h left", "training"),
        (Phase("training", "", 120, 0, "steps"), "training, step 120", "training"),
        (Phase("averaging", "waits for peers 2"), "averaging: waits for peers 2", "averaging"),
    ],
)  # fmt: skip
def test_phases_in_words(phase: Phase, words: str, short: str):
    assert (in_words(phase), in_short(phase)) == (words, short)


def test_a_worker_may_tell_anything_and_what_cannot_be_shown_is_left_out():
    doing = Doing.told({"name": "a\x1b[2J" + "b" * 99, "done": math.nan, "total": "many", "unit": None})
    assert (len(doing.name), doing.done, doing.total) == (32, 0.0, 0.0)
    assert "\x1b" not in doing.name
