"""The command that a Ray worker starts on its node, and a Ray job's GPUs by its pods. Ray need not be installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diloco.cli.launch_ray import check_reachable, ray_job
from diloco.errors import UserError
from diloco.launch.ray_node import rank_env, run_all, thread_env
from provisioning.launchers.job import LaunchJob
from provisioning.launchers.ray_cluster import RayJob
from provisioning.ledger.ledger import Ledger
from provisioning.pods.pod import Offer, Pod, PodSpec, Row


def job_on(directory: Path, *gpu_counts: int, nproc: str = "auto") -> RayJob:
    """A job on one pod for each count of GPUs; 0 is a pod without GPUs."""
    ledger = Ledger(directory / "pods.sqlite")
    rows = [_row(ledger, index, count) for index, count in enumerate(gpu_counts)]
    launch = LaunchJob(config=directory / "c.toml", num_nodes=len(rows), nproc_per_node=nproc)
    return ray_job(launch, "/shared", rows, ledger)


def _row(ledger: Ledger, index: int, num_gpus: int) -> Row:
    offer = Offer(
        id=str(index),
        provider="ssh",
        gpu_type="A100",
        gpu_count=num_gpus or 4,
        price_per_hour=0.0,
        is_cpu=num_gpus == 0,
    )
    return ledger.add(PodSpec(name=f"pod-{index}", provider="ssh"), offer, now=0.0)


def test_ranks_are_numbered_node_by_node():
    envs = [
        rank_env(node=node, num_nodes=2, local_rank=local, num_local=4, host="10.0.0.1", port=29500)
        for node in (0, 1)
        for local in range(4)
    ]
    assert [env["RANK"] for env in envs] == [str(rank) for rank in range(8)]
    assert {env["WORLD_SIZE"] for env in envs} == {"8"} and {env["LOCAL_WORLD_SIZE"] for env in envs} == {"4"}
    assert envs[6]["LOCAL_RANK"] == "2" and envs[6]["GROUP_RANK"] == "1"


@pytest.mark.parametrize(("given", "threads"), [(None, "3"), ("1", "3"), ("2", "2")])
def test_each_rank_gets_its_share_of_the_nodes_cores_though_ray_counts_one(given, threads, monkeypatch):
    monkeypatch.setattr("diloco.train.devices.num_cores", lambda: 24)
    environment = {"PATH": "/bin"} | ({"OMP_NUM_THREADS": given} if given else {})
    assert thread_env(environment, 8) == {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


def test_all_gpus_of_a_node_are_used_unless_fewer_are_asked_for(tmp_path):
    assert job_on(tmp_path, 8, 8).ranks_per_node == 8
    assert job_on(tmp_path / "two", 8, 8, nproc="2").ranks_per_node == 2
    on_cpus = job_on(tmp_path / "cpus", 0, 0)
    assert (on_cpus.ranks_per_node, on_cpus.use_gpu) == (1, False)


def test_nodes_of_different_sizes_are_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"they have: pod-0 8, pod-1 4\."):
        job_on(tmp_path, 8, 4)
    with pytest.raises(UserError, match=r"they have: pod-0 8, pod-1 0\."):
        job_on(tmp_path / "cpu", 8, 0)


def test_pods_whose_ports_are_mapped_cannot_be_nodes_of_one_cluster(tmp_path):
    row = _row(Ledger(tmp_path / "pods.sqlite"), 0, 1)
    pod = Pod(id="1", label="x", is_ready=True, host="203.0.113.1", ports=((30001, 41001),))
    with pytest.raises(UserError, match="pod-0 is behind a port mapping"):
        check_reachable(row, pod, num_nodes=2)
    check_reachable(row, pod, num_nodes=1)


SLEEPS = """
import os, pathlib, sys, time
new = pathlib.Path(sys.argv[1] + ".new")
new.write_text(str(os.getpid()))
new.rename(sys.argv[1])
time.sleep(600)
"""
FAILS = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
sys.exit(7)
"""


def test_the_first_rank_that_fails_ends_the_others(tmp_path):
    pid = tmp_path / "pid"
    code = run_all([([sys.executable, "-c", script, str(pid)], {}) for script in (SLEEPS, FAILS)])
    assert code == 7
    assert not Path("/proc", pid.read_text()).exists()
