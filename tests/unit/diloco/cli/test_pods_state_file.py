"""Commands on pods need the state file that lists the pods: a mistyped file name is an error, not a success."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from diloco.cli.app import exit_code
from diloco.errors import USER_ERROR
from provisioning.ledger.keys import WANTED
from provisioning.ledger.ledger import Ledger
from provisioning.machines.paths import PODS
from provisioning.pods.pod import Offer, PodSpec, Row, State

WITHOUT = [
    "pods down --state-file typo.sqlite",
    "pods cost --state-file typo.sqlite",
    "experiments destroy lr_swep",
    "experiments destroy --state-file typo.sqlite",
    "experiments destroy",
]


@pytest.mark.parametrize("command", WITHOUT)
def test_without_a_state_file_nothing_is_said_to_be_done(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert exit_code(command.split()) == USER_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert "There is no state file" in said or "Say which" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["pods logs", "pods down"])
def test_that_there_are_no_pods_is_said(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert exit_code(command.split()) == 0
    assert f"there are no pods in {tmp_path}" in capsys.readouterr().err


def planned(path, name: str, *, ttl_hours: float | None = None) -> tuple[Ledger, Row]:
    """A pod of this machine, in a state file that may be new."""
    ledger = Ledger(path)
    offer = Offer(id="cpu-1", provider="local", gpu_type="cpu-1", gpu_count=1, price_per_hour=2.5)
    return ledger, ledger.add(PodSpec(name=name, provider="local", ttl_hours=ttl_hours), offer, now=0.0)


def test_other_state_files_with_pods_are_named_with_what_to_type(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    sets = tmp_path / "diloco/experiments"
    with_pod, row = planned(sets / "lr_sweep.sqlite", "lr-sweep-0")
    with_pod.set_pod(with_pod.advance(row, State.CREATING), "machine/label", None)
    planned(sets / "only-planned.sqlite", "x")
    Ledger(sets / "empty.sqlite")
    (sets / "broken.sqlite").write_text("no database at all")
    watched: list[Path] = []
    monkeypatch.setattr("diloco.cli.state_files.ensure_watcher", lambda one: watched.append(one.path))
    for command in ("pods status", "pods down"):
        assert exit_code(command.split()) == 0
        said = capsys.readouterr().err
        file = sets / "lr_sweep.sqlite"
        assert f"{file} holds lr-sweep-0, 2.50 $/h: `diloco {command} --state-file {file}`" in said
        assert "only-planned" not in said and "empty" not in said
        assert "broken.sqlite cannot be used" in said
    assert watched == [sets / "lr_sweep.sqlite"] * 2
    assert exit_code(["pods", "status", "--state-file", str(sets / "empty.sqlite")]) == 0
    assert "lr_sweep" not in capsys.readouterr().err


def test_a_pod_without_an_end_does_not_keep_others_from_being_extended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "pods.sqlite"
    words = ["--hours", "1", "--state-file", str(path)]
    planned(path, "endless")
    assert exit_code(["pods", "extend", *words]) == USER_ERROR
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    give_back = f"diloco pods down endless --state-file {path}"
    assert f"no end time to extend: endless. Pods without an end time stay until `{give_back}`" in said
    ledger, _ = planned(path, "ending", ttl_hours=1e6)
    monkeypatch.setattr("diloco.cli.pods.ensure_watcher", lambda _: None)
    assert exit_code(["pods", "extend", *words]) == 0
    assert {row.name: row.ends_at for row in ledger.rows()} == {"endless": None, "ending": 3.6e9 + 3600}
    assert "no end time to extend: endless" in capsys.readouterr().err
    assert exit_code(["pods", "extend", "ending", "endless", *words]) == USER_ERROR


@pytest.mark.parametrize(
    ("is_interrupted", "code", "events"),
    [
        (False, 0, ["stopped", "runs, replaces nothing", "pods given back", "runs, replaces nothing"]),
        (True, 130, ["stopped", "runs, replaces pods"]),
    ],
)
def test_while_pods_are_given_back_and_after_an_interruption_a_watcher_runs(
    is_interrupted, code, events, tmp_path, monkeypatch
):
    done = list[str]()
    ledger, _ = planned(tmp_path / "pods.sqlite", "pod-0", ttl_hours=1e6)
    ledger.remember(WANTED, json.dumps({"specs": [{"name": "pod-0"}]}))

    def stop(_: Path) -> None:
        done.append("stopped")
        if is_interrupted:
            os.kill(os.getpid(), signal.SIGINT)

    async def give_back(*_: object, **__: object) -> int:
        done.append("pods given back")
        return 0

    # An interrupted command that has not ended seconds later is ended by a timer, here in the tests' process.
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr("provisioning.swarm.watcher.stop", stop)
    monkeypatch.setattr("diloco.cli.provision.given_back", give_back)
    monkeypatch.setattr(
        "diloco.cli.provision.ensure_watcher",
        lambda one: done.append(f"runs, replaces {'pods' if one.recall(WANTED) else 'nothing'}"),
    )
    assert exit_code(["pods", "down", "--state-file", str(ledger.path)]) == code
    assert done == events
    ledger.close()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("pods down --fetch=", "--fetch is empty"),
        ("pods fetch --fetch=,", "--fetch is empty"),
        ("provision --pods 1 --provider=", "It has no value"),
        ("provision --offers --provider=,", "It has no value"),
        ("experiments run lr_sweep --provider=", "It has no value"),
        ("provision --pods 1 --ttl-hours 0", 'Invalid value "0.0" for --ttl-hours'),
    ],
)
def test_a_value_that_says_nothing_is_refused(command, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert exit_code(command.split()) == USER_ERROR
    assert said in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_that_there_are_no_pods_is_said_after_what_providers_had(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ledger, row = planned(tmp_path / "diloco/pods.sqlite", "pod-0")
    # A local pod that this file ordered and lost track of.
    directory = tmp_path / "diloco/local" / PODS / row.label
    directory.mkdir(parents=True)
    (directory / "pod.json").write_text(json.dumps({"label": row.label}))
    ledger.forget(row, now=1.0)
    assert exit_code(["pods", "down"]) == 0
    said = capsys.readouterr().err
    assert said.index("given back") < said.index("there are no pods in")
    assert not directory.exists()
