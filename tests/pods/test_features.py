"""The table of features in docs/tutorials/gpu-pods.md, each command as typed, at Lium by its emulator.

test_lambda_swarm.py types those about Lambda, test_ray_on_machines.py those about Ray.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from provisioning.ledger.ledger import Ledger
from tests.pods.conftest import Run
from tests.support.commands import Command, check_gone, model_directory
from tests.support.documents import PAGES, blocks_of
from tests.support.lium_api import LiumApi, executor
from tests.support.pods_commands import (
    ALL_DOWN,
    DEPLOY,
    EXTEND,
    FETCH_LOGS,
    OFFERS,
    PLAN,
    SET_DEPLOY,
    SET_DOWN,
    SET_PLAN,
    SET_RUN,
    SETS,
    STATUS_OF_FILE,
)
from tests.support.ssh_machines import needs_rsync, ssh_host

pytest.importorskip("lium", reason="the package lium.io is not installed")
pytestmark = [pytest.mark.pods, pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync())]

PAGE = PAGES["docs/tutorials/gpu-pods.md"]


@pytest.fixture
def run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(command, …)` also checks that the command succeeds."""
    (tmp_path / "user").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "user"))

    def succeeds(command: str, *more: object) -> Command:
        done = run(command, *more)
        assert done.code == 0, done.stderr
        return done

    return succeeds


@pytest.fixture
def lium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiumApi]:
    nodes = [
        executor("NVIDIA A100-SXM4-80GB", 8, 1.0, smallest=1),
        executor("NVIDIA A100-SXM4-80GB", 8, 1.5),
        executor("NVIDIA A100-SXM4-80GB", 8, 1.6),
        executor("NVIDIA H100 80GB HBM3", 1, 2.0),
        executor("NVIDIA H100 80GB HBM3", 1, 1.0, up=100),
    ]
    with ExitStack() as stack:
        hosts = [stack.enter_context(ssh_host(tmp_path / f"host{index}", "")) for index in range(2)]
        for host in hosts:
            host.install("nvidia-smi", "for _ in 1 2 3 4 5 6 7 8; do echo 'GPU, 81559 MiB'; done")
        api = stack.enter_context(LiumApi(nodes, hosts))
        for name, value in api.environment.items():
            monkeypatch.setenv(name, value)
        yield api


def deployed(run: Run, command: str) -> Command:
    """Run the command with this Python and without its question."""
    return run(command, "--yes", "--python", sys.executable)


def test_pods_are_as_the_file_says_and_what_goes_is_shown_before(lium, run, tmp_path):
    here = tmp_path / "here"
    offers = json.loads(run(OFFERS, "--json").stdout)
    # The cheaper H100 uploads too slowly, and the more expensive A100s are rented out by eights only.
    assert [(one["gpu_count"], one["price_per_hour"]) for one in offers] == [(1, 1.0), (1, 2.0)]
    assert ["A100" in offers[0]["gpu_type"], "H100" in offers[1]["gpu_type"]] == [True, True]
    assert all(one["upload_mbps"] == 900 and one["download_mbps"] == 950 for one in offers)

    (text,) = (block.text for block in blocks_of(PAGE) if block.mark == "pods.toml")
    (here / "pods.toml").write_text(text)
    shown = json.loads(run(PLAN, "--json").stdout)["plan"]
    assert [one["name"] for one in shown["create"]] == ["large", "small"] and lium.num_rented == 0
    assert (shown["price_per_hour"], shown["price_until_end"]) == (3.0, 18.0)
    up = deployed(run, DEPLOY)
    pods = {one["pod_name"].split("-")[2]: one for one in lium.rented.values()}
    assert {name: pod["price"] for name, pod in pods.items()} == {"large": 2.0, "small": 1.0}

    (here / "pods.toml").write_text("[[pods]]" + text.split("[[pods]]")[2])
    shown = json.loads(run(PLAN, "--json").stdout)["plan"]
    assert shown["destroy"] == [{"name": "large", "reason": "no longer wanted"}]
    assert (shown["create"], shown["keep"], len(lium.rented)) == ([], ["small"], 2)
    deployed(run, DEPLOY)
    assert [pod["pod_name"].split("-")[2] for pod in lium.rented.values()] == ["small"]

    state_file = here / "state/diloco/pods.sqlite"
    (before,) = _rows(state_file)
    run(EXTEND)
    status = json.loads(run(STATUS_OF_FILE.replace(" pods.sqlite", f" {state_file}"), "--json").stdout)
    assert [(one["name"], one["ends_at"]) for one in status] == [("small", before.ends_at + 2 * 3600)]
    run(ALL_DOWN)
    assert lium.rented == {}
    check_gone(up)


def test_a_set_is_planned_with_prices_rented_run_on_what_is_there_and_given_back(lium, run, tmp_path):
    listed = run(SETS).stdout
    sets = ("lr_sweep", "multi_dataset", "model_size", "batch_grid", "custom_advanced")
    assert [line.partition(":")[0] for line in listed.splitlines() if line[0] != " "] == [*sets]
    shown = json.loads(run(SET_PLAN, "--json").stdout)["plan"]
    # Two pods of eight A100 for six hours.
    assert [one["price_per_hour"] for one in shown["create"]] == [8.0, 12.0]
    assert shown["price_until_end"] == 120.0 and "120.00" in run(SET_PLAN).stdout and lium.num_rented == 0

    up = deployed(run, SET_DEPLOY)
    assert lium.num_rented == len(lium.rented) == 1
    (host,) = (pod["_host"] for pod in lium.rented.values())
    (code,) = host.home.glob("diloco-pods/*/code")
    (code / "mark").write_text("")
    model = model_directory(tmp_path / "model")
    tiny = ("--trainer", "pretrain", "--model-id", model, "--dataset", "stdlib", "--total-steps", 2)
    more = ("--fake-data", "--seq-length", 64, "--eval-tokens", 64, "--device", "cpu")
    small = ("--batch-size", 2, "--grad-accum-steps", 2, "--python", sys.executable)
    done = run(SET_RUN, *tiny, *small, "--json", "--", *more)
    assert [one["ok"] for one in json.loads(done.stdout)["experiments"]] == [True]
    assert (code / "mark").exists() and "sending code" not in done.stderr and lium.num_rented == 1

    state_file = tmp_path / "here/state/diloco/experiments/custom_advanced.sqlite"
    run(FETCH_LOGS, "--state-file", state_file)
    (log,) = (tmp_path / "here/runs").glob("*-custom_advanced/*/jobs/advanced-*/log")
    assert log.stat().st_size > 0
    run(SET_DOWN)
    assert lium.rented == {}
    check_gone(up)


def _rows(state_file: Path) -> list:
    ledger = Ledger(state_file)
    rows = ledger.rows()
    ledger.close()
    return rows
