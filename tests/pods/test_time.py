"""Pods are given back when their time is over, also when this machine was off in between."""

from __future__ import annotations

import json
import os
import signal

import pytest

from provisioning.machines.paths import PODS
from provisioning.swarm import watcher
from tests.support.commands import Command, check_gone, wait_until
from tests.support.pods_commands import STATUS, argv_of

pytestmark = pytest.mark.pods

TTL_HOURS = 0.012


def test_a_pod_is_given_back_in_time_though_the_process_that_watches_was_lost(tmp_path, commands):
    def run(text: str, *more: str) -> Command:
        commands.append(Command(argv_of(text, *more), tmp_path / "here"))
        assert commands[-1].wait(60) == 0, commands[-1].stderr
        return commands[-1]

    up = run(f"diloco provision --pods 2 --deploy-only --ttl-hours {TTL_HOURS}")
    assert "gives back pods whose time is over" in up.stderr
    state_file = tmp_path / "here/state/diloco/pods.sqlite"
    wait_until(lambda: watcher.running_pid(state_file) is not None, "the process that watches")
    first = watcher.running_pid(state_file)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: watcher.running_pid(state_file) is None, "the end of what watches")
    # The next command, whichever it is, starts the watcher again.
    assert len(json.loads(run(STATUS, "--json").stdout)) == 2
    wait_until(lambda: watcher.running_pid(state_file) not in (None, first), "another one that watches")
    pods = tmp_path / "here/state/diloco/local" / PODS
    assert len(list(pods.iterdir())) == 2
    wait_until(lambda: not pods.exists(), "the end of both pods")
    check_gone(up)
    cost = json.loads(run("diloco pods cost", "--json").stdout)
    assert [one["is_over"] for one in cost["pods"]] == [True, True]
    assert all(one["hours"] >= TTL_HOURS for one in cost["pods"])
