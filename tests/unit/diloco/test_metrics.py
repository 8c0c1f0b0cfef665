from __future__ import annotations

import json
import math
import sys

import pytest

from diloco.errors import UserError
from diloco.metrics import Metrics, WandbSink


class Recording:
    def __init__(self, error: Exception | None = None) -> None:
        self.records = []
        self.closed = False
        self._error = error

    def write(self, record):
        if self._error:
            raise self._error
        self.records.append(record)

    def close(self):
        self.closed = True


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_there_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics.write("step", step=1, loss=2.5)
        (record,) = lines(path)
    assert (record["kind"], record["step"], record["loss"]) == ("step", 1, 2.5)
    assert record["time"] > 1.7e9


def test_a_loss_that_is_not_finite_is_null_in_strict_json(tmp_path):
    with Metrics(tmp_path / "m.jsonl") as metrics:
        metrics.write("step", loss=math.nan, grad_norm=math.inf)
    (record,) = lines(tmp_path / "m.jsonl")
    assert (record["loss"], record["grad_norm"]) == (None, None)


def test_a_restart_appends_after_the_last_whole_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    with Metrics(path) as metrics:
        metrics.write("step", step=2)
    assert [record["step"] for record in lines(path)] == [1, 2]


def test_ranks_without_a_path_write_nothing(tmp_path):
    with Metrics(None) as metrics:
        metrics.write("step", step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_sink_that_fails_is_dropped_with_a_warning_and_the_rest_goes_on(tmp_path, caplog):
    good, bad = Recording(), Recording(OSError("no route to host"))
    with Metrics(tmp_path / "m.jsonl", [bad, good]) as metrics:
        metrics.write("step", step=1)
        metrics.write("step", step=2)
    assert [record["step"] for record in good.records] == [1, 2]
    assert len(lines(tmp_path / "m.jsonl")) == 2
    assert caplog.text.count("no route to host") == 1
    assert good.closed


def test_wandb_that_is_missing_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'diloco\[wandb\]'"):
        WandbSink(project="p", run_dir=tmp_path, config={})


def test_wandb_honours_its_disabled_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = WandbSink(project="p", run_dir=tmp_path, config={"lr": 1.0})
    with Metrics(tmp_path / "m.jsonl", [sink]) as metrics:
        metrics.write("step", step=1, loss=1.0)
    assert len(lines(tmp_path / "m.jsonl")) == 1
