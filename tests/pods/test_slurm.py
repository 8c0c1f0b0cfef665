"""A real Slurm on this machine: slurmctld and two slurmd, and a job over both nodes to its end. `make test-slurm`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomli_w

from benchmarks.chaos.links import free_port
from diloco.train.metrics_file import Tail
from tests.support.commands import ROOT, model_directory
from tests.support.ssh_machines import free_ports

LOGS = Path("logs/distributed_training")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no Slurm here: {', '.join(MISSING)} missing; try make test-slurm"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons are started as root"),
]

CONFIG = """
ClusterName=diloco
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SlurmctldPort={ports[0]}
SlurmdSpoolDir={directory}/spool-%n
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a Slurm of two nodes. Yields the variables for its commands, once both nodes are idle."""
    directory = tmp_path / "slurm"
    (directory / "state").mkdir(parents=True)
    path = directory / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    path.write_text(CONFIG.format(host=host, ports=free_ports(3), directory=directory))
    env = {
        **os.environ,
        "SLURM_CONF": str(path),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
        "PYTHONPATH": str(ROOT),
        **{"BACKEND": "gloo", "NPROC_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "lo"},
    }
    daemons = []
    try:
        for argv in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            with (directory / f"{'-'.join(argv)}.out").open("wb") as out:
                daemons.append(subprocess.Popen(argv, env=env, stdout=out, stderr=out))
        wait(env, ["sinfo", "-h", "-t", "idle", "-o", "%D"], "2", 60)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def wait(env: dict[str, str], argv: list[str], wanted: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        said = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if said.returncode == 0 and said.stdout.strip() == wanted:
            return
        assert time.monotonic() < deadline, f"{argv} says {said.stdout!r} {said.stderr!r} and not {wanted!r}"
        time.sleep(0.2)


def submitted(env: dict[str, str], directory: Path, config: str, *more: str) -> str:
    """Submit a job of two tasks with `diloco launch`, wait for its success, and return its log."""
    (directory / "config.toml").write_text(config)
    argv = [sys.executable, "-m", "diloco", "launch", "--engine", "slurm", "--time-limit", "00:05:00"]
    argv += ["config.toml", "2", "0", "localhost", str(free_port()), *more]
    made = subprocess.run(
        argv, cwd=directory, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    found = re.match(r"submitted job (\d+);", made.stdout)
    assert found, made.stdout
    job = found[1]
    wait(env, ["squeue", "-h"], "", 240)
    said = (directory / LOGS / f"slurm_{job}.log").read_text()
    shown = subprocess.run(
        ["scontrol", "show", "job", job], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert "JobState=COMPLETED" in shown and "ExitCode=0:0" in shown and "NumNodes=2" in shown, said
    # Both cores of both nodes.
    assert "NumCPUs=4" in shown, shown
    return said


def test_a_script_of_anybodys_runs_on_two_nodes_to_its_end(environment, tmp_path):
    words = (f"--program={ROOT / 'tests/support/all_reduce.py'}", "--config-flag=")
    directory = tmp_path / "with a space"
    directory.mkdir()
    said = submitted(environment, directory, "seed = 7\n", *words)
    assert "rank 0 of 2: 3" in said and "rank 1 of 2: 3" in said, said
    assert "rank 1 of 2: 3" in (directory / LOGS / "latest_node1.log").read_text()


# One rank of two fails in its first life.
FAILS_ONCE = """
import os, pathlib, sys
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1 and not pathlib.Path("failed").exists():
    pathlib.Path("failed").touch()
    sys.exit("a rank failed")
dist.barrier()
print("rank", dist.get_rank(), "succeeded", flush=True)
"""


def test_a_training_that_resumes_is_started_again_on_both_nodes(environment, tmp_path):
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    words = (f"--program={tmp_path / 'fails_once.py'}", "--config-flag=")
    config = '[ckpt]\ninterval = 10\npath = "saved"\nresume = "auto"\n'
    said = submitted(environment, tmp_path, config, *words)
    assert "a rank failed" in said and "is started again" in said, said
    assert "rank 0 succeeded" in said and "rank 1 succeeded" in said, said


def test_our_trainer_runs_on_two_nodes_to_its_end(environment, tmp_path):
    """Two tasks of one rank each; the ranks of both train one model, which is saved at the end."""
    values = {
        "path_model": str(model_directory(tmp_path / "model")),
        **{"seq_length": 64, "total_batch_size": 8, "per_device_train_batch_size": 4, "eval_tokens": 64},
        **{"max_steps": 6, "fake_data": True, "device": "cpu", "run_dir": str(tmp_path / "run")},
    }
    said = submitted(environment, tmp_path, tomli_w.dumps(values))
    records = Tail(tmp_path / "run/metrics.jsonl").read()
    steps = [one for one in records if one["kind"] == "step"]
    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6], said
    # Eight sequences in each step: four of each task.
    assert all(one["tokens"] == one["step"] * 8 * 64 for one in steps)
    assert (tmp_path / "run/model/model.safetensors").stat().st_size > 0
    assert [path.name for path in sorted((tmp_path / LOGS).glob("latest_node*.log"))] == [
        "latest_node0.log",
        "latest_node1.log",
    ]
