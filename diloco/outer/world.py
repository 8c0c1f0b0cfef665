"""This peer's torch processes: their ranks, their communication, and how the model is sharded over them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from diloco.errors import UserError

T = TypeVar("T")

# The other ranks wait for rank 0 while it waits for the swarm (its first peers, slow peers). torchrun ends all of them
# when one dies, so this deadline only has to be longer than any such wait.
GROUP_TIMEOUT = datetime.timedelta(hours=2)
_control_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""For the default process group, the group of `_control_group`."""


@dataclass(frozen=True, kw_only=True)
class World:
    """One torch process among those of its peer, as torchrun numbers them. By default it is the only one."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    num_local_ranks: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> World:
        """Read what torchrun sets. Raises UserError if the nodes have different numbers of ranks."""
        world = cls(
            rank=int(environ.get("RANK", 0)),
            num_ranks=int(environ.get("WORLD_SIZE", 1)),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            num_local_ranks=int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", 1))),
        )
        if world.num_ranks % world.num_local_ranks:
            raise UserError(
                f"{world.num_ranks} ranks are not a multiple of the {world.num_local_ranks} on this node; "
                f"start the same --nproc-per-node on every node"
            )
        return world

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_local_ranks

    @property
    def node(self) -> int:
        """The number of this rank's node: torchrun numbers the ranks of a node consecutively."""
        return self.rank // self.num_local_ranks

    @property
    def is_first_of_node(self) -> bool:
        return self.rank % self.num_local_ranks == 0

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that talks to the daemon and writes the metrics."""
        return self.rank == 0

    def device(self, choice: Literal["auto", "cpu", "cuda"]) -> torch.device:
        """The device that this rank trains on. Raises UserError if there are too few GPUs."""
        num_gpus = torch.cuda.device_count() if choice != "cpu" else 0
        if choice == "cpu" or (choice == "auto" and num_gpus == 0):
            return torch.device("cpu")
        if num_gpus < self.num_local_ranks:
            raise UserError(
                f"{self.num_local_ranks} ranks on this node but {num_gpus} CUDA devices: NCCL needs one each; "
                f"start --nproc-per-node {max(num_gpus, 1)}, or train with --device cpu"
            )
        return torch.device("cuda", self.local_rank)


@contextlib.contextmanager
def joined(world: World, device: torch.device) -> Iterator[None]:
    """Join the process group of the peer's ranks while the block runs. A single process needs no group.

    gloo carries CPU tensors, such as the sums of an evaluation, and NCCL carries CUDA tensors.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.num_ranks == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def device_mesh(world: World, device: torch.device, sharding_strategy: str) -> DeviceMesh:
    """Shard over the ranks of a node, replicate over nodes; NO_SHARD replicates over all ranks."""
    if sharding_strategy == "NO_SHARD":
        return init_device_mesh(device.type, (world.num_ranks, 1), mesh_dim_names=("replicate", "shard"))
    if world.num_nodes == 1:
        return init_device_mesh(device.type, (world.num_ranks,), mesh_dim_names=("shard",))
    shape = (world.num_nodes, world.num_local_ranks)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def in_group() -> bool:
    """Whether this process is in a process group, of `joined` or of the training loop around `Diloco`."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world_of_worker(environ: Mapping[str, str]) -> World:
    """This rank among those that share its daemon. Raises UserError if its process group is not the one of all ranks.

    Without the group, each process would take itself for the one that talks to the daemon.
    """
    world = World.from_environment(environ)
    num_joined = dist.get_world_size() if in_group() else 1
    if num_joined != world.num_ranks:
        raise UserError(
            f"{world.num_ranks} training processes were started (WORLD_SIZE), but the process group of this one has "
            f"{num_joined}: call torch.distributed.init_process_group before Diloco, or start one process "
            "(--nproc-per-node 1)"
        )
    return world


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only. Every rank gets its result, or its error, so that all take the same branch."""
    if not in_group():
        return action()
    outcome: list[Any] = [None, None]
    group = _control_group()
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
            dist.broadcast_object_list(outcome, src=0, group=group)
            raise
    dist.broadcast_object_list(outcome, src=0, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def scattered(action: Callable[[], Sequence[T]]) -> T:
    """Run `action` on rank 0 only. Of what it returns, every rank gets what has its number; or rank 0's error."""
    if not in_group():
        return action()[0]
    parts: list[T] = []
    on_rank_zero(lambda: parts.extend(action()))
    own: list[Any] = [None]
    dist.scatter_object_list(own, parts or None, src=0, group=_control_group())
    return own[0]


def summed(value: int) -> int:
    """The sum over all ranks. Returns once every rank has called it."""
    if not in_group():
        return value
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total, group=_control_group())
    return int(total)


def on_every_rank(action: Callable[[], T]) -> list[T]:
    """Run `action` on all ranks. Every rank gets all results, in the order of ranks, or an error if any has failed."""
    if not in_group():
        return [action()]
    outcomes: list[Any] = [None] * dist.get_world_size()
    group = _control_group()
    try:
        result = action()
    except Exception as error:
        dist.all_gather_object(outcomes, (None, error), group=group)
        raise
    dist.all_gather_object(outcomes, (result, None), group=group)
    if failures := [error for _, error in outcomes if error is not None]:
        raise failures[0]
    return [result for result, _ in outcomes]


def of_first_of_node(world: World, value: T) -> T:
    """The value of the first rank of this rank's node. A collective of all ranks."""
    return on_every_rank(lambda: value)[world.node * world.num_local_ranks]


def barrier() -> None:
    """Returns once every rank has called it."""
    summed(0)


def _control_group() -> Any:
    """The ranks of the default group, for messages on the CPU. A collective when it is called for the first time.

    The default group may be the training loop's: NCCL alone carries no CPU tensors, and its timeout is too short to
    wait for the swarm.
    """
    default = dist.group.WORLD
    if default not in _control_groups:
        _control_groups[default] = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    return _control_groups[default]
