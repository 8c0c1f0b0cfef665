"""What the daemon and its worker hand each other over the link."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a worker begins; what `start` says. The weights are in *in*, unless it keeps its own."""

    world_rank: int
    """By which data is dealt out: what it was told before was a claim, which the certificate may not have met."""
    epoch: int
    local_step: int
    data_base: int
    anchor_digest: str
    head: str
    num_peers: int
    keep_local: bool


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Where a worker trains on while its commit takes long; what `ahead` says."""

    epoch: int
    data_base: int


@dataclass(frozen=True)
class Memories:
    """One life's shared memories as flat fp32 tensors, by fragment."""

    out: tuple[torch.Tensor, ...]
    inn: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """How an epoch ended, for people and programs: metrics.jsonl has these names."""

    epoch: int
    """Outer steps done, this one included."""
    fragment: int
    """Which part of the model this peer had handed over."""
    head: str
    anchor_digest: str
    num_peers: int
    contributors: list[int]
    """World ranks whose work is in this anchor, as far as this peer knows: after catching up, at most itself."""
    sent_bytes: int
    received_bytes: int
    round_s: float
    """From the group to the commit, failed attempts included."""
    connect_s: float
    """Of the last attempt, as are the next four: until all streams stood."""
    reduce_s: float
    """From then on until all sums were in place."""
    preview_s: float
    """From then on until this peer knew what to vote for: the part of the outer step's digests that was left."""
    vote_s: float
    """From then on until the commit, by everybody's vote."""
    apply_s: float
    """The outer step."""
    wait_s: float
    """From this peer's readiness to the group."""
    propose_s: float
    """The part of it until this peer knew what to propose: the norm of its work."""
    bandwidth: float
    """Bytes per second that this peer's link carries, as measured; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class EpochOutcome(EpochFigures):
    """What the worker's `committed` says: the figures, and where it goes on from."""

    world_rank: int
    local_step: int
    data_base: int
    shifted: list[int]
    """Other fragments whose anchor has moved; their *in* holds by how much."""
    last: bool
    num_failures: int
    failures: list[str] = field(default_factory=list)
    """Why, as far as this peer was told."""
