"""A real Slurm on this machine: slurmctld and two slurmd, and a job over both nodes to its end. `make test-slurm`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.ssh_machines import free_ports

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
    """Two nodes that are ready."""
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


def test_a_job_of_two_tasks_runs_to_its_end(environment, tmp_path):
    (tmp_path / "config.toml").write_text("seed = 7\n")
    argv = [sys.executable, "-m", "diloco", "launch", "--engine", "slurm", "--time-limit", "00:05:00"]
    argv += ["config.toml", "2", "0", "localhost", str(free_ports(1)[0])]
    argv += [f"--program={ROOT / 'tests/support/all_reduce.py'}", "--config-flag="]
    made = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert made.returncode == 0, made.stderr
    job = made.stdout.split()[1]
    wait(environment, ["squeue", "-h"], "", 120)
    logs = tmp_path / "logs/distributed_training"
    said = (logs / f"slurm_{job}.log").read_text()
    assert "rank 0 of 2: 3" in said and "rank 1 of 2: 3" in said, said
    shown = subprocess.run(
        ["scontrol", "show", "job", job], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "JobState=COMPLETED" in shown and "ExitCode=0:0" in shown
    assert "rank 1 of 2: 3" in (logs / "latest_node1.log").read_text()
