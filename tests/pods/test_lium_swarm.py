"""The commands with Lium's emulator: peers that train, experiments, and the bill."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.commands import check_gone, model_directory, text_of_boxes
from tests.support.lium_api import LiumApi, executor
from tests.support.pods_commands import argv_of, tiny_training
from tests.support.ssh_machines import needs_rsync, ssh_host

pytest.importorskip("lium", reason="the package lium.io is not installed")
pytestmark = [
    pytest.mark.pods,
    pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync()),
]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiumApi]:
    nodes = [executor("NVIDIA A100-SXM4-80GB", 8, 1.0), executor("NVIDIA H100 80GB HBM3", 8, 2.0)]
    with ExitStack() as stack:
        hosts = [stack.enter_context(ssh_host(tmp_path / f"host{index}", "")) for index in range(2)]
        for host in hosts:
            host.install("nvidia-smi", "for _ in 1 2 3 4 5 6 7 8; do echo 'GPU, 81559 MiB'; done")
        api = stack.enter_context(LiumApi(nodes, hosts))
        (tmp_path / "user").mkdir()
        for name, value in {**api.environment, "HOME": str(tmp_path / "user")}.items():
            monkeypatch.setenv(name, value)
        yield api


def test_two_rented_pods_train_together_run_experiments_and_are_paid_for(api, run, tmp_path):
    model = model_directory(tmp_path / "model")
    common = ("--provider", "lium", "--python", sys.executable, "--ttl-hours", 2)
    provision = argv_of("diloco provision --pods 2 --gpu-type A100,H100", *common)
    flags = tiny_training(model, device="cpu")
    # Offers can be listed before an SSH key has been made.
    offers = json.loads(run("diloco provision --provider lium --offers --json").stdout)
    assert [one["gpu_count"] for one in offers] == [8, 8]
    asked = run(provision, "--", *flags)
    assert asked.code == 2 and "Give --yes" in asked.stderr and api.num_rented == 0
    up = run(provision, "--yes", "--", *flags)
    assert up.code == 0, up.stderr
    found = json.loads(run("diloco pods status --json").stdout)
    assert [(one["peer"], one["epoch"] >= 1) for one in found] == [("trains", True)] * 2
    assert "averaged by 2 peers" in run("diloco pods logs pod-1").stdout
    assert run("diloco pods extend --hours 1").code == 0
    ends = [one["ends_at"] for one in found]
    later = json.loads(run("diloco pods status --json").stdout)
    assert [one["ends_at"] - end for one, end in zip(later, ends, strict=True)] == [3600.0] * 2
    assert run("diloco pods down").code == 0
    assert api.rented == {}
    check_gone(up)

    training = ("--fake-data", "--seq-length", 64, "--eval-tokens", 64, "--device", "cpu")
    sweep = argv_of(
        "diloco experiments run multi_dataset --trainer pretrain --yes --json --destroy --provider lium"
    )
    short = ("--model-id", model, "--dataset", "stdlib", "--total-steps", 2, "--batch-size", 2)
    three = run(sweep, "--python", sys.executable, *short, "--grad-accum-steps", 2, "--", *training)
    # Three pods of eight A100 are wanted, one is offered: nothing is rented.
    assert three.code == 2 and "Nothing was rented" in text_of_boxes(three.stderr)[0]
    sweep[sweep.index("multi_dataset")] = "custom_advanced"
    one = run(sweep, "--python", sys.executable, *short, "--grad-accum-steps", 2, "--", *training)
    assert one.code == 0, one.stderr
    assert [result["ok"] for result in json.loads(one.stdout)["experiments"]] == [True]
    assert (api.rented, api.num_rented) == ({}, 3)
    assert len(api.free_hosts) == 2

    cost = json.loads(run("diloco pods cost --json").stdout)
    assert sorted(one["price_per_hour"] for one in cost["pods"]) == [8.0, 16.0]
    assert cost["dollars"] == pytest.approx(sum(one["price_per_hour"] * one["hours"] for one in cost["pods"]))
    assert cost["price_per_hour"] == 0
