"""A pod's results are fetched before the pod is given back; if that fails, the pod stays and the command says so."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from provisioning.errors import ResultsNotFetched, UserError
from provisioning.machines.local import LocalMachine
from provisioning.machines.paths import PODS
from provisioning.machines.results import fetch_results, patterns_of
from provisioning.machines.setup import mount_of, secrets_of
from provisioning.pods.pod import PodSpec
from provisioning.providers.local import LocalProvider
from provisioning.providers.ssh import SshProvider
from tests.support.fleets import TestFleet
from tests.support.ssh_machines import client_key, inventory, needs_rsync, ssh_host

Home = tuple[TestFleet, PodSpec, Path]


@pytest.fixture(params=["local", "ssh"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Home]:
    """A fleet, the pod that it rents, and the home directory of the machine that the pod is on."""
    run_dir = tmp_path / "run"
    if request.param == "local":
        fleet = TestFleet(tmp_path, lambda: LocalProvider(tmp_path / "local"), run_dir=run_dir)
        yield (
            fleet,
            PodSpec(name="pod-0", provider="local", gpu_type="cpu-1", gpu_count=None),
            tmp_path / "local",
        )
        return
    if needs_rsync():
        pytest.skip(needs_rsync())
    key = client_key(tmp_path)
    with ssh_host(tmp_path / "host", key.with_suffix(".pub").read_text()) as host:
        path = inventory(tmp_path / "machines.toml", [host], key)
        fleet = TestFleet(tmp_path, lambda: SshProvider(path), run_dir=run_dir)
        yield fleet, PodSpec(name="pod-0", provider="ssh", gpu_type=None, gpu_count=None), host.home


def trained(home: Path, weights: str) -> Path:
    """Put the files of a finished peer on the only pod in `home`. Returns the pod's directory."""
    (pod,) = (home / PODS).glob("*/")
    for name, text in {
        "runs/peer/metrics.jsonl": "{}\n",
        "runs/peer/config.toml": "lr = 1\n",
        "runs/peer/logs/daemon.log": "said\n",
        "runs/peer/model/model.safetensors": weights,
        "jobs/peer/log": "trains\n",
        "checkpoints/big": "x",
        "secrets.env": "KEY=value\n",
    }.items():
        (pod / name).parent.mkdir(parents=True, exist_ok=True)
        (pod / name).write_text(text)
    (pod / "runs/peer/model/leads-away").symlink_to("/etc")
    return pod


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())


def test_logs_metrics_and_the_model_come_home_and_no_secret_or_link(home: Home):
    fleet, spec, there = home
    assert fleet.up([spec], trains=False).is_good, fleet.said
    trained(there, "weights")
    assert fleet.down().is_good, fleet.said
    assert isinstance(fleet.run_dir, Path)
    assert files_in(fleet.run_dir) == [
        "pod-0/jobs/peer/log",
        *(f"pod-0/runs/peer/{name}" for name in ("config.toml", "logs/daemon.log", "metrics.jsonl")),
        "pod-0/runs/peer/model/model.safetensors",
    ]
    assert not (there / PODS).exists()
    assert f"pod-0: its results are in {fleet.run_dir / 'pod-0'}: logs, metrics, model" in fleet.said


@pytest.mark.exhaustive
def test_a_pod_whose_results_cannot_be_fetched_stays_until_somebody_says_so(home: Home):
    fleet, spec, there = home
    assert fleet.up([spec], trains=False).is_good, fleet.said
    pod = trained(there, "weights")
    assert isinstance(fleet.run_dir, Path)
    # A file is where the results' directory should be.
    fleet.run_dir.write_text("")
    failure = fleet.down().failures["pod-0"]
    assert isinstance(failure, ResultsNotFetched) and "`diloco pods down --yes pod-0`" in str(failure)
    assert fleet.states == {"pod-0": "synced"} and pod.exists()
    fleet.discard_results = True
    assert fleet.down().is_good
    assert fleet.states == {} and not pod.exists()


@pytest.mark.exhaustive
def test_a_later_pod_of_the_same_name_does_not_overwrite_what_the_first_one_made(home: Home):
    fleet, spec, there = home
    for weights in ("first", "second"):
        assert fleet.up([spec], trains=False).is_good, fleet.said
        trained(there, weights)
        assert fleet.down().is_good, fleet.said
    assert isinstance(fleet.run_dir, Path)
    found = sorted(path.read_text() for path in fleet.run_dir.glob("*/runs/peer/model/model.safetensors"))
    assert found == ["first", "second"]


@pytest.mark.exhaustive
def test_a_pod_that_is_gone_is_no_reason_to_keep_anything(home: Home):
    fleet, spec, there = home
    assert fleet.up([spec], trains=False).is_good, fleet.said
    shutil.rmtree(trained(there, "weights"))
    assert fleet.down().is_good
    assert fleet.states == {} and any("results cannot be fetched" in text for text in fleet.said)


@pytest.mark.parametrize("word", ["/etc", "../x", "a/../../b", "model;rm", "$HOME", "-rf", ""])
def test_a_word_that_leads_out_of_the_pod_is_refused(word: str):
    with pytest.raises(UserError, match="--fetch"):
        patterns_of([word])


def test_a_path_below_the_pod_may_be_named(tmp_path: Path):
    pod = tmp_path / PODS / "label"
    (pod / "checkpoints/model_step_5").mkdir(parents=True)
    (pod / "checkpoints/model_step_5/a").write_text("whole")
    fetched = asyncio.run(
        fetch_results(
            LocalMachine(tmp_path),
            "label",
            ["checkpoints/*_5", "logs"],
            str(tmp_path / "into"),
            asyncio.Semaphore(),
        )
    )
    assert fetched == f"its results are in {tmp_path / 'into'}: checkpoints/*_5, no logs"
    assert files_in(tmp_path / "into") == ["checkpoints/model_step_5/a"]


def test_results_go_to_any_url_that_fsspec_knows_and_one_that_takes_none_keeps_the_pod(tmp_path: Path):
    files = fsspec.filesystem("memory")
    fleet = TestFleet(tmp_path, lambda: LocalProvider(tmp_path / "local"), run_dir="nowhere://results")
    spec = PodSpec(name="pod-0", provider="local", gpu_type="cpu-1", gpu_count=None)
    assert fleet.up([spec], trains=False).is_good, fleet.said
    trained(tmp_path / "local", "weights")
    assert "nowhere://results/pod-0 is no place for results" in str(fleet.down().failures["pod-0"])
    fleet.run_dir = f"memory://{tmp_path.name}/run/"
    assert fleet.down().is_good, fleet.said
    root = f"/{tmp_path.name}/run/pod-0"
    assert files.cat_file(f"{root}/runs/peer/model/model.safetensors") == b"weights"
    assert len(files.find(root)) == 5
    files.rm(f"/{tmp_path.name}", recursive=True)


def test_secrets_that_are_not_set_and_files_that_are_not_there_are_said(tmp_path: Path):
    assert secrets_of({"MINE": "x", "OTHER": "y"}, ["MINE"]) == {"MINE": "x"}
    with pytest.raises(UserError, match="--secret MINE: there is no such variable"):
        secrets_of({}, ["MINE"])
    with pytest.raises(UserError, match="is not there"):
        mount_of(str(tmp_path / "nothing"))
    for place in ("/etc/x", "../x", "code", "secrets.env"):
        with pytest.raises(UserError, match="not a free path"):
            mount_of(f"{tmp_path}:{place}")
