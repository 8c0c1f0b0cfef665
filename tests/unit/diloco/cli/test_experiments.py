"""`diloco experiments` in this process, on pods of this machine whose Python is a stand-in that fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco.cli import experiments
from diloco.cli.app import exit_code
from diloco.cli.state_files import state_file_of
from diloco.errors import FAILED
from provisioning.experiments import runs
from provisioning.experiments.runs import Result
from provisioning.ledger.ledger import Ledger
from provisioning.machines.paths import PODS
from provisioning.pods.pod import Row
from provisioning.renting.renter import Renter
from provisioning.renting.renters import Renters
from tests.support.pods_driver import source_of

SET = """
[[pods]]
name = "one"
provider = "local"

[[experiments]]
name = "first"
"""
FAILING = """#!/bin/sh
[ "$1" = -c ] && exit 0
echo "[/data/nothing] is not a file"
exit 3
"""
TRAINED = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$4" && echo '{"kind": "step", "step": 7, "loss": 2.5, "time": 1.0}' >"$4/metrics.jsonl"
"""
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(FILE, …)` runs a set of experiments with a Python that fails."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text(FAILING)
    python.chmod(0o755)
    (tmp_path / "set.toml").write_text(SET)
    words = ["--trainer", "pretrain", "--python", str(python), "--source", str(source_of(tmp_path)), "--yes"]
    return lambda name, *more: exit_code(["experiments", "run", name, *words, *more])


def pods_of(directory: Path) -> dict[str, list[str]]:
    """The names of the pods that are there, by state file."""
    found = {}
    for path in sorted((directory / "state/diloco/experiments").glob("*.sqlite")):
        ledger = Ledger(path)
        found[path.name] = [row.name for row in ledger.rows()]
        ledger.close()
    return found


def test_pods_are_given_back_though_the_log_looks_like_markup(run, tmp_path, capsys):
    assert run("set.toml", "--destroy") == FAILED
    said = capsys.readouterr()
    assert "[/data/nothing]" in said.out and "[/data/nothing] is not a file" in said.err
    assert list(pods_of(tmp_path).values()) == [[]]
    assert not (tmp_path / "state/diloco/local" / PODS).exists()


def test_pods_are_given_back_though_results_cannot_be_shown(run, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("no terminal")

    monkeypatch.setattr(experiments, "print_results", broken)
    assert run("set.toml", "--destroy") == FAILED
    assert list(pods_of(tmp_path).values()) == [[]]


def test_pods_are_given_back_though_renting_ended_midway_and_kept_where_nothing_was_agreed_to(
    run, tmp_path, monkeypatch
):
    assert run("set.toml", "--deploy-only") == 0

    def broken(*_: object, **__: object) -> None:
        raise OSError("no disk")

    for name, is_left in (("agreed_to", True), ("shown_plan", True), ("ensure_watcher", False)):
        with monkeypatch.context() as patch:
            patch.setattr(experiments, name, broken)
            assert run("set.toml", "--destroy") == FAILED
        assert list(pods_of(tmp_path).values()) == [["one"] if is_left else []]


@pytest.mark.parametrize(("flags", "left"), [(["--destroy"], [["two"], []]), ([], [["one", "two"]] * 2)])
def test_each_pod_is_given_back_after_its_last_experiment(run, tmp_path, monkeypatch, flags, left):
    (tmp_path / "set.toml").write_text(SET + SET.replace("one", "two").replace("first", "second"))
    seen = []

    async def ran(*words: Any) -> list[Result]:
        for name in ("one", "two"):
            await words[-1](name)
            seen.extend(pods_of(tmp_path).values())
        return []

    monkeypatch.setattr(runs, "run", ran)
    assert run("set.toml", *flags) == 0
    assert seen == left
    assert exit_code(["experiments", "destroy", "set.toml"]) == 0


def test_other_commands_may_change_the_pods_while_results_are_fetched(run, tmp_path, monkeypatch):
    fetched = list[str]()

    async def fetch(self: Renter, row: Row, **_: object) -> None:
        other = Ledger(self.ledger.path)
        with other.locked():
            fetched.append(row.name)
        other.close()

    monkeypatch.setattr(Renter, "fetch_results", fetch)
    (tmp_path / "python").write_text(TRAINED)
    assert run("set.toml", "--destroy") == 0
    assert fetched == ["one"] and list(pods_of(tmp_path).values()) == [[]]


@pytest.mark.parametrize("ends", ["other command", "Ctrl-C"])
def test_while_it_waits_for_another_command_the_event_loop_goes_on(run, tmp_path, monkeypatch, ends):
    monkeypatch.setattr(experiments, "_LOCK_WAIT_S", 5.0)
    monkeypatch.setattr(os, "_exit", lambda code: None)

    async def ran(pods: Renters, *words: Any) -> list[Result]:
        other = Ledger(pods.ledger.path)
        with other.locked():
            ended = asyncio.create_task(words[-1]("one"))
            for _ in range(100):
                await asyncio.sleep(0)
            assert not ended.done()
            if ends == "Ctrl-C":
                asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGINT)
                await ended
        await ended
        assert other.rows() == []
        other.close()
        return []

    monkeypatch.setattr(runs, "run", ran)
    monkeypatch.setattr(Renter, "fetch_results", lambda *_, **__: asyncio.sleep(0))
    assert run("set.toml", "--destroy") == (0 if ends == "other command" else 128 + signal.SIGINT)
    assert exit_code(["experiments", "destroy", "set.toml"]) == 0


def test_figures_of_no_known_form_are_left_out(run, tmp_path, capsys):
    (tmp_path / "python").write_text(TRAINED.replace("7", "1e999").replace("2.5", '"x"'))
    assert run("set.toml", "--destroy", "--json") == 0
    (result,) = json.loads(capsys.readouterr().out)["experiments"]
    assert (result["ok"], result["step"], result["figure"]) == (True, 0, None)
    assert list(pods_of(tmp_path).values()) == [[]]


def test_the_results_are_in_a_table(run, tmp_path, capsys):
    (tmp_path / "python").write_text(TRAINED)
    assert run("set.toml", "--destroy") == 0
    told = capsys.readouterr().out
    assert ["first", "one"] in [line.split()[:2] for line in told.splitlines()] and "2.5000" in told


def test_sets_of_two_files_of_one_name_keep_their_pods_apart(run, tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.toml").write_text(SET.replace('"one"', f'"{name}"'))
        assert run(f"{name}/sweep.toml", "--deploy-only") == 0
    assert sorted(pods_of(tmp_path).values()) == [["a"], ["b"]]
    # Another path to the same file names the same experiments.
    monkeypatch.chdir(tmp_path / "a")
    assert exit_code(["experiments", "destroy", "../a/sweep.toml"]) == 0
    assert sorted(pods_of(tmp_path).values()) == [[], ["b"]]
    assert exit_code(["experiments", "destroy", "../b/sweep.toml"]) == 0


def test_a_built_in_set_and_a_file_of_its_name_are_two():
    assert state_file_of("lr_sweep").name == "lr_sweep.sqlite"
    assert state_file_of("lr_sweep.toml").name != "lr_sweep.sqlite"
