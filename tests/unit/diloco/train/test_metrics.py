from __future__ import annotations

import json
import math
import threading
import tracemalloc
from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.options.flags import HvConfig
from diloco.options.trainer import TrainConfig, parse_train_config
from diloco.train import sinks
from diloco.train.metrics import Metrics
from diloco.train.sinks import QueuedSink, WandbSink, opened_sinks, run_name
from tests.support.full_disk import full_disk


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
        metrics.write("activations", rms=[1.0, math.inf])
    step, activations = lines(tmp_path / "m.jsonl")
    assert (step["loss"], step["grad_norm"]) == (None, None)
    assert activations["rms"] == [1.0, None]


def test_a_restart_appends_after_the_last_whole_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    with Metrics(path) as metrics:
        metrics.write("step", step=2)
    assert [record["step"] for record in lines(path)] == [1, 2]


def test_a_restart_reads_the_end_of_a_long_file_only(tmp_path):
    path, line = tmp_path / "m.jsonl", b'{"kind": "step"}\n'
    for whole, cut_off in ((300_000, 1), (2, 200_000), (0, 200_000), (0, 0), (5, 0)):
        path.write_bytes(whole * line + cut_off * b"x")
        tracemalloc.start()
        Metrics(path).close()
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert path.stat().st_size == whole * len(line)
        assert peak_bytes < 1e6


