from __future__ import annotations

import pytest

from benchmarks.saving import Setting, results_of


def test_the_epochs_that_begin_with_a_save_are_compared_with_those_after_them():
    """A step takes one second, but the first step of an epoch that begins with a save takes 1.5 s."""
    setting = Setting(local_steps=10, num_pairs=2)
    records, now = [], 0.0
    for step in range(1, setting.num_steps + 1):
        now += 1.5 if step % setting.interval == 1 else 1.0
        records.append({"kind": "step", "step": step, "time": now})
        if step % setting.interval == 0:
            save = {"event": "checkpoint", "step": step, "bytes": 2_000_000, "seconds": 0.3, "blocked_s": 0.5}
            records.append({"kind": "event", **save, "time": now})
    found = {row.metric: row for row in results_of(setting, records)}
    assert (found["cost of saving"].median, found["cost of saving"].runs) == (pytest.approx(5.0), 2)
    assert found["epoch without a save"].median == pytest.approx(10.0)
    assert found["training stood still"].median == 0.5
    assert found["a checkpoint"].median == 2.0
