"""A pod that dies while nobody looks is replaced, and its peer trains with the others on the same bits."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from diloco.train.metrics_file import Tail
from provisioning.ledger.ledger import Ledger
from provisioning.machines.paths import MARK, PODS
from provisioning.swarm.keeper import Wanted
from tests.support.commands import Command, check_gone, model_directory, wait_until
from tests.support.pods_commands import DOWN, PROVISION, STATUS, argv_of, tiny_training

pytestmark = pytest.mark.pods

TIMEOUT_S = 240.0


def labels(directory: Path) -> dict[str, tuple[str, str]]:
    ledger = Ledger(directory / "here/state/diloco/pods.sqlite")
    try:
        return {row.name: (row.label, str(row.state)) for row in ledger.rows()}
    finally:
        ledger.close()


def epochs(directory: Path, label: str) -> dict[int, dict]:
    path = directory / "here/state/diloco/local" / PODS / label / "runs/peer/metrics.jsonl"
    records = Tail(path).read() if path.exists() else []
    return {one["epoch"]: one for one in records if one["kind"] == "epoch"}


def kill_all_of(label: str) -> int:
    """kill -9 every process of this pod. Returns how many there were."""
    wanted, number = f"{MARK}={label}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                number += 1
        except OSError:
            continue
    return number


@pytest.mark.parametrize("dies", ["pod-1", "pod-0"], ids=["a peer's", "the coordinator's"])
def test_a_pod_killed_by_kill_9_is_replaced_and_its_peer_is_back_on_the_same_bits(tmp_path, run, dies):
    flags = tiny_training(model_directory(tmp_path / "model"))
    up = run(PROVISION, "--replace", "--", *flags)
    assert up.code == 0, up.stderr
    before = labels(tmp_path)
    assert kill_all_of(before[dies][0]) > 1

    def is_replaced() -> bool:
        label, state = labels(tmp_path).get(dies, before[dies])
        return label != before[dies][0] and state == "running" and len(epochs(tmp_path, label)) >= 2

    log = tmp_path / "here/state/diloco/pods.sqlite.watch.log"
    wait_until(is_replaced, f"a pod in place of {dies} ({log})", TIMEOUT_S)
    after = labels(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {dies}
    assert "all its processes were killed; it is replaced" in log.read_text()

    found = [epochs(tmp_path, label) for label, _ in after.values()]
    common = set.intersection(*(set(one) for one in found))
    assert common and all(len({one[epoch]["anchor_digest"] for one in found}) == 1 for epoch in common)
    down = run(DOWN)
    assert down.code == 0, down.stderr
    check_gone(up)
    assert not (tmp_path / "here/state/diloco/local" / PODS).exists()
    # The results of the dead pod and of its replacement were both fetched.
    assert len(list((tmp_path / "here/runs").glob(f"*/{dies}*/runs/peer/metrics.jsonl"))) == 2


@pytest.mark.parametrize("how", ["fails", "is interrupted"])
def test_no_pod_is_replaced_after_a_command_that_did_not_succeed(tmp_path, commands, run, how):
    flags = tiny_training(model_directory(tmp_path / "model"))
    limit = 0.1 if how == "fails" else 600
    start = argv_of("diloco provision --pods 1 --replace --idle-stop --epoch-timeout", limit, "--", *flags)
    commands.append(Command(start, tmp_path / "here"))
    if how == "is interrupted":
        wait_until(lambda: labels(tmp_path), "a pod", TIMEOUT_S)
        commands[0].interrupt()
    assert commands[0].wait(TIMEOUT_S) == (1 if how == "fails" else 130)
    assert "Until the command has succeeded, no pod is replaced." in commands[0].stderr
    ledger = Ledger(tmp_path / "here/state/diloco/pods.sqlite")
    wanted = Wanted.read(ledger)
    ledger.close()
    assert wanted is not None and (wanted.replaces, wanted.stops_when_idle) == (False, True)
    assert run(DOWN).code == 0


def test_a_swarm_that_has_ended_gives_itself_back_once_its_results_are_here(tmp_path, run):
    flags = tiny_training(model_directory(tmp_path / "model"), **{"max-steps": 20})
    up = run("diloco provision --pods 2 --idle-stop", "--", *flags)
    assert up.code == 0, up.stderr
    log = tmp_path / "here/state/diloco/pods.sqlite.watch.log"
    wait_until(lambda: not labels(tmp_path), f"the end of both pods ({log})", TIMEOUT_S)
    check_gone(up)
    assert run(STATUS).stdout == "there are no pods\n"
    homes = sorted((tmp_path / "here/runs").glob("*/pod-*/runs/peer"))
    assert [home.parts[-3] for home in homes] == ["pod-0", "pod-1"]
    for home in homes:
        assert (home / "model/model.safetensors").stat().st_size > 0
        last = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()][-1]
        assert last["time"] > 0