def test_ranks_without_a_path_write_nothing(tmp_path):
    with Metrics(None) as metrics:
        metrics.write("step", step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_the_records_until_there_is_room_and_leaves_no_half_line(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    told: list[tuple[str, str]] = []
    with Metrics(path, [sink := Recording()], on_trouble=lambda *trouble: told.append(trouble)) as metrics:
        metrics.write("step", step=1)
        # Ten bytes of the next line fit.
        with full_disk(path.stat().st_size + 10):
            metrics.write("step", step=2)
            metrics.write("step", step=3)
        metrics.write("step", step=4)
        assert [record["step"] for record in lines(path)] == [1, 4]
        assert caplog.text.count("cannot write to") == 1
        assert [what for what, _ in told] == ["metrics", "metrics"]
        assert told[0][1].startswith(f"cannot write to {path}") and told[1][1] == ""
    assert [record["step"] for record in sink.records] == [1, 2, 3, 4]


def test_a_sink_that_fails_is_dropped_with_a_warning_and_the_rest_goes_on(tmp_path, caplog):
    good, bad = Recording(), Recording(OSError("no route to host"))
    with Metrics(tmp_path / "m.jsonl", [bad, good]) as metrics:
        metrics.write("step", step=1)
        metrics.write("step", step=2)
    assert [record["step"] for record in good.records] == [1, 2]
    assert len(lines(tmp_path / "m.jsonl")) == 2
    assert caplog.text.count("no route to host") == 1
    assert good.closed


class Hanging:
    """A sink whose first write blocks until the test releases it."""

    def __init__(self):
        self.let_go = threading.Event()
        self.took = threading.Event()
        self.records = []

    def write(self, record):
        self.took.set()
        self.let_go.wait(60)
        self.records.append(record)

    def close(self):
        pass


def test_a_sink_that_hangs_costs_no_step_any_time_and_the_other_sinks_nothing(tmp_path, caplog):
    hanging, good = Hanging(), Recording()
    metrics = Metrics(tmp_path / "m.jsonl", [hanging, good])
    metrics.write("step", step=0)
    assert hanging.took.wait(5)
    for step in range(1, 3001):
        metrics.write("step", step=step)
    # The first write is still blocked, so no step waited for it.
    assert hanging.records == []
    assert len(lines(tmp_path / "m.jsonl")) == 3001
    assert caplog.text.count("Hanging takes no metrics at the moment") == 1
    hanging.let_go.set()
    metrics.close()
    # It has the records that fitted in the queue, in order; later ones are dropped.
    taken = [record["step"] for record in hanging.records]
    assert taken == list(range(len(taken))) and 1000 <= len(taken) <= 1002
    assert len(good.records) > 0 and good.closed


def test_a_sink_that_hangs_at_the_end_is_left_behind(caplog):
    hanging = Hanging()
    sink = QueuedSink(hanging)
    sink.write({"step": 1})
    sink.write({"step": 2})
    assert hanging.took.wait(5)
    sink.close(timeout_s=0.3)
    assert hanging.records == []
    assert "Hanging hangs; its last" in caplog.text
    hanging.let_go.set()


def test_a_sink_that_is_away_for_a_moment_misses_nothing(tmp_path):
    hanging = Hanging()
    with Metrics(tmp_path / "m.jsonl", [hanging]) as metrics:
        for step in range(500):
            metrics.write("step", step=step)
        hanging.let_go.set()
    assert [record["step"] for record in hanging.records] == list(range(500))


def test_wandb_honours_its_disabled_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = WandbSink(TrainConfig(), tmp_path)
    with Metrics(tmp_path / "m.jsonl", [sink]) as metrics:
        metrics.write("step", step=1, loss=1.0)
    assert len(lines(tmp_path / "m.jsonl")) == 1


@pytest.fixture
def anew(monkeypatch):
    """Reset wandb, which reads the environment only at its first use."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


def test_wandb_without_a_network_has_a_group_for_the_run_and_a_run_for_each_peer(tmp_path, anew, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for rank, life in ((0, 0), (1, 0), (1, 1)):
        hv = HvConfig(run_id="winter", world_rank=rank)
        config = replace(TrainConfig(), metric_logger_type="wandb", hv=hv)
        run_dir = tmp_path / f"peer{rank}"
        run_dir.mkdir(exist_ok=True)
        (sink,) = opened_sinks(config, run_dir)
        run = sink._run
        assert (run.group, run.name, run.job_type) == ("winter", f"winter-peer-{rank}", "peer")
        ids.append(run.id)
        with Metrics(run_dir / "metrics.jsonl", [sink]) as metrics:
            metrics.write("step", step=life + 1, loss=1.0)
    # The restarted worker of peer 1 goes on with its run.
    assert ids[1] == ids[2] != ids[0]
    kept = sorted(tmp_path.glob("peer*/wandb/offline-run-*/run-*.wandb"))
    assert {path.parent.parent.parent.name for path in kept} == {"peer0", "peer1"}
    assert all(path.stat().st_size > 0 for path in kept)


def test_a_wandb_that_does_not_answer_is_done_without(tmp_path, anew, monkeypatch, caplog):
    monkeypatch.setattr(sinks, "_INIT_TIMEOUT_S", 2.0)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    # Nobody listens there.
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    sink = WandbSink(TrainConfig(), tmp_path)
    sink.write({"kind": "step", "step": 1, "loss": 2.0})
    sink.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert "for `wandb sync`" in caplog.text


def test_alone_a_run_at_wandb_has_no_group_and_is_named_by_wandb():
    config = TrainConfig(metric_logger_type="wandb")
    assert run_name(config) is None
    assert run_name(replace(config, hv=HvConfig(run_id="r", world_rank=3))) == "r-peer-3"


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra `tensorboard`: pip install -e '.[dev]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrainConfig(metric_logger_type="tensorboard")
    with Metrics(tmp_path / "m.jsonl", opened_sinks(config, tmp_path)) as metrics:
        metrics.write("step", step=1, loss=2.5)
        metrics.write("step", step=2, loss=math.nan, tokens=7)
        metrics.write("epoch", step=2, epoch=1, contributors=[0, 1], anchor_digest="ab")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"step/loss", "step/tokens", "epoch/epoch"}
    assert [(event.step, event.value) for event in events.Scalars("step/loss")] == [(1, 2.5)]
    assert events.Scalars("step/tokens")[0].step == 2


def test_several_loggers_may_be_named_and_unknown_ones_not():
    def loggers(*argv: str) -> tuple[str, ...]:
        return parse_train_config([*argv])[0].metric_loggers

    assert loggers("--metric-logger-type", "wandb,tensorboard") == ("wandb", "tensorboard")
    assert loggers() == loggers("--metric-logger-type", "dummy") == ()
    with pytest.raises(UserError, match="prayer"):
        loggers("--metric-logger-type", "wandb,prayer")
