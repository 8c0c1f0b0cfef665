"""What is trained, and how the arms differ."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from diloco.options.flags import HvConfig, TrainConfig
from diloco.options.trainer import for_mode
from peers.core.defaults import outer_momentum_for, residual_decay_for
from peers.core.schedule import Schedule

Optimizer = Literal["adamw", "muon"]
DATA_PARALLEL, FP32 = "data parallel", "fp32"
DATA_PARALLEL_MUON, MUON = "data parallel muon", "muon"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What all arms of one study have in common."""

    name: str
    preset: str
    """A model beside this file, or one of diloco's."""
    dataset: str = "stdlib"
    device: str = "cpu"
    seq_length: int
    num_peers: int = 4
    peer_batch_size: int
    """Samples of one peer in an inner step."""
    local_steps: int = 30
    """H; 30 is that of the papers on scaling laws, MuLoCo and SparseLoCo (arXiv 2503.09799, 2505.23725, 2508.15706)."""
    total_steps: int
    warmup_steps: int
    eval_interval: int
    curve_tokens: int = 32_768
    eval_tokens: int = 524_288
    """Held-out tokens at the end; the same for all arms, so that their choice cancels in differences."""
    beta2: float = 0.95
    """AdamW's, in every arm."""
    inner_lr: float = 4e-3
    """Where tuning starts under AdamW."""
    muon_lr: float = 16e-3
    """Where it starts under Muon."""
    outer_lr: float = 0.6
    outer_momentum: float = 0.6
    """In a pilot with few outer steps better than 0.8 and 0.9, under both optimizers."""
    seeds: tuple[int, ...] = tuple(range(1, 6))
    tuning_seed: int = 0

    @property
    def path_model(self) -> str:
        own = Path(__file__).parent / self.preset
        return str(own) if own.is_dir() else self.preset

    @property
    def tokens(self) -> int:
        """Of one arm, over all peers."""
        return self.total_steps * self.num_peers * self.peer_batch_size * self.seq_length

    def train_config(self, seed: int, optimizer: Optimizer = "adamw") -> TrainConfig:
        """Of one peer; blocks of data are those of classic DiLoCo in every arm, so that all see the same."""
        config = TrainConfig(
            optimizer=optimizer,
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
        return for_mode(config, {"lr"})


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of averaging."""

    name: str
    optimizer: Optimizer = "adamw"
    compression: str = "fp32"
    num_fragments: int = 1
    overlap_steps: int = 0
    mixing: float | None = None
    """Of what overlapped; none: all progress is kept."""
    slowness: int = 1
    """How many nominal steps the last peer needs for one of its own: it is in every so-many-th commit only, with work
    that the others' commits have made stale, on top of their newest anchor."""
    outer_momentum: float | None = None
    """Where a paper prescribes one; none: the study's."""
    outer_lr: float | None = None
    """Where a paper prescribes one; none: the tuned one of its optimizer in fp32."""
    reference: str = FP32
    """The arm it is held against, beside data parallel."""
    target: float | None = None
    """The most its loss may exceed that of its reference, in per cent."""

    @property
    def averages(self) -> bool:
        return self.name not in (DATA_PARALLEL, DATA_PARALLEL_MUON)

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
    def outer_momentum(self) -> float:
        own = self.arm.outer_momentum
        return self.scale.outer_momentum if own is None else own

    @property
    def residual_decay(self) -> float:
        """Of what the arm's codec keeps back."""
        return residual_decay_for(self.arm.compression, self.scale.local_steps)

    @property
    def key(self) -> str:
        """Names the run's files; another setting gives another name, so old results are never taken for new ones."""
        settings = {**asdict(self), "residual_decay": self.residual_decay}
        # How a study goes about it changes nothing about a run.
        for field in ("inner_lr", "muon_lr", "outer_lr", "seeds", "tuning_seed"):
            del settings["scale"][field]
        for field in ("reference", "target", "outer_lr"):
            del settings["arm"][field]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.arm.name.replace(' ', '-')}-seed{self.seed}-{digest}"


def arms(scale: Scale) -> dict[str, Arm]:
    """All of them, by name, in the order of the table."""
    fp32 = Arm(name=FP32, reference=DATA_PARALLEL)
    muon = Arm(name=MUON, optimizer="muon", reference=FP32, target=-3.0)
    streaming = replace(fp32, name="streaming", num_fragments=2, reference=FP32, target=0.3)
    sparse = {"compression": "topk", "outer_momentum": outer_momentum_for("topk"), "outer_lr": 1.0}
    overlap = min(5, scale.local_steps // 2 - 1)
    found = (
        Arm(name=DATA_PARALLEL),
        replace(muon, name=DATA_PARALLEL_MUON, reference=DATA_PARALLEL, target=None),
        fp32,
        muon,
        replace(fp32, name="int8", compression="int8", reference=FP32, target=0.1),
        replace(fp32, name="int4", compression="int4", reference=FP32, target=0.1),
        replace(fp32, name="2bit", compression="2bit", reference=FP32, target=0.0),
        Arm(name="topk", target=0.0, **sparse),
        replace(muon, name="muon int4", compression="int4", reference=MUON, target=0.1),
        replace(muon, name="muon 2bit", compression="2bit", reference=MUON, target=0.0),
        Arm(name="muon topk", optimizer="muon", reference=MUON, target=0.0, **sparse),
        replace(streaming, overlap_steps=overlap),
        replace(streaming, name="streaming mixed", overlap_steps=overlap, mixing=0.5),
        replace(streaming, name="streaming short", overlap_steps=1),
        replace(streaming, name="streaming short mixed", overlap_steps=1, mixing=0.5),
        replace(fp32, name="one-epoch delay", overlap_steps=scale.local_steps - 1, reference=FP32),
        *(replace(fp32, name=f"one peer {n}x slower", slowness=n, reference=FP32) for n in (2, 3, 4)),
    )
    return {arm.name: arm for arm in found}


SCALES = {
    # 20 tokens for each of 1.06M parameters, of which 0.99M are in matrices.
    "1m": Scale(
        name="1m",
        preset="1m",
        seq_length=256,
        peer_batch_size=8,
        total_steps=2610,
        warmup_steps=90,
        eval_interval=180,
    ),
    # The one of the published figures. Few tokens, so H is 6: with 12 DiLoCo lost twice as much in pilots. After so
    # few samples a step, a beta2 of 0.95 forgets the gradients' scale in a few hundred tokens (arXiv 2507.07101).
    "80k": Scale(
        name="80k",
        preset="80k",
        seq_length=128,
        peer_batch_size=1,
        local_steps=6,
        total_steps=7812,
        warmup_steps=240,
        eval_interval=600,
        beta2=0.99,
        outer_momentum=0.5,
        seeds=tuple(range(1, 8)),
    ),
    "quick": Scale(
        name="quick",
        preset="demo",
        total_steps=12,
        local_steps=6,
        warmup_steps=3,
        eval_interval=6,
        curve_tokens=2048,
        eval_tokens=4096,
        seq_length=32,
        peer_batch_size=1,
        seeds=(1,),
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
