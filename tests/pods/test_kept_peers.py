"""The same command again: peers that run are left as they are, and those that have ended get what was changed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from diloco.cli.app import exit_code
from provisioning.machines.paths import PODS
from provisioning.pods.pod import PodSpec
from provisioning.providers.local import LocalProvider
from provisioning.swarm.swarm import SwarmOptions
from tests.support.commands import wait_until
from tests.support.fleets import TestFleet
from tests.support.pods_driver import STAND_IN, source_of


def test_a_peer_that_runs_keeps_its_flags_and_says_so_where_others_are_given(tmp_path: Path):
    fleet = TestFleet(tmp_path, lambda: LocalProvider(tmp_path / "local"))
    spec = PodSpec(name="pod-0", provider="local", gpu_type="cpu-1", gpu_count=None)

    def said_with(*flags: str) -> list[str]:
        fleet.said.clear()
        assert fleet.up([spec], options=SwarmOptions(flags=flags, epoch_timeout_s=60.0)).is_good, fleet.said
        return [text for text in fleet.said if "its peer keeps the flags that it was started with" in text]

    try:
        assert said_with("--total-steps", "1200") == []
        assert said_with("--total-steps", "1200") == []
        (said,) = said_with("--total-steps", "100")
        assert said.startswith(
            "pod-0: its peer keeps the flags that it was started with: --total-steps 1200. "
        )
        assert "`diloco pods down` first" in said
        assert "started with: --total-steps 1200. " in said_with()[0]
    finally:
        assert fleet.down().is_good


def test_code_and_mounts_that_were_changed_reach_the_peers_that_have_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    pods = tmp_path / "state/diloco/local" / PODS
    source, data = source_of(tmp_path), tmp_path / "data.txt"
    data.touch()
    command = ["provision", "--pods", "2", "--source", str(source), "--python", str(STAND_IN)]

    def said_by(*words: str) -> str:
        assert exit_code([*words]) == 0
        return capsys.readouterr().err

    def pids() -> dict[Path, str]:
        return {path.parent: path.read_text().strip() for path in pods.glob("*/jobs/*/pid")}

    try:
        (source / "code.py").write_text("first")
        said_by(*command)
        first = pids()
        assert len(first) == 3
        (source / "code.py").write_text("second")
        assert "sending code" not in said_by(*command, "--mount", str(data)) and pids() == first
        # On the pod of the coordinator, which goes on.
        (dht,) = (job for job in first if job.name == "dht")
        peer = dht.with_name("peer")
        os.killpg(int(first[peer]), signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{first[peer]}").exists(), "the end of the peer")
        said = said_by(*command, "--mount", str(data))
        assert said.count("sending code") == said.count("starting its peer") == 1
        assert {job for job, pid in pids().items() if pid != first[job]} == {peer}
        assert [path.parent for path in pods.glob("*/data.txt")] == [peer.parents[1]]
        codes = {path.parents[1]: path.read_text() for path in pods.glob("*/code/code.py")}
        assert {pod for pod, code in codes.items() if code == "second"} == {peer.parents[1]}
    finally:
        said_by("pods", "down")
