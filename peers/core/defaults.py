"""Defaults from published experiments for settings that the user did not tune, each with its source and its limits.

Pure functions of what a run knows beforehand. They are starting points: a value tuned on the user's own model beats
them.
"""

from __future__ import annotations

import math
from itertools import pairwise

from peers.protocol.codecs import BITS_BY_CODEC

_LR_BY_PEERS = ((1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8))
_LR_MEASURED_AT_H = 30
_LR_FALL_PER_DECADE = 0.2
_LR_LEAST = 0.2
_STREAMING_LR = 0.4
_MUON_LR_BY_PEERS = ((1, 0.7), (16, 1.0))
_MUON_MOMENTUM_BY_PEERS = ((1, 0.6), (16, 0.9))
_SPARSE_LR = 1.0
_SPARSE_DECAY = 0.95
_DECAYS_IN_STEPS = 30
_OUTER_MOMENTUM = 0.9
_SPARSE, _MUON = "topk", "muon"
SHARE_OF_EPOCH = 0.05
"""The largest share of an epoch that a round may take while training waits for it."""


def outer_lr_for(
    num_peers: int,
    local_steps: int,
    *,
    num_fragments: int = 1,
    compression: str = "fp32",
    optimizer: str = "adamw",
) -> float:
    """The learning rate of the outer Nesterov SGD (momentum 0.9) where it was not tuned.

    Classic DiLoCo: "Scaling Laws for DiLoCo", arXiv 2503.09799, figure 7 and section 5.1. Swept over {0.2, 0.4, 0.6,
    0.8, 1.0} at H = 30, models of 35M to 2.4B parameters, best inner rate and batch size for each: 0.4 for one
    peer, 0.6 for two and four, 0.8 for eight, the same for all sizes from 335M on (smaller ones differ by one step of
    the sweep). Between those counts it is interpolated in log2(peers); above eight peers nothing was measured, and
    the value for eight stands.

    By H: the same paper finds (figure 8a, H from 1 to 300, at most four peers) that the best rate rises with H, but
    gives a plot and no table. For H below 30 this takes off 0.2, one step of its sweep, per factor of ten: the
    direction is theirs, the slope ours. Above 30 the rate is kept, since the first paper's tuned rate at H = 500 and
    eight peers, arXiv 2311.08105 section 3, is 0.7.

    Several fragments: "Streaming DiLoCo", arXiv 2501.18512, uses 0.4 (two peers, H = 100, 35M to 4B parameters).

    Top-k: SparseLoCo, arXiv 2508.15706, algorithm 1, steps along the plain average of what was sent with a rate near
    1: its decayed residual stands in for the momentum (see outer_momentum_for). Tried on 512M parameters; the 72B run
    built on it (Covenant, H = 30) is reported to have begun with 1 and ended with 0.65.

    Muon: MuLoCo, arXiv 2505.23725, tuned at H = 30 from 150M to 3.1B parameters: 0.7 for one peer, 1 for sixteen.
    Between them it is interpolated in log2(peers), our choice. The paper tried no other H; its streaming has the same.
    """
    if num_peers < 1 or local_steps < 1 or num_fragments < 1:
        raise ValueError(
            f"peers, local steps and fragments are at least 1, not {num_peers}, {local_steps}, {num_fragments}"
        )
    if compression == _SPARSE:
        return _SPARSE_LR
    if optimizer == _MUON:
        return round(_by_peers(_MUON_LR_BY_PEERS, num_peers), 2)
    if num_fragments > 1:
        return _STREAMING_LR
    fall = _LR_FALL_PER_DECADE * max(0.0, math.log10(_LR_MEASURED_AT_H / local_steps))
    return round(max(_LR_LEAST, _by_peers(_LR_BY_PEERS, num_peers) - fall), 2)


def outer_momentum_for(compression: str, num_peers: int = 1, *, optimizer: str = "adamw") -> float:
    """Momentum of the outer SGD: 0.9 with Nesterov (arXiv 2311.08105 section 3, and every later paper of that line).

    Muon: MuLoCo, arXiv 2505.23725: 0.6 for one peer, 0.9 for sixteen, interpolated between them as in outer_lr_for.

    None for top-k: in SparseLoCo (arXiv 2508.15706) each peer keeps and decays what it did not send, and that
    does the momentum's work.
    """
    if compression == _SPARSE:
        return 0.0
    return round(_by_peers(_MUON_MOMENTUM_BY_PEERS, num_peers), 2) if optimizer == _MUON else _OUTER_MOMENTUM


def residual_decay_for(compression: str, local_steps: int) -> float:
    """The factor by which a contribution's residual decays from one contribution to the next, H steps later.

    1 except for top-k: SparseLoCo (arXiv 2508.15706, algorithm 1) has 0.95 per epoch. With that, a value that moves by
    the same small amount in each epoch accumulates to at most twenty times the amount; if that is below top-k's
    threshold, it is never sent. The shorter the epochs, the more values stay below it. So this decays as much per step
    as 5 % per epoch of 30 steps, the cadence of Covenant, the 72B run built on that paper: 0.95^(H/30) for H below 30,
    and 0.95 above; with a time budget, by nominal steps. This rule is ours, not the paper's: at H = 6 top-k ended 2.8 %
    above fp32 with 0.95 in benchmarks/convergence (three seeds), and 0.8 % with this (seven seeds, +- 0.5).
    """
    return _SPARSE_DECAY ** min(1.0, local_steps / _DECAYS_IN_STEPS) if compression == _SPARSE else 1.0


def lighter_compression(codec: str, factor: float) -> str | None:
    """The least lossy codec whose bytes are at most `factor` times those of `codec`, else the smallest; None if `codec`
    is the smallest already, or is unknown.

    What they cost: int8 was enough for a 10B run over the internet (INTELLECT-1, arXiv 2412.01152, section 2); 4-bit
    outer gradients cost nothing measurable from 35M to 4B parameters (Streaming DiLoCo, arXiv 2501.18512, section 4);
    2 bits by statistical quantization cost little (MuLoCo, arXiv 2505.23725, with error feedback). 1bit and top-k cost
    some per cent in benchmarks/convergence; top-k also changes the outer optimizer, so it comes last.
    """
    most = BITS_BY_CODEC.get(codec, 0.0)
    lighter = [name for name, bits in BITS_BY_CODEC.items() if bits < most]
    enough = (name for name in lighter if BITS_BY_CODEC[name] <= factor * most)
    return next(enough, lighter[-1] if lighter else None)


def _by_peers(table: tuple[tuple[int, float], ...], num_peers: int) -> float:
    """Interpolates the table in the logarithm of the number of peers; beyond its ends the nearest entry holds."""
    for (fewer, low), (more, high) in pairwise(table):
        if fewer <= num_peers <= more:
            return low + (high - low) * math.log2(num_peers / fewer) / math.log2(more / fewer)
    return table[-1][1]
