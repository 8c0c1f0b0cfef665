"""Each recipe, run as its comment says, but shorter and, where it needs a GPU, with a small model on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.format_model import bare_model
from tests.support.commands import DILOCO, ROOT, coordinator_at, digests_of, records_of
from tests.support.tiny_model import small_bare_model

pytestmark = pytest.mark.exhaustive

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
SMALL = {
    "path-model": "demo",
    "seq-length": 128,
    "total-batch-size": 8,
    "per-device-train-batch-size": 4,
    "warmup-steps": 5,
    "eval-tokens": 4096,
    "device": "cpu",
    "ckpt.interval": 10,
}
"""Replaces the settings that need a GPU. The recipe's optimizer, codec, fragments and overlap stay."""


def with_recipe(name: str, run_dir: Path, **changes: Any) -> list[Any]:
    flags = [word for flag, value in changes.items() for word in (f"--{flag}", value)]
    return ["--config", f"recipes/{name}.toml", *flags, "--run-dir", run_dir]


def check_agreed(directories: list[Path], num_epochs: int) -> None:
    """Every epoch is recorded, with one digest. A peer may miss an epoch by being late if there are three or more."""
    digests = [digests_of(directory) for directory in directories]
    assert set().union(*digests) == set(range(1, num_epochs + 1))
    for epoch in range(1, num_epochs + 1):
        told = [found[epoch] for found in digests if epoch in found]
        assert len(set(told)) == 1 and (len(digests) > 2 or len(told) == len(digests)), digests


def test_a_laptops_recipe_trains_averages_and_reports(start, tmp_path):
    flags = with_recipe("laptop", tmp_path / "run", **{"max-steps": 100, "eval-tokens": 4096})
    command = start(*DILOCO, "run", *flags, cwd=ROOT)
    assert command.wait(900) == 0, command.stderr
    assert (
        "trains demo on stdlib: 100 steps of 8 samples of 128 tokens, averaged every 50 steps"
        in command.stdout
    )
    check_agreed([tmp_path / "run" / f"peer-{rank}" for rank in (0, 1)], num_epochs=2)
    weights = [tmp_path / "run" / f"peer-{rank}" / "model" / "model.safetensors" for rank in (0, 1)]
    assert weights[0].samefile(weights[1])


def test_the_recipe_for_one_gpu_trains_alone_and_saves(start, tmp_path):
    changes = {**SMALL, "hv.local-steps": 10, "max-steps": 20, "ckpt.path": tmp_path / "saved"}
    flags = with_recipe("one-gpu", tmp_path / "run", **changes)
    command = start(*DILOCO, "run", "--peers", 1, *flags, cwd=ROOT)
    assert command.wait(900) == 0, command.stderr
    check_agreed([tmp_path / "run" / "peer-0"], num_epochs=2)
    assert (tmp_path / "run" / "peer-0" / "model" / "model.safetensors").is_file()
    assert list((tmp_path / "saved").glob("model_step_*")), "no checkpoint"


def test_two_machines_meet_by_the_coordinators_address(start, tmp_path):
    maddr = coordinator_at(start)
    short: dict[str, Any] = {"total-batch-size": 4, "eval-tokens": 4096, "hv.local-steps": 2, "max-steps": 4}
    short["ckpt.path"] = tmp_path / "saved"
    peers = [
        start(
            *(*DILOCO, "peer", *with_recipe("two-machines", tmp_path / name, **short)),
            *("--initial-peers", maddr, *LOOPBACK),
            name=name,
            cwd=ROOT,
        )
        for name in ("first", "second")
    ]
    assert [peer.wait(900) for peer in peers] == [0, 0], [peer.stderr for peer in peers]
    check_agreed([tmp_path / "first", tmp_path / "second"], num_epochs=2)
    assert records_of(tmp_path / "first", "epoch")[0]["num_peers"] == 2


@pytest.mark.parametrize(
    ("name", "num_peers", "local_steps", "num_epochs"),
    # slow-links averages its ten fragments one by one, and the other nine once more at the end.
    [("four-pods", 4, 20, 3), ("slow-links", 2, 60, 19)],
    ids=["four pods", "slow links"],
)
def test_a_recipe_for_pods_trains_in_a_swarm(start, tmp_path, name, num_peers, local_steps, num_epochs):
    changes = {**SMALL, "hv.local-steps": local_steps, "max-steps": 60, "ckpt.path": tmp_path / "saved"}
    if name == "slow-links":
        changes["path-model"] = bare_model(tmp_path / "model", num_hidden_layers=10)
    flags = with_recipe(name, tmp_path / "run", **changes)
    command = start(*DILOCO, "run", "--peers", num_peers, *flags, cwd=ROOT)
    assert command.wait(900) == 0, command.stderr
    directories = [tmp_path / "run" / f"peer-{rank}" for rank in range(num_peers)]
    check_agreed(directories, num_epochs)
    assert any(record["num_peers"] == num_peers for record in records_of(directories[0], "epoch"))
    assert list((tmp_path / "saved").glob("model_step_*")), "no checkpoint"


def test_the_recipe_for_reinforcement_learns_from_rewards(start, tmp_path):
    flags = with_recipe("grpo", tmp_path / "run", **{"total-steps": 10, "device": "cpu"})
    # The recipe's own model takes minutes to make (tests/e2e/test_readme.py makes it); this one is untrained.
    model = small_bare_model(tmp_path / "model")
    command = start(*DILOCO, "run", *flags, "--path-model", model, cwd=ROOT)
    assert command.wait(900) == 0, command.stderr
    check_agreed([tmp_path / "run" / f"peer-{rank}" for rank in (0, 1)], num_epochs=2)
