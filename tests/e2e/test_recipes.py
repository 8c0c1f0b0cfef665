"""The recipe for a laptop, run as its own comment says, but shorter."""

from __future__ import annotations

import pytest

from tests.support.commands import DILOCO, ROOT


@pytest.mark.exhaustive
def test_the_laptops_recipe_trains_averages_and_reports(start, tmp_path):
    command = start(
        *(*DILOCO, "run", "--config", "recipes/laptop.toml", "--max-steps", 100),
        *("--eval-tokens", 4096, "--run-dir", tmp_path / "run"),
        cwd=ROOT,
    )
    assert command.wait(300) == 0, command.stderr
    assert (
        "trains demo on stdlib: 100 steps of 8 samples of 128 tokens, averaged every 50 steps"
        in command.stdout
    )
    records = (tmp_path / "run" / "peer-0" / "metrics.jsonl").read_text()
    assert records.count('"kind": "epoch"') == 2
    assert (tmp_path / "run" / "peer-0" / "model" / "model.safetensors").is_file()
