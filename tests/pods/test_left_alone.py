"""Paid pods end in time whatever happens to the machine that rented them. With Lambda's emulator: Lambda itself ends
no instance.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioning.ledger.keys import WANTED, WATCHED
from provisioning.ledger.ledger import Ledger
from provisioning.pods.pod import PodSpec, State
from provisioning.providers.lambda_cloud import LambdaProvider
from provisioning.providers.registry import Access
from provisioning.swarm import watcher
from tests.support.commands import wait_until
from tests.support.lambda_api import KEY, LambdaApi
from tests.support.pods_commands import DOWN, STATUS
from tests.support.ssh_machines import SshHost

pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
pytest.importorskip("httpx", reason="the package httpx is not installed")
pytestmark = pytest.mark.pods

HOLDS_THE_LOCK = """
import sys, time, pathlib
from provisioning.ledger.ledger import Ledger
with Ledger(pathlib.Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LambdaApi]:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "machine").mkdir()
    with LambdaApi([SshHost(tmp_path / "machine", 1, "nobody", "")]) as api:
        for name, value in api.environment.items():
            monkeypatch.setenv(name, value)
        yield api


@pytest.fixture
def state_file(tmp_path: Path) -> Iterator[Path]:
    """A state file on its own disk of one megabyte."""
    disk = tmp_path / "here/state/diloco"
    disk.mkdir(parents=True)
    if os.geteuid() != 0:
        pytest.skip("only root can make a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        yield disk / "pods.sqlite"
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def rented(api: LambdaApi, state_file: Path, *, for_s: float) -> Ledger:
    """Rent a pod and return its ledger, in which the pod is reachable."""
    ledger = Ledger(state_file)

    async def rent() -> None:
        provider = LambdaProvider(api.environment, state_file.with_name("key"))
        offer = (await provider.offers())[0]
        spec = PodSpec(name="pod-0", provider="lambda", ttl_hours=for_s / 3600)
        row = ledger.advance(ledger.add(spec, offer, now=time.time()), State.CREATING)
        row = ledger.set_pod(row, await provider.create(row), None)
        ledger.advance(row, State.REACHABLE)
        await provider.close()

    asyncio.run(rent())
    return ledger


def living(api: LambdaApi) -> list[str]:
    return [name for name, one in api.instances.items() if not one["_ended"]]


def watch(api: LambdaApi, ledger: Ledger) -> None:
    """Run the watcher until no instance is rented."""
    deadline = time.monotonic() + 60
    access = Access(state_dir=ledger.path.parent, environment=api.environment)

    def is_over() -> bool:
        assert time.monotonic() < deadline
        return not living(api)

    asyncio.run(watcher.watch(ledger, access, _say_on(ledger.path), interval_s=0.2, stop=is_over))


def _say_on(state_file: Path):
    log = state_file.with_name("log").open("w")

    def say(name: str, text: str) -> None:
        print(name, text, file=log, flush=True)

    return say


def fill(disk: Path) -> Path:
    path = disk / "ballast"
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"\0" * 1024)
    return path


def test_a_full_disk_keeps_no_pod_whose_time_is_over(api, state_file, monkeypatch):
    ledger = rented(api, state_file, for_s=3.0)
    ballast = fill(state_file.parent)
    monkeypatch.setattr("provisioning.swarm.watcher._OVERDUE_S", 1.0)
    watch(api, ledger)
    assert [row.state for row in ledger.rows()] == [State.REACHABLE]
    ballast.unlink()
    ledger.close()


def test_a_full_disk_does_not_keep_pods_that_somebody_gives_back(api, state_file, run):
    ledger = rented(api, state_file, for_s=3600.0)
    ballast = fill(state_file.parent)
    first = run(DOWN)
    assert first.code == 1 and "cannot be written" in first.stderr and living(api) == [], first.stderr
    ballast.unlink()
    # Lambda may not list a new instance yet, so the order is backdated by ten minutes.
    (row,) = ledger.rows()
    ledger.advance(row, row.state, asked_at=time.time() - 600)
    assert run(DOWN).code == 0
    assert ledger.rows() == []
    ledger.close()


def test_a_command_that_was_stopped_while_it_held_the_ledger_keeps_no_pod(api, state_file, monkeypatch):
    ledger = rented(api, state_file, for_s=3.0)
    other = subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK, str(state_file)], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        other.send_signal(signal.SIGSTOP)
        monkeypatch.setattr("provisioning.swarm.watcher._OVERDUE_S", 1.0)
        watch(api, ledger)
    finally:
        other.kill()
        other.wait()
    assert [row.state for row in ledger.rows()] == [State.REACHABLE]
    ledger.close()


def test_what_watches_is_there_again_after_a_down_in_another_commands_turn(api, state_file, run):
    ledger = rented(api, state_file, for_s=3600.0)
    # Written as by another version: it cannot be read which pods to replace, but it is known which ones to end.
    ledger.remember(WANTED, json.dumps({"specs": [{"name": "pod-0"}]}))
    assert run(STATUS).code == 0
    wait_until(lambda: watcher.running_pid(state_file) is not None, "the process that watches")
    first = watcher.running_pid(state_file)
    with ledger.locked():
        said = run(DOWN)
        assert said.code == 2 and "Another command" in said.stderr
    wait_until(lambda: watcher.running_pid(state_file) not in (None, first), "another one")
    assert "pod-0" in ledger.recall(WANTED) and len(living(api)) == 1
    ledger.remember(WANTED, "")
    ledger.close()


def test_what_watches_without_a_key_makes_way_once_a_command_has_one(api, state_file, run, monkeypatch):
    ledger = rented(api, state_file, for_s=3600.0)

    def status(key: str) -> int:
        monkeypatch.setenv("LAMBDALABS_API_KEY", key)
        assert run(STATUS).code == 0
        wait_until(lambda: watcher.running_pid(state_file) is not None, "the process that watches")
        return watcher.running_pid(state_file) or 0

    blind = status("")
    assert status("") == blind
    seeing = status(KEY)
    assert seeing != blind
    wait_until(lambda: ledger.recall(WATCHED) == "lambda", "that it has opened the provider")
    assert status("") == seeing
    ledger.close()
