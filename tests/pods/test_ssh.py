"""The user's own machines over real SSH: OpenSSH's server on loopback, or asyncssh's if that is not installed."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from provisioning.errors import HostKeyChanged, MachineError, UserError
from provisioning.ledger.keys import FETCH, RUN_DIR
from provisioning.machines.paths import PODS
from provisioning.machines.setup import Setup, make_environment, mount_of, send
from provisioning.machines.ssh import Address, SshMachine
from provisioning.pods.pod import PodSpec
from provisioning.providers.registry import Access
from provisioning.providers.ssh import SshProvider
from provisioning.renting.renter import Patience
from provisioning.swarm.status import overview
from tests.support.fleets import TestFleet, command
from tests.support.pods_driver import source_of
from tests.support.ssh_machines import (
    SSHD,
    SshHost,
    client_key,
    inventory,
    needs_rsync,
    ssh_host,
)

asyncssh = pytest.importorskip("asyncssh", reason="the package asyncssh is not installed")
pytestmark = pytest.mark.skipif(bool(needs_rsync()), reason=needs_rsync())

SPECS = [PodSpec(name=f"pod-{index}", provider="ssh", gpu_type=None, gpu_count=None) for index in (0, 1)]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return client_key(tmp_path)


@pytest.fixture
def hosts(tmp_path: Path, key: Path) -> Iterator[list[SshHost]]:
    with ExitStack() as stack:
        public = key.with_suffix(".pub").read_text()
        yield [stack.enter_context(ssh_host(tmp_path / f"machine{index}", public)) for index in (0, 1)]


@pytest.fixture
def fleet(tmp_path: Path, hosts: list[SshHost], key: Path) -> TestFleet:
    path = inventory(tmp_path / "machines.toml", hosts, key)
    return TestFleet(tmp_path, lambda: SshProvider(path))


@pytest.mark.pods
def test_one_pod_on_each_machine_and_nothing_left_of_it(fleet, hosts):
    assert fleet.up(SPECS).is_good, fleet.said
    assert fleet.states == {"pod-0": "running", "pod-1": "running"}
    for host in hosts:
        (pod,) = (host.home / PODS).iterdir()
        assert (pod / "code/pyproject.toml").exists()
        assert (pod / "swarm-secret").stat().st_mode & 0o077 == 0
    fleet.said.clear()
    assert fleet.up(SPECS).is_good
    assert not any("starting" in text or "sending" in text for text in fleet.said)
    with pytest.raises(UserError, match=r"No offer of ssh for pod pod-2"):
        fleet.up([*SPECS, PodSpec(name="pod-2", provider="ssh", gpu_type=None, gpu_count=None)])
    assert fleet.down().is_good
    assert [list(host.home.glob(f"{PODS}/*")) for host in hosts] == [[], []]


def test_a_machine_that_somebody_else_has_taken_is_not_offered(fleet, hosts):
    (hosts[0].home / PODS / "diloco-ffffffff-pod-0-1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"No offer"):
        fleet.up(SPECS)
    assert (hosts[0].home / PODS / "diloco-ffffffff-pod-0-1").exists()
    assert fleet.states == {}


def test_another_host_key_than_the_pinned_one_ends_it_before_anything_is_sent(tmp_path, hosts, key):
    other = " ".join(asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().split()[:2])
    path = inventory(tmp_path / "machines.toml", hosts, key, host_key=f'"{other}"')
    with pytest.raises(HostKeyChanged, match=r"another host key.*for your own, correct host_key"):
        TestFleet(tmp_path, lambda: SshProvider(path)).up(SPECS)
    assert not (hosts[0].home / PODS).exists()


@pytest.mark.pods
def test_a_host_key_that_nobody_pinned_is_shown_and_not_trusted(tmp_path, hosts, key, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = inventory(tmp_path / "machines.toml", hosts, key, host_key="")
    with pytest.raises(HostKeyChanged) as caught:
        TestFleet(tmp_path, lambda: SshProvider(path)).up(SPECS)
    assert f'host_key = "{hosts[0].host_key}"' in str(caught.value)
    (tmp_path / ".ssh").mkdir()
    known = "".join(f"[127.0.0.1]:{host.port} {host.host_key}\n" for host in hosts)
    (tmp_path / ".ssh/known_hosts").write_text(known)
    fleet = TestFleet(tmp_path, lambda: SshProvider(path))
    assert fleet.up(SPECS, trains=False).is_good
    assert fleet.down().is_good


@pytest.mark.exhaustive
def test_a_machine_that_does_not_answer_hides_no_other(fleet, ledger, hosts, key, tmp_path):
    """Its pod is not reported as given back, even when the machine is no longer in the inventory."""
    assert fleet.up(SPECS, trains=False).is_good, fleet.said
    pods = [next((host.home / PODS).iterdir()) for host in hosts]
    dead = replace(hosts[1], port=1)
    path = inventory(tmp_path / "machines.toml", [hosts[0], dead], key)
    access = Access(state_dir=tmp_path, environment={}, inventory=path)
    patience = Patience(poll_s=0.1, destroy_s=0.5)

    seen = asyncio.run(overview(ledger, access))
    by_name = {one.row.name: one for one in seen.pods}
    assert (by_name["pod-0"].is_there, by_name["pod-1"].is_there) == (True, None)
    assert "cannot be reached" in by_name["pod-1"].peer and list(seen.silent) == ["machine1"]
    failures = command(ledger, access, lambda found: found.settle(), patience)["ssh"]
    assert sorted(failures) == ["machine1", "pod-1"]

    # Plans can still be made: the pod on the dead machine is kept, and not replaced unasked.
    assert [row.name for row in command(ledger, access, lambda found: found.plan(SPECS), patience).keep] == [
        "pod-0",
        "pod-1",
    ]
    ledger.remember(RUN_DIR, str(tmp_path / "home"))
    ledger.remember(FETCH, "logs")
    assert list(command(ledger, access, lambda found: found.fetch_results(found.rows))) == ["pod-1"]
    ledger.remember(RUN_DIR, "")
    failures = command(ledger, access, lambda found: found.down(()), patience)
    assert list(failures) == ["pod-1"] and "MAY COST MONEY: machine1 does not answer" in str(
        failures["pod-1"]
    )
    assert not pods[0].exists() and pods[1].exists()

    inventory(path, hosts[:1], key)
    (shown,) = asyncio.run(overview(ledger, access)).pods
    assert (shown.row.name, shown.may_cost) == ("pod-1", True)
    failures = command(ledger, access, lambda found: found.down(()))
    assert "ssh knows no machine machine1 any more" in str(failures["pod-1"])
    for row in ledger.rows():
        ledger.forget(row, now=time.time())
    assert ledger.rows() == [] and pods[1].exists()


def test_a_key_that_others_can_read_is_not_used(fleet, key):
    key.chmod(0o644)
    with pytest.raises(UserError, match=r"Others can read the key file .* `chmod 600 "):
        fleet.up(SPECS)


def test_a_key_that_the_machine_does_not_know_is_said(tmp_path, hosts):
    (tmp_path / "other").mkdir()
    path = inventory(tmp_path / "machines.toml", hosts, client_key(tmp_path / "other"))
    with pytest.raises(UserError, match=r"does not accept the key"):
        TestFleet(tmp_path, lambda: SshProvider(path)).up(SPECS)


def test_without_rsync_here_nothing_begins(fleet, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"rsync is not on this machine"):
        fleet.up(SPECS)


@pytest.mark.pods
def test_without_rsync_there_it_says_what_is_missing(fleet, hosts):
    for host in hosts:
        host.install("rsync", "echo 'sh: rsync: command not found' >&2; exit 127")
    outcome = fleet.up(SPECS)
    assert all("there is no rsync on" in str(error) for error in outcome.failures.values()), outcome
    assert len(outcome.failures) == 2
    assert fleet.down().is_good


@asynccontextmanager
async def reached(host: SshHost, key: Path) -> AsyncIterator[SshMachine]:
    machine = SshMachine(
        Address(host="127.0.0.1", port=host.port, user=host.user, key_path=key, host_key=host.host_key)
    )
    try:
        yield machine
    finally:
        await machine.close()


def on(host: SshHost, key: Path, script: str) -> str:
    """The output of a script on this host."""

    async def work() -> str:
        async with reached(host, key) as machine:
            return (await machine.run(script)).checked(script)

    return asyncio.run(work())


@pytest.fixture
def on_small_disk(tmp_path: Path, hosts: list[SshHost], key: Path) -> Iterator[tuple[TestFleet, SshHost]]:
    """A fleet whose first machine has a disk of four megabytes."""
    if os.geteuid() != 0 or not Path(SSHD).exists():
        pytest.skip("only root can give OpenSSH's server a disk of its own")
    with ssh_host(tmp_path / "small", key.with_suffix(".pub").read_text(), disk_kb=4096) as small:
        path = inventory(tmp_path / "machines.toml", [small, hosts[0]], key)
        yield TestFleet(tmp_path, lambda: SshProvider(path)), small


def and_once_there_is_space(fleet: TestFleet, small: SshHost, key: Path) -> None:
    """With space on the disk, the same command succeeds."""
    on(small, key, f"mount -o remount,size=64m pods {PODS}")
    assert fleet.up(SPECS).is_good
    assert fleet.down().is_good
    assert on(small, key, f"ls -A {PODS}") == ""


@pytest.mark.pods
def test_a_full_disk_is_said_before_anything_is_sent_and_hides_no_other_pod(on_small_disk, key):
    fleet, small = on_small_disk
    fleet.min_free_mb = 8
    outcome = fleet.up(SPECS)
    assert list(outcome.failures) == ["pod-0"]
    said = r"the disk is full: [34] MB are free, 8 are needed; take a larger machine or volume"
    assert re.fullmatch(said, str(outcome.failures["pod-0"]))
    assert fleet.states == {"pod-0": "reachable", "pod-1": "synced"}
    and_once_there_is_space(fleet, small, key)


@pytest.mark.pods
def test_a_disk_that_fills_up_while_code_is_sent_is_said(on_small_disk, key, tmp_path):
    fleet, small = on_small_disk
    (source_of(tmp_path) / "weights").write_bytes(os.urandom(6_000_000))
    outcome = fleet.up(SPECS)
    assert list(outcome.failures) == ["pod-0"]
    where = f"{small.user}@127.0.0.1:{small.port}"
    assert str(outcome.failures["pod-0"]) == f"the disk of {where} is full; take a larger machine or volume"
    assert fleet.states == {"pod-0": "reachable", "pod-1": "synced"}
    and_once_there_is_space(fleet, small, key)


@pytest.mark.pods
def test_gpus_that_do_not_show_are_missed(tmp_path, hosts, key):
    path = inventory(tmp_path / "machines.toml", hosts, key, gpu_count="2")
    hosts[0].install("nvidia-smi", "echo 'NVIDIA A100, 81920 MiB'; echo 'NVIDIA A100, 81920 MiB'")
    hosts[1].install("nvidia-smi", "echo 'NVIDIA A100, 81920 MiB'")
    fleet = TestFleet(tmp_path, lambda: SshProvider(path))
    outcome = fleet.up(SPECS, trains=False)
    assert {name: str(error) for name, error in outcome.failures.items()} == {
        "pod-1": "nvidia-smi shows 1 GPUs, 2 were rented"
    }
    assert fleet.down().is_good


BACKEND = """
import pathlib, zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "nothing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(directory) / name, "w") as wheel:
        wheel.writestr("nothing.py", "VALUE = 7\\n")
        about = "Metadata-Version: 2.1\\nName: nothing\\nVersion: 1.0\\n"
        wheel.writestr("nothing-1.0.dist-info/METADATA", about)
        kind = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("nothing-1.0.dist-info/WHEEL", kind)
        wheel.writestr("nothing-1.0.dist-info/RECORD", "")
    return name
