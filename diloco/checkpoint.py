"""Save and restore a peer's training, shard by shard: <path>/model_step_<N>/[diloco_rank_<world rank>/].

Each rank writes safetensors and JSON of its own; the daemon adds its outer state. A directory appears under its name
only when everything is in it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from diloco.checkpoint_dirs import (
    COMPLETE,
    complete_ones,
    delete,
    move,
    own_part,
    read_complete,
    temporary_of,
    write_complete,
)
from diloco.errors import UserError
from diloco.flat import trainable_parameters
from diloco.inner import InnerLoop
from diloco.options import CkptConfig
from diloco.outer import Diloco, Restored
from diloco.world import World, barrier, on_rank_zero

_DISCARD_TIMEOUT_S = 2.0


class Checkpoints:
    """This peer's checkpoints. All ranks call its methods together."""

    def __init__(self, config: CkptConfig, world: World, inner: InnerLoop) -> None:
        self._config = config
        self._world = world
        self._inner = inner
        self._path = Path(config.path)
        self._changing: Path | None = None
        """The directory that is being written or deleted just now."""
        self._looked_at = 0
        self._making = threading.Lock()
        """Held while a directory is made, and by whoever has discarded one: none is made after that."""

    def begin(self, step: int) -> None:
        """The run goes on from this nominal step: what lies before it was due before."""
        self._looked_at = step

    def due(self, step: int) -> bool:
        """Whether a multiple of the interval has been reached since the last save."""
        interval = self._config.interval
        return interval is not None and step // interval > self._looked_at // interval

    def save(self, outer: Diloco, *, step: int) -> Path:
        """Write everything that is needed to go on from nominal step `step`. Returns the directory."""
        self._looked_at = step
        final = self._path / f"model_step_{step}" / own_part(outer.world_rank)
        temporary = self._changing = temporary_of(final)
        if self._world.rank == 0:
            with self._making:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        barrier()
        if self._world.local_rank == 0:
            # Another node has a disk of its own, or sees the directory that rank 0 has just made.
            with self._making:
                temporary.mkdir(parents=True, exist_ok=True)
        barrier()
        self._write_rank(temporary)
        barrier()
        outer.checkpoint(temporary)
        on_rank_zero(lambda: write_complete(temporary, outer, self._world.num_ranks))
        on_rank_zero(lambda: move(temporary, final))
        if self._world.local_rank == 0 and temporary.exists():
            # Another node with a disk of its own.
            move(temporary, final)
        self._changing = None
        on_rank_zero(lambda: self._delete_old(outer.world_rank))
        return final

    def discard_partial(self) -> None:
        """Leave nothing half-written or half-deleted, when the process is about to end in the middle of it.

        Called by another thread than the one that writes, which may block from now on.
        """
        self._making.acquire(timeout=_DISCARD_TIMEOUT_S)
        if (directory := self._changing) is not None:
            # Under another name nothing can be added to it, neither by us nor by the daemon.
            discarded = directory.with_name(f".{directory.name.strip('.')}.discarded")
            with contextlib.suppress(OSError):
                directory.rename(discarded)
                delete(discarded)

    def restore(self, world_rank: int | None) -> Restored | None:
        """Load the checkpoint that the configuration names into model and optimizer. Raises UserError."""
        if self._config.resume is None:
            return None
        directory = on_rank_zero(lambda: self._find(str(self._config.resume), world_rank))
        if directory is None:
            return None
        restored, num_ranks = read_complete(directory)
        if num_ranks != self._world.num_ranks:
            raise UserError(
                f"{directory} was saved by {num_ranks} ranks and cannot be loaded by {self._world.num_ranks} yet; "
                "start as many ranks as it has"
            )
        self._read_rank(directory)
        return restored

    def _find(self, resume: str, world_rank: int | None) -> Path | None:
        part = own_part(world_rank)
        if resume == "auto":
            found = complete_ones(self._path, part)
            return found[-1] if found else None
        directory = Path(resume) / part
        if not (directory / COMPLETE).is_file():
            raise UserError(f"--ckpt.resume {resume}: there is no complete checkpoint in {directory}")
        return directory

    def _delete_old(self, world_rank: int | None) -> None:
        """Keep the newest `topk` of this peer's own; other peers' are theirs to delete."""
        if self._config.topk is None:
            return
        for directory in complete_ones(self._path, own_part(world_rank))[: -self._config.topk]:
            self._changing = directory
            delete(directory)
        self._changing = None

    def _write_rank(self, directory: Path) -> None:
        tensors = {key: tensor.cpu().contiguous() for key, tensor in self._tensors().items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        save_file(tensors, directory / f"rank_{self._world.rank}.safetensors")
        scale = json.dumps(asdict(self._inner.loss_scale))
        (directory / f"rank_{self._world.rank}.json").write_text(scale, encoding="utf-8")

    @torch.no_grad()
    def _read_rank(self, directory: Path) -> None:
        stored = load_file(directory / f"rank_{self._world.rank}.safetensors")
        self._make_optimizer_state()
        for key, tensor in self._tensors().items():
            if key not in stored or stored[key].shape != tensor.shape:
                raise UserError(
                    f"{directory} holds another model than this one: {key} is missing or differs in shape"
                )
            tensor.copy_(stored[key])
        torch.set_rng_state(stored["rng.cpu"])
        if "rng.cuda" in stored and torch.cuda.is_available():
            torch.cuda.set_rng_state(stored["rng.cuda"])
        scale = json.loads((directory / f"rank_{self._world.rank}.json").read_text(encoding="utf-8"))
        for name, value in scale.items():
            setattr(self._inner.loss_scale, name, value)

    def _tensors(self) -> dict[str, Tensor]:
        """This rank's shards of weights and optimizer state by name; views that can be written to."""
        tensors = {}
        for name, parameter in trainable_parameters(self._inner.model):
            tensors[f"model.{name}"] = _local(parameter.detach())
            for key, value in self._inner.optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{key}"] = _local(value)
        return tensors

    def _make_optimizer_state(self) -> None:
        """AdamW makes its state in the first step: take one that changes nothing."""
        for _, parameter in trainable_parameters(self._inner.model):
            parameter.grad = torch.zeros_like(parameter)
        for group in self._inner.optimizer.param_groups:
            group["lr"] = 0.0
        self._inner.optimizer.step()
        self._inner.optimizer.zero_grad()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
