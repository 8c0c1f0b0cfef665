"""Decides when the peers of a run average and what each peer gets, however their inner steps are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from benchmarks.convergence.reduction import Member, average
from benchmarks.convergence.settings import Job
from diloco.outer.exchange import SharedWeights
from peers.reduce.residuals import Residuals
from peers.state.outer_optimizer import OuterOptimizer, rebase
from peers.state.outer_state import OuterState


@dataclass(eq=False)
class Replica:
    """One peer's worker, as its daemon sees it."""

    weights: SharedWeights
    tokens: list[int]
    """For each fragment, the tokens trained since it was averaged."""
    residuals: list[Residuals]
    """For each fragment, the residuals of the codec."""

    def load(self, anchor: Sequence[Tensor]) -> None:
        """Load all of these weights."""
        replace(self.weights, inn=anchor).take()


class AveragedSwarm:
    """The peers of a DiLoCo run. Call `end_step` after their inner steps: it makes an outer step that is due."""

    def __init__(self, job: Job, replicas: Sequence[Replica]) -> None:
        """All replicas hold the initial weights."""
        self._job, self.members = job, replicas
        self.schedule = job.arm.schedule(job.scale)
        replicas[0].weights.put()
        self.state = OuterState.initial([values.clone() for values in replicas[0].weights.out])
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
        self.visible_shares: list[float] = []
        """Of each epoch: the share of the first peer's weights in which bf16 shows its training (arXiv 2602.03839)."""
        self._left_at: int | None = None
        """Local step at which the epoch's fragment was handed over; None: not yet."""

    @property
    def at_rest(self) -> bool:
        """Whether no fragment is in flight, so that the state can be saved."""
        return self.num_steps % self.schedule.steps_per_epoch == 0

    def trains(self, rank: int) -> bool:
        """Whether this peer trains in the coming nominal step; a slow peer trains in every n-th only."""
        return self.num_steps % self._slowness_of(rank) == 0

    def end_step(self) -> None:
        """Count the step that the peers have trained, and hand over or average fragments that are due."""
        scale = self._job.scale
        for rank, replica in enumerate(self.members):
            if self.trains(rank):
                replica.tokens = [
                    tokens + scale.peer_batch_size * scale.seq_length for tokens in replica.tokens
                ]
        self.num_steps += 1
        self._average_if_due()

    def write_anchor(self, replica: Replica) -> None:
        """Load the anchor into the replica."""
        replica.load(self.state.anchor)

    def carried(self) -> dict[str, Any]:
        """The state of the peers besides weights, optimizers and outer state. Call it between two epochs."""
        residuals = []
        for replica in self.members:
            for kept in replica.residuals:
                with kept.held() as tensors:
                    residuals.append({name: values.clone() for name, values in tensors.items()})
        tokens = [replica.tokens for replica in self.members]
        return {
            "epoch": self.epoch,
            "tokens": tokens,
            "committed_tokens": self.committed_tokens,
            "residuals": residuals,
            "late_base": self._late_base,
            "sent_bytes": self.sent_bytes,
            "visible_shares": self.visible_shares,
        }

    def carry(self, carried: Mapping[str, Any]) -> None:
        """Restore what `carried` returned."""
        self.epoch, self.sent_bytes = carried["epoch"], carried["sent_bytes"]
        self.committed_tokens = carried["committed_tokens"]
        saved = iter(carried["residuals"])
        self._late_base, self.visible_shares = carried["late_base"], carried["visible_shares"]
        for replica, tokens in zip(self.members, carried["tokens"], strict=True):
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
        for replica in self.members:
            replica.weights.put(fragment)
        self._left_at = local_step

    def _collect(self, local_step: int) -> None:
        """Average the fragment that was handed over, make the outer step, and give every peer the new weights."""
        fragment, left_at = self.schedule.fragment_of(self.epoch), self._left_at
        assert left_at is not None
        since = (local_step - left_at) * self._job.scale.peer_batch_size * self._job.scale.seq_length
        ready = self._ready()
        late = self.members[-1]
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
        self._count_visible(fragment, members[0].local)
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

    def _count_visible(self, fragment: int, local: Tensor) -> None:
        anchor = self.state.anchor[fragment]
        share = (anchor.bfloat16() != local.bfloat16()).float().mean().item()
        self.visible_shares.append(share)

    def _slowness_of(self, rank: int) -> int:
        return self._job.arm.slowness if rank == len(self.members) - 1 else 1

    def _ready(self) -> list[Replica]:
        """The replicas that have done all steps of an epoch since their last average; at the end of the run all."""
        is_end = self.num_steps >= self._job.scale.total_steps
        numbered = enumerate(self.members)
        return [r for rank, r in numbered if is_end or not (self.epoch + 1) % self._slowness_of(rank)]
