"""`diloco run --baseline`: the same training repeated by a single peer, for comparison."""

from __future__ import annotations

import re

import pytest

from diloco.train.metrics_file import Tail
from tests.support.commands import DILOCO, check_gone, training_flags


@pytest.mark.exhaustive
def test_one_peer_trains_alone_afterwards_on_the_same_data_and_is_told_beside_the_swarm(
    start, model, tmp_path
):
    run_dir = tmp_path / "run"
    flags = training_flags(model, total_steps=6, warmup_steps=0, hv__local_steps=2, ckpt__interval=3)
    flags = [flag.replace("--hv--", "--hv.").replace("--ckpt--", "--ckpt.") for flag in flags]
    command = start(
        *(*DILOCO, "run", "--peers", "2", "--baseline", *flags),
        *("--ckpt.path", tmp_path / "checkpoints", "--run-dir", run_dir),
    )
    assert command.wait() == 0, command.stdout + command.stderr
    assert command.stderr == ""
    check_gone(command)

    peer, alone = (Tail(run_dir / name / "metrics.jsonl").read() for name in ("peer-0", "alone"))
    steps = {
        "peer": [r for r in peer if r["kind"] == "step"],
        "alone": [r for r in alone if r["kind"] == "step"],
    }
    assert [record["step"] for record in steps["alone"]] == [1, 2, 3, 4, 5, 6]
    # Until the first averaging both have the same weights, samples and learning rates.
    assert [r["loss"] for r in steps["alone"][:2]] == [r["loss"] for r in steps["peer"][:2]]
    assert [r["lr"] for r in steps["alone"]] == [r["lr"] for r in steps["peer"]]
    assert steps["alone"][3]["loss"] != steps["peer"][3]["loss"]
    assert not any(record["kind"] == "epoch" for record in alone)

    report, _, after = command.stdout.partition(
        "--- training a single peer for as many steps, to compare; Ctrl-C skips this\n"
    )
    assert "all peers held bit-identical anchors after every epoch" in report
    own = [f"{r['bits_per_byte']:.3f}" for r in alone if r["kind"] == "eval"][-1]
    shared = [f"{r['bits_per_byte']:.3f}" for r in peer if r["kind"] == "eval"][-1]
    line = rf"^alone +{own} bits per byte after as many steps as each peer's, in \d+ s; the swarm {shared}"
    line += r", in \d+ s for \d times the tokens$"
    assert re.search(line, after, re.MULTILINE), after
    assert (run_dir / "loss.png").stat().st_mtime > (run_dir / "alone" / "metrics.jsonl").stat().st_mtime
    # The baseline saves no checkpoints; these are the peers'.
    assert {path.name for path in (tmp_path / "checkpoints").glob("*/*")} == {
        "diloco_rank_0",
        "diloco_rank_1",
    }


@pytest.mark.exhaustive
def test_reinforcement_has_no_baseline(start, model):
    command = start(*DILOCO, "run", "--mode", "grpo", "--path-model", model, "--baseline")
    assert command.wait() == 2
    assert "--baseline is for pretraining" in command.stderr
