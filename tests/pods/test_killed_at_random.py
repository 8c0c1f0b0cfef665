"""`diloco provision --pods 3` killed at ten random moments: the same command goes on, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from provisioning.machines.paths import PODS
from tests.support.commands import Command, check_gone, model_directory
from tests.support.pods_commands import DOWN, PROVISION, STATUS, argv_of, tiny_training

pytestmark = pytest.mark.pods

NUM_KILLS = 10
SEED = int(os.environ.get("DILOCO_KILL_SEED", "0"))
SHORTEST_S, LONGEST_S = 0.8, 5.0
"""Bounds on a command's life: shorter than the time until all three train, so that each gets a little further."""
LEAST_HITS = 4
"""The least number of kills that must come while the command runs."""


def test_killed_at_ten_random_moments_the_same_command_goes_on(tmp_path, commands, run):
    here = tmp_path / "here"
    provision = argv_of(PROVISION, "--", *tiny_training(model_directory(tmp_path / "model")))
    moments = random.Random(SEED)
    num_hits = 0
    for _ in range(NUM_KILLS):
        command = Command(provision, here)
        commands.append(command)
        ends_at = time.monotonic() + moments.uniform(SHORTEST_S, LONGEST_S)
        while command.code is None and time.monotonic() < ends_at:
            time.sleep(0.02)
        num_hits += command.code is None
        # Only the command is killed; the processes that it has started go on.
        command.send(signal.SIGKILL)
        command.process.wait()

    assert num_hits >= LEAST_HITS
    whole = run(provision)
    assert whole.code == 0, whole.stderr
    assert whole.stdout.splitlines()[-3:] == ["pod-0: running", "pod-1: running", "pod-2: running"]
    pods = sorted((here / "state/diloco/local" / PODS).iterdir())
    assert len(pods) == 3
    jobs = [path.parent.name for pod in pods for path in pod.rglob("jobs/*/pid")]
    assert sorted(jobs) == ["dht", "peer", "peer", "peer"]
    # Each job has one process, however often it was started.
    running = [line for one in commands for line in one.processes().values()]
    assert len([line for line in running if " -m diloco peer " in line and "forkserver" not in line]) == 3
    assert len([line for line in running if " -m diloco dht start " in line]) == 1
    found = json.loads(run(STATUS, "--json").stdout)
    assert [(one["name"], one["state"], one["peer"]) for one in found] == [
        (f"pod-{index}", "running", "trains") for index in range(3)
    ]

    assert run(DOWN).code == 0
    for command in commands:
        check_gone(command)
    assert not (here / "state/diloco/local" / PODS).exists()
    assert json.loads(run(STATUS, "--json").stdout) == []
    cost = json.loads(run("diloco pods cost", "--json").stdout)
    assert all(one["is_over"] for one in cost["pods"])
