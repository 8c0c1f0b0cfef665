"""`diloco launch` on nodes that are this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from benchmarks.chaos.links import free_port
from diloco.train.metrics_file import Tail
from provisioning.launchers import node as this_node
from provisioning.launchers.job import LaunchJob, default_interface, network_env, torchrun_argv
from tests.support.commands import (
    DILOCO,
    ROOT,
    Command,
    check_gone,
    coordinator_at,
    digests_of,
    model_directory,
    records_of,
    text_of_boxes,
    wait_until,
)

SCRIPT = ROOT / "tests/support/all_reduce.py"
LAUNCH = (sys.executable, "-m", "diloco", "launch")
LOGS = Path("logs/distributed_training")
PROGRAM = (f"--program={SCRIPT}", "--config-flag=")


@pytest.fixture
def cpus(monkeypatch):
    for name, value in {"BACKEND": "gloo", "NPROC_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)


def config(directory: Path, text: str = "seed = 7\n", name: str = "config.toml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


@pytest.mark.pods
def test_two_nodes_find_each_other_and_each_has_its_log(tmp_path, cpus):
    path, port = config(tmp_path), free_port()
    nodes = [
        Command(
            [*LAUNCH, str(path), "2", str(rank), "127.0.0.1", str(port), *PROGRAM, "--", "mine"],
            tmp_path / str(rank),
        )
        for rank in (1, 0)
    ]
    for rank, node in zip((1, 0), nodes, strict=True):
        assert node.wait() == 0, node.stdout + node.stderr
        latest = node.directory / LOGS / f"latest_node{rank}.log"
        assert latest.is_symlink() and latest.resolve().name.startswith("cluster_train_")
        assert (
            f"rank {rank} of 2: 3 mine" in latest.read_text() and f"rank {rank} of 2: 3 mine" in node.stdout
        )


@pytest.mark.pods
def test_our_own_trainer_runs_with_the_processes_asked_for(tmp_path, cpus, monkeypatch):
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    model = model_directory(tmp_path / "model")
    values = {
        "path_model": str(model),
        **{"fake_data": True, "seq_length": 64, "total_batch_size": 4, "eval_tokens": 64, "max_steps": 2},
        **{
            "run_dir": str(tmp_path / "run"),
            "device": "cpu",
            "ckpt": {"path": "outputs"},
        },
    }
    command = Command([*LAUNCH, str(config(tmp_path, tomli_w.dumps(values)))], tmp_path / "node")
    assert command.wait() == 0, command.stdout + command.stderr
    steps = [
        record["step"] for record in Tail(tmp_path / "run/metrics.jsonl").read() if record["kind"] == "step"
    ]
    assert steps == [1, 2]


@pytest.mark.exhaustive
def test_two_nodes_are_one_peer_of_a_swarm(tmp_path, cpus, commands):
    def start(*argv: str, name: str) -> Command:
        commands.append(Command(argv, tmp_path / name))
        return commands[-1]

    maddr, port = coordinator_at(start), free_port()
    values = {
        **{"fake_data": True, "seq_length": 64, "total_batch_size": 8, "per_device_train_batch_size": 4},
        **{"eval_tokens": 64, "max_steps": 6, "device": "cpu", "sharding_strategy": "HYBRID_SHARD"},
        "path_model": str(model_directory(tmp_path / "model")),
        "run_dir": str(tmp_path / "nodes"),
    }
    path = config(tmp_path, tomli_w.dumps(values))
    in_swarm = ["--hv.initial-peers", maddr, "--hv.galaxy-size", "2", "--hv.local-steps", "2"]
    nodes = [
        start(*LAUNCH, str(path), "2", rank, "127.0.0.1", str(port), "--", *in_swarm, name=f"node-{rank}")
        for rank in "01"
    ]
    flags = ["--config", str(path), "--run-dir", str(tmp_path / "alone"), *in_swarm]
    alone = start(*DILOCO, "peer", *flags, name="peer")
    for command in (*nodes, alone):
        assert command.wait() == 0, command.stdout + command.stderr
    digests, records = digests_of(tmp_path / "nodes"), records_of(tmp_path / "nodes", "epoch")
    assert list(digests) == [1, 2, 3]
    assert digests == digests_of(tmp_path / "alone")
    assert [record["contributors"] for record in records] == [[0, 1]] * 3
    # Each node trains half of the peer's batch.
    steps = [records_of(tmp_path / name, "step") for name in ("nodes", "alone")]
    assert [[record["tokens"] for record in of_one] for of_one in steps] == [
        [512 * n for n in range(1, 7)]
    ] * 2
    (start_event,) = [one for one in records_of(tmp_path / "nodes", "event") if one["event"] == "start"]
    assert start_event["micro_batch_size"] == 4


def test_ctrl_c_ends_all_processes(tmp_path, cpus):
    (tmp_path / "sleep.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    argv = [*LAUNCH, str(config(tmp_path)), f"--program={tmp_path / 'sleep.py'}", "--config-flag="]
    command = Command(argv, tmp_path / "node")
    wait_until(lambda: "here" in command.stdout, "the script's word", command=command)
    command.interrupt()
    check_gone(command, 20.0)
    assert (command.code, command.stderr) == (130, "")
    assert "Traceback" not in command.stdout


def test_a_single_node_without_gpus_trains_on_its_cpus_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(this_node, "free_gpu_memory", lambda: [])
    job, num_processes = this_node.checked(LaunchJob(config=config(tmp_path), nproc_per_node="1"))
    assert (job.backend, num_processes) == ("gloo", 1)


WRONG = {
    "no such file": (["nowhere.toml"], {}, "cannot be read"),
    "TOML that is none": (["bad.toml"], {}, "is not TOML"),
    "what is no text": (["binary.toml"], {}, "is not TOML"),
    "a place for logs that is none": (["../config.toml"], {}, "cannot be created"),
    "no GPUs": (["config.toml"], {"BACKEND": "nccl"}, "set BACKEND=gloo"),
    "no GPUs on one of several nodes": (
        ["config.toml", "2"],
        {"BACKEND": "auto"},
        "set BACKEND=gloo on every node",
    ),
    "unknown backend": (["config.toml"], {"BACKEND": "mpi"}, "neither nccl nor gloo"),
    "number of processes": (["config.toml"], {"NPROC_PER_NODE": "many"}, "neither auto nor a number"),
    "rank beyond the nodes": (["config.toml", "2", "2"], {}, "the last one is 1"),
    "an environment that is not there": (["config.toml", "--venv", "/nowhere/env"], {}, "no bin/python in"),
    "a script to submit and nobody to take it": (
        ["config.toml", "--engine", "pbs"],
        {},
        "qsub is not on this machine",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_anything_starts(case, tmp_path, cpus, monkeypatch):
    words, env, said = WRONG[case]
    config(tmp_path)
    config(tmp_path, "a: [", "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/logs").write_text("")
    here = tmp_path / "taken" if words[0].startswith("..") else tmp_path
    for name, value in {**env, "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)
    # Without nvidia-smi and without batch systems, whatever this machine has.
    monkeypatch.setenv("PATH", str(tmp_path))
    command = Command([*LAUNCH, *words], tmp_path / "node", cwd=here)
    assert command.wait() == 2, command.stderr
    assert said in text_of_boxes(command.stderr)[0]


def test_infiniband_and_ethernet_have_settings_of_their_own_and_the_users_stay():
    infiniband = {"NCCL_IB_DISABLE": "0", "NCCL_IB_GID_INDEX": "3"}
    assert network_env(["mlx5_0"], "eth0", {}) == {**infiniband, "GLOO_SOCKET_IFNAME": "eth0"}
    assert network_env(["mlx5_0"], None, {}) == infiniband
    assert network_env(["mlx5_0"], "eth0", {"NCCL_IB_GID_INDEX": "1"})["NCCL_IB_GID_INDEX"] == "1"
    ethernet = network_env([], "eth0", {"NCCL_SOCKET_IFNAME": "ens5"})
    assert ethernet == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "ens5", "GLOO_SOCKET_IFNAME": "eth0"}
    routes = "Iface\tDestination\tGateway\neth1\t0010A8C0\t0\neth0\t00000000\t0110A8C0\n"
    assert default_interface(routes) == "eth0" and default_interface("Iface\n") is None


def test_a_node_is_told_where_the_first_one_is():
    job = LaunchJob(config=Path("c.toml"), num_nodes=4, node_rank=2, master_addr="10.0.0.1", python="py")
    assert torchrun_argv(job, nproc=8) == [
        *("py", "-m", "torch.distributed.run", "--nproc-per-node=8", "--nnodes=4", "--node-rank=2"),
        *("--master-addr=10.0.0.1", "--master-port=29500", "-m", "diloco.train_fsdp", "--config", "c.toml"),
    ]


@pytest.mark.pods
def test_a_pbs_job_starts_one_torchrun_on_each_node(tmp_path, cpus):
    """PBS cannot be installed here. A shell script stands in for pbsdsh; the job script is run unchanged."""
    path = config(tmp_path, name="RANK of the MASTER.toml")
    argv = [
        *LAUNCH,
        "--engine",
        "pbs",
        "--dry-run",
        str(path),
        "2",
        "0",
        "localhost",
        str(free_port()),
        *PROGRAM,
    ]
    made = Command(argv, tmp_path / "made", cwd=tmp_path)
    assert made.wait() == 0, made.stderr
    assert "#PBS -l select=2:mpiprocs=1\n" in made.stdout
    (tmp_path / "bin").mkdir()
    pbsdsh = tmp_path / "bin/pbsdsh"
    # It returns 0 whatever the task returns, and does not print what the task prints.
    pbsdsh.write_text(
        f'#!/bin/sh\necho "$3 $8 $9" >>{tmp_path}/calls\nshift 4\n"$@" >&2\necho "exit status $?"\n'
    )
    pbsdsh.chmod(0o755)
    # Two names for this machine. All look for rank 0 on the first, which need not be the first by its name.
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n127.0.0.1\n")
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PYTHONPATH": str(ROOT),
    }
    ran = subprocess.run(
        ["bash"], input=made.stdout, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "rank 0 of 2: 3" in ran.stderr and "rank 1 of 2: 3" in ran.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted(calls) == [f"{rank} {rank} localhost" for rank in (0, 1)]
