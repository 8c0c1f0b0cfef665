"""What the daemon and its worker pass to each other over the link."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Start:
    """The message `start`: where a worker begins. The weights are in *in*, unless the worker keeps its own."""

    world_rank: int
    """By which data is assigned. An earlier rank was only a claim; the certificate may have assigned another."""
    epoch: int
    local_step: int
    epoch_s: float = 0.0
    """How long the epoch may last; 0: as long as its steps take."""
    data_base: int
    anchor_digest: str
    head: str
    num_peers: int
    keep_local: bool
    began_run: bool = False
    """Whether the run has begun while this worker waited for it."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """The message `ahead`: where a worker trains on while its commit is awaited."""

    epoch: int
    epoch_s: float = 0.0
    data_base: int


@dataclass(frozen=True)
class Memories:
    """The shared memories of one worker process as flat fp32 tensors, by fragment."""

    out: tuple[torch.Tensor, ...]
    inn: tuple[torch.Tensor, ...]


def floats_of(memory: mmap.mmap, numel: int) -> torch.Tensor:
    """The tensor of so many values in a shared memory."""
    return torch.frombuffer(memory, dtype=torch.float32, count=numel) if numel else torch.empty(0)


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """How an epoch ended, for people and programs. metrics.jsonl has these names."""

    epoch: int
    """Outer steps done, this one included."""
    fragment: int
    """The fragment that this peer had handed over."""
    head: str
    anchor_digest: str
    num_peers: int
    contributors: list[int]
    """World ranks whose work is in this anchor, as far as this peer knows: after catching up, at most itself."""
    sent_bytes: int
    received_bytes: int
    round_s: float
    """From the formation of the group to the commit, failed attempts included."""
    connect_s: float
    """Of the last attempt, as are the next four: until all streams were open."""
    reduce_s: float
    """From then until all sums were in place."""
    preview_s: float
    """From then until this peer could vote: the digests of the outer step that were left to compute."""
    vote_s: float
    """From then until the commit: waiting for all votes."""
    apply_s: float
    """The outer step."""
    wait_s: float
    """From when this peer was ready to when the group was formed."""
    propose_s: float
    """The part of `wait_s` in which this peer computed the norm of its work."""
    bandwidth: float
    """Bytes per second that this peer's link carries, as measured; 0: not known."""


@dataclass(frozen=True, kw_only=True)
class EpochOutcome(EpochFigures):
    """The message `committed` to the worker: the figures, and where it continues."""

    world_rank: int
    local_step: int
    epoch_s: float = 0.0
    data_base: int
    shifted: list[int]
    """Other fragments whose anchor has changed; their *in* holds the difference."""
    last: bool
    num_failures: int
    failures: list[str] = field(default_factory=list)
    """Why attempts failed, as far as this peer knows."""
