"""The peers of a run in one process, which train in turns and average like a swarm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.convergence.reduction import Member, average
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
from peers.state.outer_optimizer import OuterOptimizer, rebase
from peers.state.outer_state import OuterState


@dataclass
class Replica:
    """One peer's worker: its model and optimizer, and the buffers that it would share with its daemon."""

    inner: InnerLoop
    weights: SharedWeights
    tokens: list[int]
    """For each fragment, the tokens trained since it was averaged."""
    residuals: list[Residuals]
    """For each fragment, the residuals of the codec."""

    def load(self, anchor: Sequence[Tensor]) -> None:
        """Take over all of these weights."""
        replace(self.weights, inn=anchor).take()


class LocalSwarm:
    """The peers of a DiLoCo run. `step` runs one inner step of each peer, and the outer step if it is due."""

    def __init__(self, job: Job, source: SampleSource) -> None:
        self._job, self._source = job, source
        self.schedule = job.arm.schedule(job.scale)
        self.replicas = [new_replica(job, self.schedule.num_fragments) for _ in range(job.scale.num_peers)]
        self.replicas[0].weights.put()
        self.state = OuterState.initial([values.clone() for values in self.replicas[0].weights.out])
        self._late_base = [values.clone() for values in self.state.anchor]
        """The anchor on which the last peer's work is based, if that peer is slower than the others."""
        self._optimizer = OuterOptimizer(lr=job.outer_lr, momentum=job.outer_momentum)
        self.num_steps = 0
        self.epoch = 0
        """Outer steps done."""
        self.committed_tokens = 0
        """Tokens averaged so far, counted once per fragment."""
        self.sent_bytes = 0
        """Mean bytes sent per peer since the beginning."""
        self._left_at: int | None = None
        """Local step at which the epoch's fragment was handed over, if it was."""

    @property
    def at_rest(self) -> bool:
        """Whether no fragment is in flight, so that the state can be saved."""
        return self.num_steps % self.schedule.steps_per_epoch == 0

    def step(self) -> float:
        """Train one inner step of every peer. Returns their mean loss."""
        scale = self._job.scale
        lr = learning_rate_of(self._job, self.num_steps)
        losses = []
        for rank, replica in enumerate(self.replicas):
            if self.num_steps % self._slowness_of(rank):
                continue
            samples = torch.from_numpy(samples_of(self._source, self._job, rank, self.num_steps))
            losses.append(replica.inner.step(samples, lr=lr).loss)
            replica.tokens = [tokens + scale.peer_batch_size * scale.seq_length for tokens in replica.tokens]
        self.num_steps += 1
        self._average_if_due()
        return float(np.mean(losses))

    def write_anchor(self, replica: Replica) -> None:
        """Load the anchor into the replica."""
        replica.load(self.state.anchor)

    def carried(self) -> dict[str, Any]:
        """The state of the peers besides weights, optimizers and outer state. Call it between two epochs."""
        residuals = []
        for replica in self.replicas:
            for kept in replica.residuals:
                with kept.held() as tensors:
                    residuals.append({name: values.clone() for name, values in tensors.items()})
        tokens = [replica.tokens for replica in self.replicas]
        return {
            "epoch": self.epoch,
            "tokens": tokens,
            "committed_tokens": self.committed_tokens,
            "residuals": residuals,
            "late_base": self._late_base,
            "sent_bytes": self.sent_bytes,
        }

    def carry(self, carried: Mapping[str, Any]) -> None:
        """Restore what `carried` returned."""
        self.epoch, self.sent_bytes = carried["epoch"], carried["sent_bytes"]
        self.committed_tokens = carried["committed_tokens"]
        saved = iter(carried["residuals"])
        self._late_base = carried["late_base"]
        for replica, tokens in zip(self.replicas, carried["tokens"], strict=True):
            replica.tokens = list(tokens)
            replica.residuals = [
                Residuals.from_tensors(out.numel(), next(saved)) for out in replica.weights.out
            ]

    def _average_if_due(self) -> None:
        """Hand over and average fragments after a step, as diloco.outer.diloco.Diloco does."""
        end, schedule = self._job.scale.total_steps, self.schedule
        local_step = self.num_steps - self.epoch * schedule.steps_per_epoch
        if self.num_steps >= end:
            self._average_all(local_step)
            return
        if self._left_at is None and local_step >= schedule.leaves_at(self.epoch, end):
            self._leave(local_step)
        if local_step >= schedule.steps_per_epoch:
            self._collect(local_step)

    def _average_all(self, local_step: int) -> None:
        """At the end of the run, average every fragment once more, without overlap."""
        if self._left_at is not None:
            self._collect(local_step)
        while self.epoch < self.schedule.final_epoch(self._job.scale.total_steps):
            self._leave(local_step)
            self._collect(local_step)

    def _leave(self, local_step: int) -> None:
        fragment = self.schedule.fragment_of(self.epoch)
        for replica in self.replicas:
            replica.weights.put(fragment)
        self._left_at = local_step

    def _collect(self, local_step: int) -> None:
        """Average the fragment that was handed over, make the outer step, and give every peer the new weights."""
        fragment, left_at = self.schedule.fragment_of(self.epoch), self._left_at
        assert left_at is not None
        since = (local_step - left_at) * self._job.scale.peer_batch_size * self._job.scale.seq_length
        ready = self._ready()
        late = self.replicas[-1]
        if self._job.arm.slowness > 1 and late in ready:
            out, base = late.weights.out[fragment], self._late_base[fragment]
            rebase(self.state.anchor[fragment], out, base, out)
        members = [
            Member(
                r.weights.out[fragment],
                r.tokens[fragment] - since,
                r.residuals[fragment],
                r.weights.inn[fragment],
            )
            for r in ready
        ]
        codec = self._job.arm.compression
        self.sent_bytes += average(
            self.state.anchor[fragment], members, codec=codec, decay=self._job.residual_decay
        )
        self._optimizer.commit(self.state, fragment, members[0].result)
        self.epoch += 1
        self.committed_tokens += sum(member.tokens for member in members)
        if late in ready:
            self._late_base[fragment].copy_(self.state.anchor[fragment])
        for replica in ready:
            replica.tokens[fragment] = since
            weights = replace(replica.weights, inn=self.state.anchor)
            if local_step > left_at:
                weights.merge(fragment, mixing=self.schedule.mixing)
            else:
                weights.take(fragment)
        self._left_at = None

    def _slowness_of(self, rank: int) -> int:
        return self._job.arm.slowness if rank == len(self.replicas) - 1 else 1

    def _ready(self) -> list[Replica]:
        """The replicas that have done all steps of an epoch since their last average; at the end of the run all."""
        is_end = self.num_steps >= self._job.scale.total_steps
        numbered = enumerate(self.replicas)
        return [r for rank, r in numbered if is_end or not (self.epoch + 1) % self._slowness_of(rank)]


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


def new_replica(job: Job, num_fragments: int) -> Replica:
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
    return Replica(inner, weights, [0] * num_fragments, residuals)


def learning_rate_of(job: Job, step: int) -> float:
    scale = job.scale
    return learning_rate(
        step, peak=job.inner_lr, warmup_steps=scale.warmup_steps, total_steps=scale.total_steps
    )


def samples_of(source: SampleSource, job: Job, rank: int, step: int) -> np.ndarray:
    """The samples of a peer in a nominal step, the same in every arm: int64 [peer_batch_size, seq_length + 1]."""
    scale = job.scale
    number, local_step = divmod(step, scale.local_steps)
    block = Block(epoch=number, world_rank=rank, data_base=number * scale.num_peers)
    return source.read(block, step_offsets(local_step, total_batch_size=scale.peer_batch_size))


def all_tensors(swarm: LocalSwarm | DataParallel) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights and optimizer states of all replicas by name, not copied."""
    for rank, replica in enumerate(swarm.replicas):
        for name, parameter in replica.inner.model.named_parameters():
            yield f"{rank}.{name}", parameter.detach()
            for key, value in replica.inner.optimizer.state[parameter].items():
                yield f"{rank}.{name}.{key}", value
