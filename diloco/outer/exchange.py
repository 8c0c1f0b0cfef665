"""What the ranks of a peer exchange with their daemon: weights through shared memory, messages through rank 0."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from diloco.errors import UserError
from diloco.outer.layout import Piece, layout_of, pieces_of
from diloco.outer.page_locked import lock_pages
from diloco.outer.world import on_rank_zero, summed, world_of_worker
from peers.core.schedule import Schedule
from peers.daemon.link import LINK_ENV, WorkerLink
from peers.state.handover import floats_of


@dataclass(frozen=True)
class Asked:
    """What a daemon says of itself before it meets the model; without a daemon, this."""

    world_rank: int | None = None
    needs_outer: bool = False
    """Whether it may need the outer state of a checkpoint."""
    run_is_alive: bool = False
    """Whether it is in a run, or hears of one that exists."""


def asked_daemon() -> Asked:
    """Ask the daemon on a connection of its own."""
    path = os.environ.get(LINK_ENV)
    if not path:
        return Asked()
    link = WorkerLink.connect(Path(path))
    try:
        link.send("adopt")
        answer = link.receive("manifest")
    finally:
        link.close()
    return Asked(int(answer["world_rank"]), bool(answer["needs_offer"]), bool(answer["run_is_alive"]))


class Exchange:
    """Constructed and used by all ranks together. Every rank is given what the daemon answers to rank 0."""

    def __init__(
        self, model: nn.Module, link_path: Path, *, on_waiting: Callable[[str], None] | None = None
    ) -> None:
        """Raises peers.errors.UserError if the swarm refuses this model, LinkLost if no daemon answers.

        Raises UserError if the model or the process group does not suit.
        """
        self.link_path = link_path
        world = world_of_worker(os.environ)
        self.num_ranks, self._speaks = world.num_ranks, world.is_main
        self._link: WorkerLink | None = None
        """None except on the ranks of the first node, where the daemon runs."""
        if world.node == 0:
            self._link = WorkerLink.connect(link_path)
            if on_waiting is not None:
                self._link.on_waiting = on_waiting
        agreed = self.ask("adopt", "manifest")
        self.schedule = Schedule.of(agreed["manifest"])
        """When the swarm averages which fragment."""
        self.needs_offer = bool(agreed["needs_offer"])
        """Whether the run may begin from the state that this worker offers. If not, its checkpoint's is not read."""
        layout = layout_of(model, self.schedule.num_fragments)
        pieces = pieces_of(model, layout)
        if summed(int(world.node > 0 and any(piece.is_first for piece in pieces))):
            raise UserError(
                "the model is sharded across nodes, but one node has to hold all of it: shard within each node and "
                "replicate over the nodes (HSDP), or start a peer on each node"
            )
        welcome: dict[str, Any] = {}
        if self._link is not None:
            welcome = self._link.hello(layout, local_rank=world.local_rank)
        memories = self._link.memories if self._link is not None else []
        self.weights = SharedWeights(
            pieces,
            [_page_locked(memory.out, memory.numel) for memory in memories],
            [_page_locked(memory.inn, memory.numel) for memory in memories],
            world.num_nodes,
        )
        self.world_rank: int = on_rank_zero(lambda: int(welcome["world_rank"]))

    def ask(self, kind: str, *answers: str, **fields: Any) -> dict[str, Any]:
        """Send a message and wait for an answer of one of these kinds. Raises what WorkerLink.receive raises."""

        def talk() -> dict[str, Any]:
            assert self._link is not None
            self._link.send(kind, **fields)
            return self._link.receive(*answers)

        return on_rank_zero(talk)

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message that has no answer, from rank 0 only."""
        if self._speaks:
            assert self._link is not None
            self._link.send(kind, **fields)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()


@dataclass(frozen=True)
class SharedWeights:
    """One rank's pieces of a model, and the memories of each fragment that it shares with the daemon.

    Only the ranks of the first node have the memories. They broadcast new weights to the ranks of the other nodes.
    """

    pieces: Sequence[Piece]
    out: Sequence[Tensor]
    inn: Sequence[Tensor]
    num_nodes: int = 1

    @torch.no_grad()
    def put(self, fragment: int | None = None) -> None:
        """Write this rank's part of a fragment (None: of all) to *out*. The first rank that holds a value writes it."""
        pieces = self._of(fragment)
        for piece in pieces:
            if piece.is_first:
                _place(piece, self.out).copy_(piece.local, non_blocking=True)
        _wait_for_device(pieces)

    def take(self, fragment: int | None = None) -> None:
        """Load this rank's part of a fragment (None: of all) from *in*."""
        self._load(fragment, lambda piece: _place(piece, self.inn))

    def shift(self, fragment: int) -> None:
        """Add what *in* holds to this rank's part of a fragment."""
        self._load(fragment, lambda piece: piece.local + _on_device(piece, self.inn))

    def merge(self, fragment: int, *, mixing: float | None) -> None:
        """Combine what *in* holds with the training that this rank has done since it wrote the fragment to *out*.

        Without mixing, local = in + (local - out): this training is kept whole, and counts in the next
        pseudo-gradient. With mixing (alpha in arXiv 2501.18512), local = mixing * local + (1 - mixing) * in.
        """

        def merged(piece: Piece) -> Tensor:
            target = _on_device(piece, self.inn)
            if mixing is not None:
                return piece.local.to(target.dtype).lerp(target, 1 - mixing)
            snapshot = _on_device(piece, self.out)
            if piece.local.dtype == target.dtype:
                # In place: training waits, and new memory for the intermediate results would mostly be page faults.
                return piece.local.sub_(snapshot).add_(target)
            return target + (piece.local - snapshot)

        self._load(fragment, merged)

    @torch.no_grad()
    def _load(self, fragment: int | None, values: Callable[[Piece], Tensor]) -> None:
        pieces = self._of(fragment)
        for piece in pieces:
            if self.num_nodes == 1 or piece.is_first:
                piece.local.copy_(values(piece), non_blocking=True)
            if self.num_nodes > 1 and piece.local.numel():
                dist.broadcast(piece.local, group=piece.copies, group_src=0)
        _wait_for_device(pieces)

    def _of(self, fragment: int | None) -> list[Piece]:
        return [piece for piece in self.pieces if fragment in (None, piece.fragment)]


def _place(piece: Piece, memories: Sequence[Tensor]) -> Tensor:
    numel = piece.local.numel()
    return memories[piece.fragment][piece.start : piece.start + numel].view(piece.local.shape)


def _on_device(piece: Piece, memories: Sequence[Tensor]) -> Tensor:
    return _place(piece, memories).to(piece.local.device, non_blocking=True)


def _wait_for_device(pieces: Sequence[Piece]) -> None:
    if any(piece.local.is_cuda for piece in pieces):
        torch.cuda.synchronize()


def _page_locked(memory: mmap.mmap, numel: int) -> Tensor:
    """The memory as fp32 values, page-locked if there is a GPU."""
    values = floats_of(memory, numel)
    lock_pages(values)
    return values
