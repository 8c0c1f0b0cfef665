"""A swarm that died as a whole goes on from its checkpoints as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.commands import DILOCO, training_flags

FLAGS = {"max-steps": 12, "total-steps": 12, "warmup-steps": 2, "lr": 1e-2, "hv.local-steps": 4}


def records_of(run_dir: Path, rank: int, kind: str) -> dict[int, dict[str, Any]]:
    """A peer's records of one kind by step."""
    lines = (run_dir / f"peer-{rank}" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record for record in map(json.loads, lines) if record["kind"] == kind}


def test_both_peers_resumed_in_mid_epoch_train_and_average_what_the_undisturbed_run_did(
    start, model, tmp_path
):
    saved = tmp_path / "checkpoints"
    first = training_flags(
        model, **FLAGS, **{"run-dir": tmp_path / "first", "ckpt.path": saved, "ckpt.interval": 6}
    )
    assert start(*DILOCO, "run", *first, name="first-run").wait() == 0
    again = training_flags(
        model, **FLAGS, **{"run-dir": tmp_path / "again", "ckpt.resume": saved / "model_step_6"}
    )
    assert start(*DILOCO, "run", *again, name="second-run").wait() == 0

    for rank in (0, 1):
        before, after = (records_of(tmp_path / run, rank, "step") for run in ("first", "again"))
        assert sorted(after) == [7, 8, 9, 10, 11, 12]
        for step, record in after.items():
            assert (record["loss"], record["lr"]) == (before[step]["loss"], before[step]["lr"]), step
        epochs, resumed = (records_of(tmp_path / run, rank, "epoch") for run in ("first", "again"))
        assert sorted(resumed) == [8, 12]
        for step, record in resumed.items():
            assert record["anchor_digest"] == epochs[step]["anchor_digest"]
            assert record["contributors"] == [0, 1]
