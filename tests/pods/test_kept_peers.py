"""The same command with other flags behind `--`: running peers keep their flags, and the command says so."""

from __future__ import annotations

from pathlib import Path

from provisioning.pods.pod import PodSpec
from provisioning.providers.local import LocalProvider
from provisioning.swarm.swarm import SwarmOptions
from tests.support.fleets import TestFleet


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
