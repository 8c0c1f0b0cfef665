"""kill -9 of the command at each state of a pod, then the same command again: no pod is leaked or duplicated."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provisioning.ledger.ledger import Ledger
from provisioning.machines.paths import MARK, PODS
from provisioning.pods.pod import State
from tests.support.commands import ROOT, Command
from tests.support.exhaustive import exhaustive_but

UP = (
    *(State.PLANNED, State.CREATING, "created", State.BOOTING, State.REACHABLE, State.SYNCED, "dht", "peer"),
    State.RUNNING,
)
DOWN = (State.DELETING, "destroyed", State.GONE)
KILLED = 128 + 9

Drive = Callable[..., Command]


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """`drive("up", point)` runs the driver to its end; processes left on its pods are ended after the test."""
    commands: list[Command] = []

    def make(what: str, point: str = "") -> Command:
        argv = [sys.executable, "-m", "tests.support.pods_driver", what, str(tmp_path), point]
        commands.append(Command(argv, tmp_path / f"command{len(commands)}", cwd=ROOT))
        commands[-1].wait(300)
        return commands[-1]

    yield make
    for command in commands:
        command.close()


def rows(directory: Path) -> list[tuple[str, str]]:
    ledger = Ledger(directory / "pods.sqlite")
    try:
        return sorted((row.name, str(row.state)) for row in ledger.rows())
    finally:
        ledger.close()


def pods(directory: Path) -> list[str]:
    """The pods that exist, whatever the ledger says, by the names in their labels."""
    found = (directory / "local" / PODS).glob("*/pod.json")
    return sorted("-".join(json.loads(path.read_text())["label"].split("-")[2:4]) for path in found)


def jobs(directory: Path) -> Counter[str]:
    """The number of processes that run on pods, by kind."""
    found: Counter[str] = Counter()
    prefix = str(directory).encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if MARK.encode() not in (process / "environ").read_bytes():
                continue
            here = str((process / "cwd").readlink()).encode().startswith(prefix)
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if here and words[0] == b"sh":
            found[words[2].decode().rpartition("/")[2]] += 1
    return found


def test_the_points_are_all_the_states_there_are():
    assert {state for state in State} <= {*UP, *DOWN}


@pytest.mark.parametrize("point", exhaustive_but((State.CREATING, "peer"), UP))
def test_killed_on_the_way_up_the_same_command_makes_it_whole(drive, tmp_path, point):
    assert drive("up", point).code == KILLED
    again = drive("up")
    assert again.code == 0, again.stderr
    wanted = ["pod-1", "pod-2", "pod-4"]
    assert rows(tmp_path) == [(name, "running") for name in wanted]
    assert pods(tmp_path) == wanted
    assert jobs(tmp_path) == {"dht": 1, "peer": 3}
    down = drive("down")
    assert down.code == 0, down.stderr
    assert (rows(tmp_path), pods(tmp_path), jobs(tmp_path)) == ([], [], {})


@pytest.mark.parametrize("point", exhaustive_but((State.DELETING,), DOWN))
def test_killed_on_the_way_down_the_same_command_leaves_nothing(drive, tmp_path, point):
    assert drive("up").code == 0
    assert drive("down", point).code == KILLED
    again = drive("down")
    assert again.code == 0, again.stderr
    assert (rows(tmp_path), pods(tmp_path), jobs(tmp_path)) == ([], [], {})
    assert not (tmp_path / "local" / PODS).exists()


@pytest.mark.pods
@pytest.mark.parametrize("point", [State.DELETING, "destroyed"])
def test_killed_on_the_way_down_going_up_gives_back_before_it_rents_anew(drive, tmp_path, point):
    assert drive("up").code == 0
    assert drive("down", point).code == KILLED
    again = drive("up")
    assert again.code == 0, again.stderr
    assert pods(tmp_path) == ["pod-1", "pod-2", "pod-4"]
    assert jobs(tmp_path) == {"dht": 1, "peer": 3}
    assert drive("down").code == 0
    assert (rows(tmp_path), pods(tmp_path), jobs(tmp_path)) == ([], [], {})


def test_the_same_command_again_changes_nothing(drive, tmp_path):
    assert drive("up").code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "local").rglob("pid")}
    again = drive("up")
    assert again.code == 0 and "starting" not in again.stderr and "sending" not in again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "local").rglob("pid")}
    assert drive("down").code == 0
