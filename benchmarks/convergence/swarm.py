"""The peers of a run in one process, which train in turns and average like a swarm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.convergence.averaging import AveragedSwarm, Replica
from benchmarks.convergence.settings import Job
from diloco.data.batches import SampleSource
from diloco.data.sampling import Block, step_offsets
from diloco.outer.exchange import SharedWeights
from diloco.outer.layout import layout_of, pieces_of
from diloco.train.inner import InnerLoop
from diloco.train.model import load_model
from diloco.train.optim import learning_rate, optimizer_of
from diloco.train.sharding import Precision
from peers.reduce.residuals import Residuals


@dataclass(eq=False)
class TrainedReplica(Replica):
    """A replica with its own model and optimizer."""

    inner: InnerLoop


class LocalSwarm(AveragedSwarm):
    """The peers of a DiLoCo run in one process. `step` makes one inner step of each, then averages if due."""

    def __init__(self, job: Job, source: SampleSource) -> None:
        num_fragments = job.arm.schedule(job.scale).num_fragments
        self.replicas = [new_replica(job, num_fragments) for _ in range(job.scale.num_peers)]
        super().__init__(job, self.replicas)
        self._source = source

    def step(self) -> float:
        """Train one inner step of every peer. Returns their mean loss."""
        lr = learning_rate_of(self._job, self.num_steps)
        losses = []
        for rank, replica in enumerate(self.replicas):
            if self.trains(rank):
                samples = torch.from_numpy(samples_of(self._source, self._job, rank, self.num_steps))
                losses.append(replica.inner.step(samples, lr=lr).loss)
        self.end_step()
        return float(np.mean(losses))


class DataParallel:
    """Synchronous data parallel training: one replica that trains the batches of all peers."""

    at_rest = True

    def __init__(self, job: Job, source: SampleSource) -> None:
        self._job, self._source = job, source
        self.replicas = [new_replica(job, num_fragments=1)]
        self.num_steps = 0
        self.sent_bytes = 0

    def step(self) -> float:
        """Train one step on the batches of all peers. Returns the mean loss."""
        ranks = range(self._job.scale.num_peers)
        samples = np.concatenate(
            [samples_of(self._source, self._job, rank, self.num_steps) for rank in ranks]
        )
        lr = learning_rate_of(self._job, self.num_steps)
        self.num_steps += 1
        return self.replicas[0].inner.step(torch.from_numpy(samples), lr=lr).loss

    def write_anchor(self, replica: Replica) -> None:
        """Load the weights into the replica."""
        mine = self.replicas[0].weights
        mine.put()
        replica.load(mine.out)


def new_replica(job: Job, num_fragments: int) -> TrainedReplica:
    """A replica with the seed's initial weights, which are the same for every peer."""
    scale, device = job.scale, torch.device(job.scale.device)
    config = scale.train_config(job.seed, job.arm.optimizer)
    model = load_model(scale.path_model, seed=job.seed, device=device)
    inner = InnerLoop(
        model,
        optimizer_of(config.optimizer, model, weight_decay=config.weight_decay, betas=(0.9, scale.beta2)),
        precision=Precision.of(config.precision, device),
        device=device,
        micro_batch_size=scale.num_peers * scale.peer_batch_size,
        max_grad_norm=config.max_grad_norm,
    )
    layout = layout_of(model, num_fragments)
    out, inn = ([torch.zeros(size) for size in layout.sizes] for _ in range(2))
    residuals = [Residuals(size) for size in layout.sizes]
    weights = SharedWeights(pieces_of(model, layout), out, inn)
    return TrainedReplica(weights, [0] * num_fragments, residuals, inner)


def learning_rate_of(job: Job, step: int) -> float:
    scale = job.scale
    return learning_rate(
        step, peak=job.inner_lr, warmup_steps=scale.warmup_steps, total_steps=scale.total_steps
    )


def samples_of(source: SampleSource, job: Job, rank: int, step: int) -> np.ndarray:
    """The samples of a peer in a nominal step, the same in every arm: int64 [peer_batch_size, seq_length + 1]."""
    scale = job.scale
    number, local_step = divmod(step, scale.local_steps)
    data_base = number * scale.num_peers * source.samples_per_block
    block = Block(epoch=number, world_rank=rank, data_base=data_base)
    return source.read(block, step_offsets(local_step, total_batch_size=scale.peer_batch_size))


def all_tensors(swarm: LocalSwarm | DataParallel) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights and optimizer states of all replicas by name, not copied."""
    for rank, replica in enumerate(swarm.replicas):
        for name, parameter in replica.inner.model.named_parameters():
            yield f"{rank}.{name}", parameter.detach()
            for key, value in replica.inner.optimizer.state[parameter].items():
                yield f"{rank}.{name}.{key}", value
