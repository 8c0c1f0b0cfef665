"""`diloco launch`: starts one training, or one peer, on several nodes, with torchrun, Slurm, PBS or Ray."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from diloco.cli.pods_flags import Inventory, StateFile
from diloco.errors import UserError
from diloco.options.checks import at_least, up_to, whole
from diloco.options.flags import Count, Switch, Whole
from diloco.output import lose_unwritable

app = App(
    name="launch",
    usage="Usage: diloco launch [FLAGS] CONFIG [NUM_NODES] [NODE_RANK] [MASTER_ADDR] [MASTER_PORT] [-- ARGUMENTS]",
)

MasterPort = Annotated[int, Parameter(converter=whole, validator=(at_least(1), up_to(65535)))]


@app.default
def launch(
    config: Path,
    num_nodes: Count = 1,
    node_rank: Whole = 0,
    master_addr: str = "localhost",
    master_port: MasterPort = 29500,
    *more: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    engine: Literal["torchrun", "slurm", "pbs", "ray"] = "torchrun",
    program: str = "-m diloco.train_fsdp",
    config_flag: str = "--config",
    venv: Path | None = None,
    gpus_per_node: Whole = 0,
    time_limit: str = "24:00:00",
    partition: str | None = None,
    storage: str | None = None,
    cpus_per_node: Whole | None = None,
    dry_run: Switch = False,
    state_file: StateFile = None,
    inventory: Inventory = None,
) -> int:
    """Start one training on several nodes, with diloco's trainer or any other script.

    With torchrun, run the command on each node with that node's rank. Environment variables: NPROC_PER_NODE (default
    auto), BACKEND (nccl or gloo; default nccl, or gloo for a single node without GPUs), and LOG_LEVEL (default
    WARNING). The log is logs/distributed_training/latest_node<rank>.log.

    Parameters
    ----------
    config: Path
        The trainer's flags, as TOML.
    num_nodes: int
        Number of nodes.
    node_rank: int
        Rank of this node (torchrun).
    master_addr: str
        Address of the first node (torchrun).
    master_port: int
        A free port on the first node.
    engine: str
        torchrun: start the ranks of this node. slurm, pbs: submit a batch job that runs torchrun on each node. ray:
        form a Ray cluster of the rented pods, and submit a job that starts a process for each GPU.
    program: str
        Arguments for the Python interpreter, such as "train.py --fast".
    config_flag: str
        The program's flag for the configuration file; "": do not pass the file.
    venv: Path
        A virtual environment to use.
    gpus_per_node: int
        GPUs per node to request from the batch system.
    time_limit: str
        Time limit of the batch job.
    partition: str
        Partition (Slurm) or queue (PBS).
    storage: str
        A directory shared by all nodes (Ray).
    cpus_per_node: int
        Cores per node, for Slurm, PBS and Ray; default: all. PBS may give a single core without it.
    dry_run: bool
        Only print the job script; for Ray, print the cluster as a configuration file for `ray up`.
    """
    from provisioning.launchers import node
    from provisioning.launchers.job import LOGS, LaunchJob

    # A job script is a result.
    if not dry_run:
        lose_unwritable("stdout")
    here = Path.cwd()
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise UserError(f"--program {program}: {error}.") from error
    if not words:
        raise UserError('--program "": name the program to run.')
    try:
        (here / LOGS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{here / LOGS} cannot be created: {error.strerror}; run this in a directory where logs can be written."
        ) from error
    job = LaunchJob(
        config=node.checked_config(config),
        program=words,
        config_flag=config_flag,
        more=more,
        num_nodes=num_nodes,
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        nproc_per_node=os.environ.get("NPROC_PER_NODE", "auto"),
        backend=os.environ.get("BACKEND", "auto"),
        log_level=os.environ.get("LOG_LEVEL", "WARNING"),
        python=node.python_of(venv),
    )
    cpus = cpus_per_node or None
    if engine == "ray":
        from diloco.cli.launch_ray import print_cluster_yaml, run_on_pods

        if dry_run:
            return print_cluster_yaml(job, cpus=cpus, state_file=state_file, inventory=inventory)
        return run_on_pods(job, storage=storage, cpus=cpus, state_file=state_file, inventory=inventory)
    if engine == "torchrun":
        job, nproc = node.checked(job)
        return node.run(job, nproc, os.environ, here)
    from provisioning.launchers.batch import Request, pbs_script, slurm_script, submit

    request = Request(
        directory=here,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus,
        time_limit=time_limit,
        queue=partition,
        resumes=node.resumes(job.config),
    )
    script = (slurm_script if engine == "slurm" else pbs_script)(job, request)
    if dry_run:
        print(script, end="", flush=True)
        return 0
    job_id = submit(script, here / LOGS / f"{engine}.sh", "sbatch" if engine == "slurm" else "qsub")
    print(f"submitted job {job_id}; its log will be in {here / LOGS}", flush=True)
    return 0
