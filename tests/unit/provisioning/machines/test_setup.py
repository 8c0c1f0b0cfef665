from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from provisioning.errors import MachineError
from provisioning.machines import jobs, setup
from provisioning.machines.local import LocalMachine
from provisioning.machines.machine import Answer
from provisioning.machines.paths import pod_directory
from provisioning.machines.setup import Setup, make_environment, source_directory


def test_the_source_is_the_same_for_a_process_in_another_directory(tmp_path, monkeypatch):
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone/pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert source_directory(Path("clone")) == tmp_path / "clone"


class BreakingMachine(LocalMachine):
    """Its connection breaks at the second script, and returns at the next."""

    num_scripts = 0

    async def run(self, script: str, *, stdin: bytes = b"", timeout_s: float = 60.0) -> Answer:
        self.num_scripts += 1
        if self.num_scripts == 2:
            raise MachineError("the connection broke")
        return await super().run(script, stdin=stdin, timeout_s=timeout_s)


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the only pod of a machine at `tmp_path`."""
    monkeypatch.setattr(jobs, "_POLL_S", 0.02)
    directory = tmp_path / pod_directory("label")
    directory.mkdir(parents=True)
    return directory


def installs(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(setup, "environment_script", lambda *_, **__: script)


async def test_an_environment_outlives_a_broken_connection(pod, tmp_path, monkeypatch):
    installs(monkeypatch, "echo ran >>runs; sleep 0.1; echo done >>runs")
    machine = BreakingMachine(tmp_path)
    await make_environment(machine, "label", Setup(source=tmp_path), num_gpus=None)
    assert machine.num_scripts > 2
    assert (pod / "runs").read_text() == "ran\ndone\n"


async def test_two_installers_never_run_at_once_and_wait_for_no_job_of_the_pod(pod, tmp_path, monkeypatch):
    installs(monkeypatch, "mkdir busy || echo together >>runs; sleep 0.1; rmdir busy; echo done >>runs")
    machine, sources = LocalMachine(tmp_path), Setup(source=tmp_path)
    first = asyncio.create_task(make_environment(machine, "label", sources, num_gpus=None))
    while not (pod / "busy").exists():
        await asyncio.sleep(0.005)
    first.cancel()
    # The code may be sent again meanwhile.
    assert not await jobs.any_runs(machine, "label")
    await make_environment(machine, "label", sources, num_gpus=None)
    assert (pod / "runs").read_text() == "done\ndone\n"


async def test_a_failed_environment_says_why(pod, tmp_path, monkeypatch):
    installs(monkeypatch, "echo no matching distribution >&2; exit 3")
    machine = LocalMachine(tmp_path)
    with pytest.raises(MachineError, match=r"environment failed \(3\): no matching distribution"):
        await make_environment(machine, "label", Setup(source=tmp_path), num_gpus=None)
    assert not await jobs.any_runs(machine, "label")
    await jobs.start(machine, "label", "peer", ["sleep", "60"])
    assert await jobs.any_runs(machine, "label")
    await machine.run(jobs.sweep_script("label"))


async def test_an_installer_that_hangs_is_ended_on_its_pod_and_the_next_attempt_starts_anew(
    pod, tmp_path, monkeypatch
):
    monkeypatch.setattr(setup, "_INSTALL_TIMEOUT_S", 0.5)
    installs(monkeypatch, "echo ran >>runs; [ $(wc -l <runs) = 2 ] || { sleep 60; exit 3; }")
    machine, sources = LocalMachine(tmp_path), Setup(source=tmp_path)
    with pytest.raises(MachineError, match=r"environment took over 0\.5 s: no output"):
        await make_environment(machine, "label", sources, num_gpus=None)
    monkeypatch.setattr(setup, "_INSTALL_TIMEOUT_S", 60.0)
    await make_environment(machine, "label", sources, num_gpus=None)
    assert (pod / "runs").read_text() == "ran\nran\n"
