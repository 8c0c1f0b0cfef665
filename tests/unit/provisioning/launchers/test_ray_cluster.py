"""What a Ray cluster is started with, on pods of this machine whose Python only writes down how it was called."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from provisioning.launchers.ray_cluster import RayCluster, RayJob
from provisioning.launchers.ray_yaml import RayHost, cluster_yaml
from provisioning.machines import jobs
from provisioning.machines.local import LocalMachine
from provisioning.machines.paths import PODS, RAY_TOKEN
from provisioning.pods.pod import Pod

PYTHON = """#!/bin/sh
echo "$3 $RAY_AUTH_MODE $RAY_AUTH_TOKEN_PATH" >>"$(dirname "$0")/calls"
[ "$3" != status ] || printf 'Active:\\n 1 node_a\\n 1 node_b\\nPending:\\n'
"""


class Pods:
    """Pods with these labels, each with a home directory of its own; also the renter of all of them."""

    def __init__(self, home: Path, *labels: str) -> None:
        self.directories = [home / label / PODS / label for label in labels]
        self.rows = [SimpleNamespace(label=label, name=label, provider="local") for label in labels]
        self._home = home
        for directory in self.directories:
            directory.mkdir(parents=True)
            (directory / "python").write_text(PYTHON)
            (directory / "python").chmod(0o700)

    def __getitem__(self, provider: str) -> Pods:
        return self

    def say(self, *words: str) -> None: ...

    async def reached(self, row) -> tuple[LocalMachine, Pod]:
        pod = Pod(id=row.label, label=row.label, is_ready=True, host="127.0.0.1")
        return LocalMachine(self._home / row.label), pod

    def tokens(self) -> list[str]:
        return [(directory / RAY_TOKEN).read_text() for directory in self.directories]

    def calls(self, index: int) -> list[str]:
        return sorted(set((self.directories[index] / "calls").read_text().splitlines()))


@pytest.fixture
def pods(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "_POLL_S", 0.0)
    return Pods(tmp_path, "diloco-own-head", "diloco-own-node")


async def test_every_process_of_a_cluster_demands_or_gives_its_token(pods):
    cluster = RayCluster(pods, pods.rows, "./python")
    await cluster.start()
    job = RayJob(num_nodes=2, program=["train.py"], storage="/shared", use_gpu=False)
    assert await cluster.run(job) == 0
    head, node = (f"token {directory / RAY_TOKEN}" for directory in pods.directories)
    assert pods.calls(0) == [f"job {head}", f"start {head}", f"status {head}"]
    assert pods.calls(1) == [f"start {node}"]


async def test_all_nodes_have_one_token_that_only_their_user_reads_and_that_outlives_a_restart(pods):
    await RayCluster(pods, pods.rows[:1], "./python").send_token()
    await RayCluster(pods, pods.rows, "./python").send_token()
    first, second = pods.tokens()
    assert first == second and len(first) == 64
    assert {(directory / RAY_TOKEN).stat().st_mode & 0o777 for directory in pods.directories} == {0o600}
    await RayCluster(pods, pods.rows, "./python").send_token()
    assert pods.tokens() == [first, first]
    other = Pods(pods.directories[0] / "other", "diloco-other-head")
    await RayCluster(other, other.rows, "./python").send_token()
    assert other.tokens() != [first]


def test_the_file_for_rays_launcher_demands_the_token_and_does_not_hold_it():
    text = cluster_yaml(
        [RayHost(inside="10.0.0.1", outside="10.0.0.1"), RayHost(inside="10.0.0.2", outside="10.0.0.2")],
        owner="own",
        user="ada",
        key=Path("/key"),
        python="/usr/bin/python3",
        cpus=None,
    )
    values, demand = yaml.safe_load(text), f"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/{RAY_TOKEN} && "
    commands = [*values["head_start_ray_commands"], *values["worker_start_ray_commands"]]
    assert len(commands) == 2 and all(demand in command for command in commands)
    assert (
        f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$(echo ~/{PODS}/diloco-own-*)/{RAY_TOKEN}\n" in text
    )