"""


@pytest.mark.pods
async def test_an_environment_is_made_once_by_pip_where_uv_fails(tmp_path, hosts, key):
    """The package has no requirements, so nothing is downloaded."""
    source = tmp_path / "package"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "nothing"\nversion = "1.0"\n'
    )
    (source / "backend.py").write_text(BACKEND)
    (source / "constraints.txt").write_text("")
    host = hosts[0]
    host.install("uv", 'echo "$@" >>"$HOME/asked"; exit 2')

    async with reached(host, key) as machine:
        setup = Setup(
            source=source,
            secrets={"WANDB_API_KEY": "it's a secret"},
            mounts=[mount_of(f"{source}:data/source"), mount_of(f"{source}/backend.py:data/one.py")],
            min_free_mb=1,
        )
        await send(machine, "label", setup, num_gpus=None)
        await make_environment(machine, "label", setup, num_gpus=None)
        python = setup.pod_python
        fingerprint = host.home / PODS / "label/venv/fingerprint"
        made_at = fingerprint.stat().st_mtime_ns
        await make_environment(machine, "label", setup, num_gpus=None)
        answer = await machine.run(
            f"cd {PODS}/label && . ./secrets.env && echo $WANDB_API_KEY && "
            f"{python} -c 'import nothing; print(nothing.VALUE)'"
        )
        assert answer.checked("using it") == "it's a secret\n7\n"
        assert (python, made_at) == ("venv/bin/python", fingerprint.stat().st_mtime_ns)
    asked = "pip install --quiet --python venv/bin/python --constraint code/constraints.txt --editable code"
    assert (host.home / "asked").read_text() == f"{asked} --torch-backend cpu\n{asked}\n"
    assert (host.home / PODS / "label/secrets.env").stat().st_mode & 0o077 == 0
    data = host.home / PODS / "label/data"
    assert (data / "source/backend.py").read_text() == (data / "one.py").read_text() == BACKEND


@pytest.mark.pods
async def test_a_connection_that_breaks_is_an_error_and_the_next_command_has_a_new_one(hosts, key):
    async with reached(hosts[0], key) as machine:
        with pytest.raises(MachineError, match=r"broke|killed"):
            # The parent is the SSH server's process for this session.
            await machine.run("kill -9 $PPID; sleep 5", timeout_s=20.0)
        assert (await machine.run("echo back")).stdout == "back\n"
        with pytest.raises(MachineError, match=r"longer than 0\.2 s"):
            await machine.run("sleep 30", timeout_s=0.2)
