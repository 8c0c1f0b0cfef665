"""The settings of a study: its scale, which all arms share, and the arms."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from diloco.options.flags import HvConfig, TrainConfig
from diloco.options.trainer import with_mode_defaults
from peers.core.defaults import outer_momentum_for, residual_decay_for
from peers.core.schedule import Schedule

Optimizer = Literal["adamw", "muon"]
DATA_PARALLEL, FP32 = "data parallel", "fp32"
DATA_PARALLEL_MUON, MUON = "data parallel muon", "muon"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Settings that all arms of a study share."""

    name: str
    preset: str
    """A model directory beside this file, or one of diloco's presets."""
    dataset: str = "stdlib"
    device: str = "cpu"
    seq_length: int
    num_peers: int = 4
    peer_batch_size: int
    """Samples per inner step of one peer."""
    local_steps: int = 30
    """H; 30 as in the papers on scaling laws, MuLoCo and SparseLoCo (arXiv 2503.09799, 2505.23725, 2508.15706)."""
    total_steps: int
    warmup_steps: int
    eval_interval: int
    curve_tokens: int = 32_768
    eval_tokens: int = 524_288
    """Held-out tokens of the final evaluation; the same for all arms, so that their choice cancels in differences."""
    beta2: float = 0.95
    """AdamW's beta2 in every arm."""
    inner_lr: float = 4e-3
    """Start value for tuning with AdamW."""
    muon_lr: float = 16e-3
    """Start value for tuning with Muon."""
    outer_lr: float = 0.6
    outer_momentum: float = 0.6
    """Better than 0.8 and 0.9 in a pilot with few outer steps, with both optimizers."""
    seeds: tuple[int, ...] = tuple(range(1, 6))
    tuning_seed: int = 0
    models_at_once: int = 32
    """On a GPU: models in one forward and backward pass, whose activations share its memory."""

    @property
    def path_model(self) -> str:
        own = Path(__file__).parent / self.preset
        return str(own) if own.is_dir() else self.preset

    @property
    def tokens(self) -> int:
        """Tokens of one arm, over all peers."""
        return self.total_steps * self.num_peers * self.peer_batch_size * self.seq_length

    def train_config(self, seed: int, optimizer: Optimizer = "adamw") -> TrainConfig:
        """The configuration of one peer. All arms use the data blocks of classic DiLoCo, so they see the same data."""
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
        return with_mode_defaults(config, {"lr"})


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of averaging."""

    name: str
    optimizer: Optimizer = "adamw"
    compression: str = "fp32"
    num_fragments: int = 1
    overlap_steps: int = 0
    mixing: float | None = None
    """`--hv.mixing` for the merge after overlap; None keeps all local progress."""
    slowness: int = 1
    """Nominal steps that the last peer needs per step of its own. That peer contributes only to every `slowness`-th
    commit, with its stale work rebased on the newest anchor."""
    outer_momentum: float | None = None
    """The value that a paper prescribes; None: the study's."""
    outer_lr: float | None = None
    """The value that a paper prescribes; None: the one tuned for its optimizer in fp32."""
    reference: str = FP32
    """The arm to compare with, besides data parallel."""
    target: float | None = None
    """Upper limit of the loss relative to the reference's, in per cent."""

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
    """One run: an arm, a seed and its learning rates."""

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
        """Factor by which the codec's residuals decay."""
        return residual_decay_for(self.arm.compression, self.scale.local_steps)

    @property
    def key(self) -> str:
        """The name of the run's files. A digest keeps results with other settings from being reused."""
        settings = {**asdict(self), "residual_decay": self.residual_decay}
        # These fields affect the study but not a single run.
        for field in ("inner_lr", "muon_lr", "outer_lr", "seeds", "tuning_seed", "models_at_once"):
            del settings["scale"][field]
        for field in ("reference", "target", "outer_lr"):
            del settings["arm"][field]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.arm.name.replace(' ', '-')}-seed{self.seed}-{digest}"


def arms(scale: Scale) -> dict[str, Arm]:
    """All arms by name, in the order of the table: first with AdamW, then with Muon (`muon` is in their names)."""
    fp32 = Arm(name=FP32, reference=DATA_PARALLEL)
    muon = Arm(name=MUON, optimizer="muon", reference=FP32, target=-3.0)
    found = (
        Arm(name=DATA_PARALLEL),
        fp32,
        *_ways_of_averaging(fp32, scale),
        Arm(name=DATA_PARALLEL_MUON, optimizer="muon", reference=DATA_PARALLEL),
        muon,
        *(replace(arm, name=f"{MUON} {arm.name}") for arm in _ways_of_averaging(muon, scale)),
    )
    return {arm.name: arm for arm in found}


def _ways_of_averaging(plain: Arm, scale: Scale) -> list[Arm]:
    """The arms that are compared with `plain`, which is DiLoCo in fp32 that waits for every peer."""
    plain = replace(plain, reference=plain.name, target=None)
    average = replace(plain, name="plain average", outer_lr=1.0, outer_momentum=outer_momentum_for("topk"))
    overlap = min(5, scale.local_steps // 2 - 1)
    streaming = replace(plain, name="streaming", num_fragments=2, overlap_steps=overlap, target=0.3)
    return [
        replace(plain, name="int8", compression="int8", target=0.1),
        replace(plain, name="int4", compression="int4", target=0.1),
        replace(plain, name="2bit", compression="2bit", target=0.0),
        replace(plain, name="1bit", compression="1bit", target=0.0),
        average,
        replace(average, name="topk", compression="topk", target=0.0),
        streaming,
        replace(streaming, name="streaming mixed", mixing=0.5),
        replace(streaming, name="streaming short", overlap_steps=1),
        replace(streaming, name="streaming short mixed", overlap_steps=1, mixing=0.5),
        replace(plain, name="one-epoch delay", overlap_steps=scale.local_steps - 1),
        *(replace(plain, name=f"one peer {n}x slower", slowness=n) for n in (2, 3, 4)),
    ]


SCALES = {
    # 20 tokens per parameter: 1.06M parameters, of which 0.99M are in matrices.
    "1m": Scale(
        name="1m",
        preset="1m",
        seq_length=256,
        peer_batch_size=8,
        total_steps=2610,
        warmup_steps=90,
        eval_interval=180,
        inner_lr=8e-3,
    ),
    # The study of the published figures. H is 6 because there are few tokens: with 12, DiLoCo's gap to data parallel
    # was twice as large in pilots. With so few samples per step, a beta2 of 0.95 would average the gradients' scale
    # over only a few hundred tokens (arXiv 2507.07101).
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
    # For a GPU. 159M parameters, of which 158M are in hidden matrices. diloco's own preset of this size has 65M in the
    # embedding and the head, hardly any of which belong to the 264 token ids of byte-level text.
    "150m": Scale(
        name="150m",
        preset="150m",
        device="cuda",
        seq_length=1024,
        peer_batch_size=8,
        total_steps=300,
        warmup_steps=30,
        eval_interval=30,
        curve_tokens=131_072,
        inner_lr=1e-3,
        seeds=(1,),
        models_at_once=4,
    ),
}
