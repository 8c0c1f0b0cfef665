"""What is trained, and how the arms differ."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from diloco.options.flags import HvConfig, TrainConfig
from peers.core.defaults import outer_momentum_for, residual_decay_for
from peers.core.schedule import Schedule

DATA_PARALLEL, FP32 = "data parallel", "fp32"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What all arms of one study have in common."""

    name: str
    preset: str = "80k"
    """A model beside this file, or one of diloco's. So small that 4M tokens are 49 for each parameter."""
    dataset: str = "stdlib"
    device: str = "cpu"
    seq_length: int = 128
    num_peers: int = 4
    peer_batch_size: int = 1
    """Samples of one peer in an inner step; few, so that 4M tokens make many outer steps."""
    local_steps: int = 6
    """H. The cadence of the scaling-laws paper (arXiv 2503.09799) is 30; for that, 4M tokens make too few outer steps.

    In pilots fp32 DiLoCo lost twice as much with 12 as with 6.
    """
    total_steps: int = 7812
    """1302 epochs of 6 steps; with 512 tokens a step, 4.0M tokens."""
    warmup_steps: int = 240
    eval_interval: int = 600
    curve_tokens: int = 32_768
    eval_tokens: int = 524_288
    """Held-out tokens at the end; the same for all arms, so that their choice cancels in differences."""
    beta2: float = 0.99
    """AdamW's, in every arm. With so few samples in a step, 0.95 forgets the gradients' scale within a few hundred
    tokens (arXiv 2507.07101); in pilots both data parallel and fp32 DiLoCo lost 1 % by it."""
    inner_lr: float = 4e-3
    """Where tuning starts."""
    outer_lr: float = 0.6
    seeds: tuple[int, ...] = tuple(range(1, 8))
    """So small a batch is noisy: of one seed, the run in int8 ends up to 0.8 % of its loss from the one in fp32."""
    tuning_seed: int = 0

    @property
    def path_model(self) -> str:
        own = Path(__file__).parent / self.preset
        return str(own) if own.is_dir() else self.preset

    @property
    def tokens(self) -> int:
        """Of one arm, over all peers."""
        return self.total_steps * self.num_peers * self.peer_batch_size * self.seq_length

    def train_config(self, seed: int) -> TrainConfig:
        """For the data and the model; blocks are those of classic DiLoCo in every arm, so that all see the same."""
        return TrainConfig(
            path_model=self.path_model,
            dataset_name_or_path=self.dataset,
            seq_length=self.seq_length,
            total_batch_size=self.peer_batch_size,
            total_steps=self.total_steps,
            warmup_steps=self.warmup_steps,
            eval_tokens=self.eval_tokens,
            seed=seed,
            hv=HvConfig(local_steps=self.local_steps),
        )


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of averaging."""

    name: str
    compression: str = "fp32"
    num_fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    """In a pilot of streaming (one seed) 0.5, which its paper takes where less of the overlapped steps is kept, was 2 %
    worse, and 0.25 no better."""
    outer_momentum: float = 0.5
    """In pilots better than none, and than the 0.9 that is usual for longer runs with a larger H."""
    outer_lr: float | None = None
    """Where a paper prescribes one of its own; none: fp32 DiLoCo's tuned one. Streaming's paper has 0.4, by which
    pilots of three seeds ended 0.5 to 2 % worse."""
    reference: str = FP32
    """The arm it is held against, beside data parallel."""
    target: float | None = None
    """The most its loss may exceed that of its reference, in per cent."""

    @property
    def averages(self) -> bool:
        return self.name != DATA_PARALLEL

    def schedule(self, scale: Scale) -> Schedule:
        return Schedule(
            local_steps=scale.local_steps,
            num_fragments=self.num_fragments,
            overlap_steps=self.overlap_steps,
            mixing=self.mixing,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: an arm, a seed and its rates."""

    scale: Scale
    arm: Arm
    seed: int
    inner_lr: float
    outer_lr: float

    @property
    def residual_decay(self) -> float:
        """Of what the arm's codec keeps back."""
        return residual_decay_for(self.arm.compression, self.scale.local_steps)

    @property
    def key(self) -> str:
        """Names the run's files; another setting gives another name, so old results are never taken for new ones."""
        settings = {**asdict(self), "residual_decay": self.residual_decay}
        # How a study goes about it changes nothing about a run.
        for field in ("inner_lr", "outer_lr", "seeds", "tuning_seed"):
            del settings["scale"][field]
        for field in ("reference", "target", "outer_lr"):
            del settings["arm"][field]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.arm.name.replace(' ', '-')}-seed{self.seed}-{digest}"


def arms(scale: Scale) -> dict[str, Arm]:
    """All of them, by name, in the order of the table."""
    fp32 = Arm(name=FP32, reference=DATA_PARALLEL, target=2.0)
    delay = scale.local_steps - 1
    found = (
        Arm(name=DATA_PARALLEL, target=None),
        fp32,
        replace(fp32, name="int8", compression="int8", reference=FP32, target=0.1),
        replace(fp32, name="int4", compression="int4", reference=FP32, target=0.5),
        Arm(
            name="topk",
            compression="topk",
            outer_momentum=outer_momentum_for("topk"),
            outer_lr=1.0,
            target=1.0,
        ),
        replace(fp32, name="streaming", num_fragments=2, overlap_steps=2, reference=FP32, target=0.5),
        replace(fp32, name="one-epoch delay", overlap_steps=delay, reference=FP32, target=None),
    )
    return {arm.name: arm for arm in found}


SCALES = {
    "demo": Scale(name="demo"),
    "quick": Scale(
        name="quick",
        preset="demo",
        total_steps=24,
        local_steps=6,
        warmup_steps=3,
        eval_interval=6,
        curve_tokens=2048,
        eval_tokens=4096,
        seq_length=32,
        peer_batch_size=1,
        seeds=(1, 2),
    ),
    # Untested: written for whenever a GPU is there.
    "150m": Scale(
        name="150m",
        preset="150m",
        device="cuda",
        seq_length=1024,
        peer_batch_size=16,
        local_steps=30,
        total_steps=600,
        warmup_steps=60,
        eval_interval=60,
        curve_tokens=131_072,
        eval_tokens=524_288,
        inner_lr=1e-3,
        seeds=(1,),
    ),
}
