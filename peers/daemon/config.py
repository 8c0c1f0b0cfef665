"""What one daemon is told, and what follows from it for the core and for the outer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from peers.admission.secrets import AdmissionSettings
from peers.core import defaults
from peers.core.schedule import Schedule
from peers.net.paths.network import NetworkSettings
from peers.protocol.mesh import Scalar
from peers.state.outer_optimizer import OuterOptimizer
from peers.timing import MATCHMAKING_S


@dataclass(frozen=True, kw_only=True)
class DaemonConfig(NetworkSettings, AdmissionSettings):
    """What one daemon needs to know. `manifest` is this peer's proposal; its user insists on the fields in `named`."""

    run_id: str = "diloco"
    initial_peers: tuple[str, ...] = ()
    world_rank: int | None = None
    galaxy_size: int | None = None
    matchmaking_time: float | None = None
    averaging_timeout: float | None = None
    all_reduce_strategy: Literal["WAIT_FOR_ALL", "NO_WAIT"] = "WAIT_FOR_ALL"
    quorum: float = 0.5
    grace: float | None = None
    timeout_waiting_for_peers: float = 600.0
    fail_rank_drop: bool = False
    manifest: Mapping[str, Scalar] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    state_dir: str = ""
    hardware: str = ""
    """What the peer trains on, as shown to people."""
    metrics_port: int | None = None
    """The loopback port on which Prometheus finds this peer's figures; 0 takes any free port, None serves none."""
    link_path: str | None = None
    """The socket on which the worker finds the daemon; by default it is in a private temporary directory."""

    @property
    def grace_s(self) -> float:
        """The longest time that a commit waits for peers that are not ready."""
        if self.grace is not None:
            return self.grace
        if self.all_reduce_strategy == "NO_WAIT":
            return MATCHMAKING_S if self.matchmaking_time is None else self.matchmaking_time
        return math.inf


def codec_of(manifest: Mapping[str, Scalar]) -> str:
    return str(manifest.get("hv.compression") or "fp32")


def optimizer_of(manifest: Mapping[str, Scalar], num_members: int) -> OuterOptimizer:
    """The outer optimizer of a round with so many members. What the manifest does not name follows the defaults."""
    schedule, codec = Schedule.of(manifest), codec_of(manifest)
    lr, momentum = manifest.get("hv.outer_lr"), manifest.get("hv.outer_momentum")
    inner = str(manifest.get("optimizer") or "adamw")
    if lr is None:
        lr = defaults.outer_lr_for(
            num_members,
            schedule.local_steps,
            num_fragments=schedule.num_fragments,
            compression=codec,
            optimizer=inner,
        )
    if momentum is None:
        momentum = defaults.outer_momentum_for(codec, num_members, optimizer=inner)
    return OuterOptimizer(lr=float(lr), momentum=float(momentum))
