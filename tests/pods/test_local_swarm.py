"""The README's commands for pods, and three unlike peers that train together, from renting to giving back."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from diloco.train.devices import num_cores
from diloco.train.metrics_file import Tail
from provisioning.machines.paths import PODS
from tests.support.commands import check_gone, model_directory, wait_until
from tests.support.pods_commands import DOWN, LOGS, PROVISION, STATUS, argv_of, tiny_training


@pytest.mark.exhaustive
def test_without_a_flag_three_pods_train_what_this_machine_trains_well(run, tmp_path):
    up = run(PROVISION)
    assert up.code == 0, up.stderr
    # Each peer's first epoch, and how many peers are in it, depend on the machine's load.
    assert (
        len(re.findall(r"epoch \d+ averaged by [1-3] peers?, loss \d\.\d+, \d+ s after the start", up.stderr))
        == 3
    )
    paths = list((tmp_path / "here/state").rglob("jobs/peer/log"))
    assert len(paths) == 3
    wait_until(
        lambda: all("averaged by 3 peers" in path.read_text() for path in paths), "an epoch of all three"
    )
    logs = [path.read_text() for path in paths]
    assert sum(f"; chosen for {num_cores()} core" in log for log in logs) == 1
    assert sum("shared by 3 peers (--path-model names another model)" in log for log in logs) == 1
    assert sum("; as the swarm does" in log for log in logs) == 2
    down = run(DOWN)
    assert down.code == 0, down.stderr
    check_gone(up)


@pytest.mark.exhaustive
def test_three_unlike_peers_train_together_and_leave_nothing(run, tmp_path, monkeypatch):
    flags = tiny_training(model_directory(tmp_path / "model"))
    given = ("--secret", "DILOCO_TEST_SECRET", "--mount", f"{tmp_path / 'model'}:mine", "--run-dir", "home")
    monkeypatch.setenv("DILOCO_TEST_SECRET", "open sesame")
    provision = argv_of(PROVISION, "--gpu-type", "cpu-1,cpu-2,cpu-4", *given, "--", *flags)
    up = run(provision)
    assert up.code == 0, up.stderr
    assert up.stdout.splitlines()[-3:] == ["pod-0: running", "pod-1: running", "pod-2: running"]
    assert all(f"{size} × cpu-{size}" in up.stdout for size in (1, 2, 4))

    pods = sorted((tmp_path / "here/state/diloco/local" / PODS).iterdir())
    epochs = wait_until(lambda: with_one_of_all_three(pods), "an epoch of all three")
    for epoch in set.intersection(*map(set, epochs)):
        assert len({found[epoch]["anchor_digest"] for found in epochs}) == 1

    assert all((pod / "mine/config.json").is_file() for pod in pods)
    secrets = [pod / "secrets.env" for pod in pods]
    assert all("open sesame" in path.read_text() and path.stat().st_mode & 0o077 == 0 for path in secrets)

    pids = {path: path.read_text() for pod in pods for path in pod.rglob("jobs/*/pid")}
    assert len(pids) == 4
    again = run(provision)
    assert again.code == 0, again.stderr
    assert again.stdout.count("keep") == 3 and "create" not in again.stdout
    assert pids == {path: path.read_text() for pod in pods for path in pod.rglob("jobs/*/pid")}

    status = run(STATUS, "--json")
    found = json.loads(status.stdout)
    assert [(one["name"], one["state"], one["peer"]) for one in found] == [
        (f"pod-{index}", "running", "trains") for index in range(3)
    ]
    assert all(one["epoch"] >= 1 for one in found)
    assert all(one["tokens"] > 0 and one["dollars"] == 0 for one in found)
    assert "3 pods may cost 0.00 $/h" in run(STATUS).stdout
    assert "averaged by 3 peers" in run(LOGS).stdout
    of_the_dht = run(LOGS, "--job", "dht")
    assert of_the_dht.code == 0 and "joined, 3 peers" in of_the_dht.stdout
    of_nothing = run(LOGS, "--job", "dth")
    assert of_nothing.code == 1 and "no log of a job dth; there are: dht, peer" in of_nothing.stderr

    # A line without a line end, as progress bars write it, is shown, too.
    with (pods[0] / "jobs/peer/log").open("a") as log:
        log.write("x" * 1_000_000)
    shown = run(LOGS, "--lines", "100000", "pod-0")
    # Peer ids contain the letter x, too, but not a hundred times in a row.
    pieces = re.findall("x{100,}", shown.stdout)
    assert shown.code == 0 and sum(map(len, pieces)) == 1_000_000, shown.stderr

    # A DHT that was lost is started again by the same command, and the peers are left as they are.
    (dht,) = (path for path in pids if path.parent.name == "dht")
    os.killpg(int(pids[dht]), signal.SIGKILL)
    mended = run(provision)
    assert mended.code == 0 and "starting the DHT" in mended.stderr, mended.stderr
    assert {path for path in pids if path.read_text() != pids[path]} == {dht}

    down = run(DOWN)
    assert down.code == 0, down.stderr
    check_gone(up)
    home = tmp_path / "here/home"
    for index, found in enumerate(epochs):
        fetched = Tail(home / f"pod-{index}/runs/peer/metrics.jsonl").read()
        assert {one["epoch"] for one in fetched if one["kind"] == "epoch"} >= set(found)
    assert (home / "pod-0/jobs/peer/log").is_file()
    assert not [path for path in home.rglob("*") if "secret" in path.name or "open sesame" in _text(path)]
    assert not (tmp_path / "here/state/diloco/local" / PODS).exists()
    assert run(STATUS, "--json").stdout == "[]\n"
    cost = json.loads(run("diloco pods cost", "--json").stdout)
    assert [one["is_over"] for one in cost["pods"]] == [True] * 3 and cost["dollars"] == 0


@pytest.mark.pods
def test_a_peer_that_cannot_start_is_told_of_at_once_and_holds_up_no_other(run, tmp_path):
    """Two processes cannot share one batch of four."""
    flags = tiny_training(model_directory(tmp_path / "model"), per_device_train_batch_size=4)
    up = run("diloco provision --pods 2 --gpu-type cpu-2 --json", "--", *flags)
    assert up.code == 1
    failures = json.loads(up.stdout)["failures"]
    assert "is not a multiple of --per-device-train-batch-size 4" in failures.get("pod-0", ""), up.stdout
    assert "`diloco pods down` gives everything back" in up.stderr
    down = run(DOWN)
    assert down.code == 0, down.stderr
    check_gone(up)


def with_one_of_all_three(pods: list[Path]) -> list[dict[int, dict[str, Any]]]:
    """Each pod's records of epochs, or [] until all have averaged one together: on a busy machine, a peer that is
    silent for seconds is left out of an epoch."""
    records = [Tail(pod / "runs/peer/metrics.jsonl").read() for pod in pods]
    epochs = [{one["epoch"]: one for one in found if one["kind"] == "epoch"} for found in records]
    whole = [{epoch for epoch, one in found.items() if one["contributors"] == [0, 1, 2]} for found in epochs]
    return epochs if set.intersection(*whole) else []


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""
