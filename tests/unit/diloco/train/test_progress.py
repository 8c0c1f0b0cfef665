"""A trainer's progress reports during a long step."""

from __future__ import annotations

from types import SimpleNamespace

from diloco.train import progress as module
from diloco.train.metrics_file import PhaseLines, line_of
from diloco.train.progress import Progress
from peers.monitor.phases import Doing
from peers.protocol.reports import Phase


def told(monkeypatch, micro_batch_s: float) -> tuple[list[Doing | None], list[float]]:
    """The reports after each of four micro-batches in two steps, and the durations of long steps."""
    now, long_s = 100.0, []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    progress, reported = Progress(tells=False), []
    for step in (1, 2):
        with progress.step(step, long_s.append) as reached:
            for done in range(1, 5):
                now += micro_batch_s
                reached(done, 4)
                reported.append(progress._doing)
        assert progress._doing is None
    return reported, long_s


def test_the_micro_batches_of_a_long_step_are_reported_and_its_length_is_told_once(monkeypatch):
    reported, long_s = told(monkeypatch, 30.0)
    assert reported[:3] == [Doing("training", "step 1", done, 4, "micro-batches") for done in (1, 2, 3)]
    assert reported[4] == Doing("training", "step 2", 1, 4, "micro-batches")
    assert long_s == [120.0]


def test_of_quick_steps_nothing_is_said(monkeypatch):
    for micro_batch_s in (0.4, 2.4):
        reported, long_s = told(monkeypatch, micro_batch_s)
        assert set(reported) == {None} and long_s == []


def test_a_long_step_is_told_in_lines():
    record = {"kind": "event", "event": "long_steps", "step_s": 240.0, "step_tokens": 524_288}
    assert (
        line_of(record)
        == "a step is 524k tokens, which takes about 4 min here; --total-batch-size makes it smaller"
    )
    long = Phase("training", "12 of 64 micro-batches of step 1", 0, 88_000, "steps", None, 60.0)
    assert PhaseLines().of(long, 0.0) == "training: 12 of 64 micro-batches of step 1, step 0 of 88000"
    assert PhaseLines().of(Phase("training", "", 7, 88_000, "steps", None, 60.0), 0.0) is None
