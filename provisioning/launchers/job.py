"""A training program on one or several nodes, and the settings that every engine passes on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TRAINER = ("-m", "diloco.train_fsdp")
LOGS = Path("logs") / "distributed_training"


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """One training over `num_nodes` nodes."""

    config: Path
    """TOML file of the trainer's flags."""
    program: Sequence[str] = TRAINER
    """Arguments of Python; the configuration follows them."""
    config_flag: str = "--config"
    """The flag that names the configuration; empty: the program does not get it."""
    more: Sequence[str] = ()
    """Further arguments of the program, at the end."""
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int = 29500
    nproc_per_node: str = "auto"
    backend: str = "auto"
    log_level: str = "WARNING"
    python: str = sys.executable
    """The Python interpreter."""

    @property
    def words(self) -> list[str]:
        """The program and its arguments, without Python."""
        named = [self.config_flag, str(self.config)] if self.config_flag else []
        return [*self.program, *named, *self.more]


def torchrun_argv(job: LaunchJob, *, nproc: int) -> list[str]:
    """The command line of torchrun on one node, independent of PATH."""
    words = [job.python, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    if job.num_nodes == 1:
        words.append("--standalone")
    else:
        words += [
            f"--nnodes={job.num_nodes}",
            f"--node-rank={job.node_rank}",
            f"--master-addr={job.master_addr}",
            f"--master-port={job.master_port}",
        ]
    return [*words, *job.words]


def network_env(infiniband: Sequence[str], interface: str | None, given: Mapping[str, str]) -> dict[str, str]:
    """NCCL's and Gloo's settings for this node's network. Variables that are set in `given` keep their values.

    `infiniband`: names of the InfiniBand devices; `interface`: that of the default route, None if there is none.
    """
    chosen = {"NCCL_IB_DISABLE": "0" if infiniband else "1"}
    if infiniband:
        # 3: RoCE v2 over IPv4; InfiniBand proper ignores it.
        chosen["NCCL_IB_GID_INDEX"] = "3"
    elif interface:
        chosen["NCCL_SOCKET_IFNAME"] = interface
    if interface:
        # Gloo always uses TCP. Its default, the address of the host's name, may be a loopback address.
        chosen["GLOO_SOCKET_IFNAME"] = interface
    return {name: given.get(name, value) for name, value in chosen.items()}


def default_interface(routes: str) -> str | None:
    """The interface of the default route in the text of /proc/net/route; None: there is none."""
    for line in routes.splitlines()[1:]:
        words = line.split()
        if len(words) > 2 and words[1] == "00000000":
            return words[0]
    return None
