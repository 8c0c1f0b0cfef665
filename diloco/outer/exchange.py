"""The ranks of a peer and their daemon: weights through shared memory, words through rank 0."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.errors import UserError
from diloco.outer.flat import Piece, copy_in, copy_out, layout_of, merge, pieces_of, shift
from diloco.outer.world import World, in_group, on_rank_zero, summed
from peers.core.schedule import Schedule
from peers.daemon.link import WorkerLink


class Exchange:
    """Constructed and used by all ranks together; what the daemon answers rank 0, every rank is given.

    Only the ranks of the first node reach the daemon; those of other nodes get the weights by broadcast.
    """

    def __init__(
        self, model: nn.Module, link_path: Path, *, on_waiting: Callable[[str], None] | None = None
    ) -> None:
        """Raises peers.errors.UserError where the swarm refuses this model, LinkLost where no daemon answers."""
        self.link_path = link_path
        world = World.from_environment(os.environ) if in_group() else World()
        self._num_nodes = world.num_nodes
        self.num_ranks = world.num_ranks
        self.speaks = world.is_main
        """Whether this rank is the one that talks to the daemon."""
        self._link: WorkerLink | None = None
        self._out: list[Tensor] = []
        self._in: list[Tensor] = []
        if world.node == 0:
            self._link = WorkerLink.connect(link_path)
            if on_waiting is not None:
                self._link.on_waiting = on_waiting
        self.schedule = Schedule.of(on_rank_zero(self._manifest))
        """When the swarm averages what."""
        layout = layout_of(model, self.schedule.num_fragments)
        self._pieces = pieces_of(model, layout)
        if summed(int(world.node > 0 and any(piece.is_first for piece in self._pieces))):
            raise UserError(
                "the model is sharded across nodes, but one node has to hold all of it: shard within each node and "
                "replicate over the nodes (HSDP), or start a peer on each node"
            )
        if self._link is not None:
            self.welcome = self._link.hello(
                layout, local_rank=world.local_rank, num_local_ranks=world.num_local_ranks
            )
            for memory in self._link.memories:
                self._out.append(_floats(memory.out, memory.numel))
                self._in.append(_floats(memory.inn, memory.numel))
        self.welcome = on_rank_zero(lambda: self.welcome)

    def put(self, fragment: int | None = None, *, tokens: int = 0) -> int:
        """Every rank writes its share of a fragment (None: of all) into *out*.

        Returns the tokens of all ranks, once all have.
        """
        copy_out(self._of(fragment), self._out)
        return summed(tokens)

    def take(self, fragment: int | None = None) -> None:
        """Every rank loads its share of a fragment (None: of all) from *in*."""
        copy_in(self._of(fragment), self._in, num_nodes=self._num_nodes)

    def merge(self, fragment: int, *, mixing: float | None) -> None:
        """As `take`, where training has gone on since the fragment was put: see diloco.outer.flat.merge."""
        merge(self._of(fragment), self._out, self._in, mixing=mixing, num_nodes=self._num_nodes)

    def shift(self, fragment: int) -> None:
        """Every rank adds what *in* holds to its share of a fragment."""
        shift(self._of(fragment), self._in, num_nodes=self._num_nodes)

    def ask(self, kind: str, *answers: str, **fields: Any) -> dict[str, Any]:
        """Send a message and wait for an answer of one of these kinds. Raises as WorkerLink.receive does."""

        def talk() -> dict[str, Any]:
            assert self._link is not None
            self._link.send(kind, **fields)
            return self._link.receive(*answers)

        return on_rank_zero(talk)

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message that has no answer; only for the rank that speaks."""
        assert self._link is not None
        self._link.send(kind, **fields)

    def _manifest(self) -> dict[str, Any]:
        assert self._link is not None
        self._link.send("adopt")
        manifest: dict[str, Any] = self._link.receive("manifest")["manifest"]
        return manifest

    def _of(self, fragment: int | None) -> list[Piece]:
        return [piece for piece in self._pieces if fragment in (None, piece.fragment)]

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


def _floats(memory: mmap.mmap, numel: int) -> Tensor:
    """The memory as fp32 values, page-locked where there is a GPU, so that copies run at the bus's speed."""
    if numel == 0:
        return torch.empty(0)
    values = torch.frombuffer(memory, dtype=torch.float32, count=numel)
    if torch.cuda.is_available():
        # A refusal (a low memlock limit) only costs speed.
        torch.cuda.cudart().cudaHostRegister(values.data_ptr(), values.nbytes, 0)
    return values
