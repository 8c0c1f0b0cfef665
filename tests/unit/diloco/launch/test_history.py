"""What is kept of the records of a long training."""

from __future__ import annotations

import itertools
import json
import tracemalloc

import pytest

from diloco.launch import history
from diloco.launch.history import History
from diloco.launch.run_facts import num_steps, sessions_of
from diloco.train.metrics_file import Tail

START = {"kind": "event", "event": "start", "step": 0, "time": 0.0}


def step(number):
    return {"kind": "step", "step": number, "loss": 2.0, "time": float(number), "tokens_per_s": 1000.0}


def test_of_a_short_training_every_step_is_kept():
    steps = [step(number) for number in range(1, 100)]
    kept = History([START, *steps]).records
    assert [record["step"] for record in kept] == list(range(100))
    assert num_steps(kept) == 99


def test_of_a_long_one_the_steps_are_thinned_evenly_and_all_count(monkeypatch):
    monkeypatch.setattr(history, "MAX_STEPS", 8)
    kept = History([START])
    for number in range(1, 1000):
        kept.add([step(number)])
        steps = [record["step"] for record in kept.records if record["kind"] == "step"]
        assert num_steps(kept.records) == number and steps[-1] == number and len(steps) <= 8
        if number % 10 == 0:
            kept.add([{"kind": "epoch", "epoch": number // 10, "time": float(number), "momentum_norm": 1.0}])
    epochs = [record for record in kept.records if record["kind"] == "epoch"]
    assert epochs == [{"kind": "epoch", "epoch": epoch, "time": 10.0 * epoch} for epoch in range(1, 100)]
    assert [after - before for before, after in itertools.pairwise(steps[:-1])] == [128] * 6
    times = [record["time"] for record in kept.records]
    assert times == sorted(times)


@pytest.mark.parametrize("spike", [1, 1234, 1235, 4095, 4096, 4999, 5000])
def test_a_maximum_is_kept_wherever_it_was(spike):
    kept = History()
    for number in range(1, 5001):
        difference = (
            {"logp_difference_max": 9.0 if number == spike else 0.1} if number % 2 or number == spike else {}
        )
        kept.add([{**step(number), **difference}])
    assert len(kept.records) < 5000
    assert max(record.get("logp_difference_max") or 0.0 for record in kept.records) == 9.0


def test_the_last_step_before_a_restart_is_that_of_its_session_until_others_follow(monkeypatch):
    monkeypatch.setattr(history, "MAX_STEPS", 4)
    kept = History([*(step(number) for number in range(1, 12)), {**START, "time": 11.5}])
    (before, after) = sessions_of(kept.records)
    assert (before.steps[-1]["step"], after.steps) == (11, [])


def test_a_file_of_any_size_is_read_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "MAX_STEPS", 64)
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        file.writelines(f"{json.dumps({**step(number), 'more': 'x' * 300})}\n" for number in range(10_000))
    tracemalloc.start()
    kept = History(Tail(path).records()).records
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_steps(kept) == 10_000
    assert path.stat().st_size > 3e6 > 2 * peak_bytes
