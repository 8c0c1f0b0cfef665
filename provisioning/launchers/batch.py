"""Job scripts for Slurm and PBS: they start torchrun on each node, with the first node as master."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from provisioning.errors import ProviderError, UserError
from provisioning.launchers.job import LOGS, LaunchJob

_SUBMIT_TIMEOUT_S = 60.0
_MAX_SHORT_LIVES = 3
_LONG_LIFE_S = 1800
"""A training that fails sooner may not have trained at all: it may wait ten minutes for its data (data/batches.py)."""
_MAX_LIVES = 20
"""Of one job: a training may fail each time at the same place."""
_USER_ERROR = 2
"""The exit code for what a user must change first. torchrun passes it on as 1."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a job asks the batch system for. It gets whole nodes."""

    directory: Path
    """Where it runs; its logs are below."""
    gpus_per_node: int
    """0: it trains on CPUs."""
    cpus_per_node: int | None
    """None: all."""
    time_limit: str
    queue: str | None
    """Slurm calls it a partition."""
    resumes: bool
    """Whether the training continues where it was, if started again."""


def slurm_script(job: LaunchJob, request: Request) -> str:
    """A script for sbatch."""
    wanted = [
        "--job-name=diloco",
        f"--nodes={job.num_nodes}",
        "--ntasks-per-node=1",
        # By default a task gets one core and that share of the memory, but it starts the ranks of all GPUs.
        *("--exclusive", "--mem=0"),
        *(["--requeue"] if request.resumes else []),
        # Keep the log of the job before it was requeued.
        "--open-mode=append",
        *([f"--cpus-per-task={request.cpus_per_node}"] if request.cpus_per_node else []),
        f"--time={request.time_limit}",
        f"--chdir={shlex.quote(str(request.directory))}",
        f"--output={shlex.quote(f'{request.directory / LOGS}/slurm_%j.log')}",
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        *([f"--partition={request.queue}"] if request.queue else []),
    ]
    # One task per node; Slurm passes the node's rank in SLURM_NODEID.
    start = (
        "srun --kill-on-bad-exit=1 --cpu-bind=none bash -c "
        + shlex.quote(_node_command(job, "$SLURM_NODEID", '"$0"'))
        + ' "$master"'
    )
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {word}" for word in wanted),
        "set -eu",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        # Use the address, since other nodes may not be able to resolve the name.
        'master=$(scontrol show node "$first" | grep -o "NodeAddr=[^ ]*" | cut -d= -f2)',
        f"export {_environment(job)}",
        *(_repeated(start) if request.resumes else [start]),
    ]
    return "\n".join(lines) + "\n"


def pbs_script(job: LaunchJob, request: Request) -> str:
    """A script for qsub of PBS Pro and OpenPBS."""
    # Without ncpus, a PBS that confines jobs to their cores gives each node's part one core. It has no word for all.
    cpus = f":ncpus={request.cpus_per_node}" if request.cpus_per_node else ""
    gpus = f":ngpus={request.gpus_per_node}" if request.gpus_per_node else ""
    lines = [
        "#!/bin/bash",
        "#PBS -N diloco",
        f"#PBS -l select={job.num_nodes}:mpiprocs=1{cpus}{gpus}",
        "#PBS -l place=scatter:excl",
        f"#PBS -l walltime={request.time_limit}",
        *(["#PBS -r y"] if request.resumes else []),
        "#PBS -j oe",
        f"#PBS -o {request.directory / LOGS}/",
        *([f"#PBS -q {request.queue}"] if request.queue else []),
        "set -eu",
        f"cd {shlex.quote(str(request.directory))}",
        # Keep the order of the file: `pbsdsh -n` is an index into it, so rank 0 runs on the master.
        "mapfile -t nodes < <(awk '!seen[$0]++' \"$PBS_NODEFILE\")",
        'master="${nodes[0]}"',
        f"command={shlex.quote(f'cd {shlex.quote(str(request.directory))} && export {_environment(job)} && ')}",
        "command+=" + shlex.quote(_node_command(job, '"$0"', '"$1"')),
        "run_node() {",
        # pbsdsh returns 0 whatever its task returns, and with -v prints that; what the task prints goes elsewhere.
        '  said=$(pbsdsh -v -n "$1" -- bash -c "$command" "$1" "$master") || return',
        '  echo "$said"',
        '  [[ "$said" =~ "exit status "([0-9]+) ]] && return "${BASH_REMATCH[1]}" || return 1',
        "}",
        "run_nodes() {",
        "  local rank pid pids=() code=0",
        '  for rank in "${!nodes[@]}"; do run_node "$rank" & pids+=($!); done',
        '  for pid in "${pids[@]}"; do wait "$pid" || code=$?; done',
        '  return "$code"',
        "}",
        *(_repeated("run_nodes") if request.resumes else ["run_nodes"]),
    ]
    return "\n".join(lines) + "\n"


def submit(script: str, path: Path, program: str) -> str:
    """Write the script, submit it with `program` (sbatch or qsub), and return the job's id.

    Raises UserError if the program is not installed, and ProviderError if it refuses the script.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script, encoding="utf-8")
    if shutil.which(program) is None:
        raise UserError(f"{program} is not on this machine; take {path} to one that has it.")
    argv = [program, "--parsable", str(path)] if program == "sbatch" else [program, str(path)]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_S, check=False)
    if answer.returncode:
        raise ProviderError(f"{program} refused {path}: {answer.stderr.strip()}")
    return re.split(r"[;\s]", answer.stdout.strip())[0]


def _repeated(start: str) -> list[str]:
    """Lines that run a command until it succeeds, needs its user, or fails too often, in all or within minutes."""
    return [
        "lives=0 short_lives=0",
        "while true; do",
        "  began=$(date +%s) code=0",
        f"  {start} || code=$?",
        f'  if [ "$code" -eq 0 ] || [ "$code" -eq {_USER_ERROR} ]; then exit "$code"; fi',
        "  lives=$((lives + 1)) short_lives=$((short_lives + 1))",
        f"  if [ $(($(date +%s) - began)) -ge {_LONG_LIFE_S} ]; then short_lives=0; fi",
        f'  if [ "$short_lives" -eq {_MAX_SHORT_LIVES} ] || [ "$lives" -eq {_MAX_LIVES} ]; then exit "$code"; fi',
        '  echo "The training ended with $code and is started again."',
        "done",
    ]


def _environment(job: LaunchJob) -> str:
    values = {
        "NPROC_PER_NODE": job.nproc_per_node,
        "BACKEND": job.backend,
        "LOG_LEVEL": job.log_level,
    }
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in values.items())


def _node_command(job: LaunchJob, rank: str, master: str) -> str:
    """The command for one node: `diloco launch --engine torchrun`, which also checks the node and keeps a log."""
    words = [job.python, "-m", "diloco", "launch", "--engine", "torchrun", str(job.config)]
    tail = [f"--program={shlex.join(job.program)}", f"--config-flag={job.config_flag}"]
    more = shlex.join(["--", *job.more]) if job.more else ""
    return f"{shlex.join(words)} {job.num_nodes} {rank} {master} {job.master_port} {shlex.join(tail)} {more}".strip()
