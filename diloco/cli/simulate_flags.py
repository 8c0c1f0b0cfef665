"""The flags of `diloco simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from diloco.options.checks import at_least, duration, duration_or_auto, finite, up_to, whole, whole_or_auto
from diloco.options.flags import Count, Rate, Whole
from diloco.sim.command.values import bits_per_s, count, one, seconds
from peers.protocol.codecs import CodecName
from peers.protocol.limits import MAX_PEERS

LEAST_CORES = 0.1
LEAST_FLOPS = 1e6

Bandwidth = Parameter(
    converter=one(bits_per_s),
    metavar="RATE",
    show_default=lambda value: f"{value / 1e6:g}mbit" if value else "the upload",
)
ShortTime = Parameter(
    converter=one(seconds),
    metavar="TIME",
    show_default=lambda value: f"{1e3 * value:g}ms" if value else "none",
)
Duration = Parameter(
    converter=duration, metavar="TIME", show_default=lambda value: f"{value:g}s" if value else "none"
)
Number = Parameter(converter=one(count), metavar="NUMBER")


@dataclass(frozen=True, kw_only=True)
class Training:
    """The model, and how often its weights are averaged."""

    params: Annotated[float, Number, Parameter(validator=(at_least(1), up_to(1e15)))] = 1e9
    """Number of parameters of the model: 10e9, 10B, 150m."""
    local_steps: Annotated[Count, Parameter(alias="--hv.local-steps")] = 500
    """Inner steps between two averagings of the same weights (H)."""
    local_time: Annotated[
        float | None,
        Parameter(converter=duration_or_auto, metavar="SECONDS|auto", alias="--hv.local-time"),
    ] = None
    """Time after which an epoch ends with fewer local steps; auto: the time that trains the most tokens."""
    fragments: Annotated[Count, Parameter(alias="--hv.num-fragments")] = 1
    """Parts of the model, averaged in turn; local steps are rounded up to a multiple of their number."""
    overlap: Annotated[
        int, Parameter(converter=whole_or_auto, metavar="NUMBER|auto", alias="--hv.overlap-steps")
    ] = 0
    """Inner steps trained during a round (tau); auto: as many as the round takes, at most one epoch."""
    codec: Annotated[CodecName, Parameter(alias="--hv.compression")] = "fp32"
    """Codec of pseudo-gradients on the wire."""
    batch_tokens: Annotated[float, Number, Parameter(validator=(at_least(1), up_to(1e12)))] = 524288
    """Tokens that one peer trains on in a step."""


@dataclass(frozen=True, kw_only=True)
class Pods:
    """The machines and their links."""

    peers: Annotated[int | None, Parameter(converter=whole, validator=(at_least(1), up_to(MAX_PEERS)))] = None
    """Number of peers; default 8, or as many as --peers-file lists."""
    gpu: str = "H100"
    """GPU type of each peer: H100, A100, 4090 and the like."""
    gpus: Count = 8
    """Number of GPUs of each peer."""
    flops: Annotated[float | None, Number, Parameter(validator=at_least(LEAST_FLOPS))] = None
    """Instead of --gpu: peak FLOP/s of a peer, such as 989T."""
    mfu: Annotated[float, Parameter(validator=(at_least(0.001), up_to(1)))] = 0.4
    """Fraction of the peak that training achieves."""
    step_time: Annotated[float | None, ShortTime] = None
    """Instead of --gpu, --flops and --mfu: the duration of an inner step."""
    cores: Annotated[float, Parameter(validator=(finite, at_least(LEAST_CORES)))] = 8.0
    """Processor cores that the daemon may use."""
    bandwidth: Annotated[float, Bandwidth] = 500e6
    """Upload bandwidth of each peer, and its download bandwidth without --download."""
    download: Annotated[float | None, Bandwidth] = None
    """Download bandwidth of each peer."""
    rtt: Annotated[float, ShortTime] = 0.08
    """Round-trip time between two peers."""
    window: Annotated[float | None, Number] = None
    """Maximum TCP window in bytes; default: that of this machine, where the system tells, else no limit."""
    price: Rate = 0.0
    """Dollars per hour of one peer."""
    peers_file: Path | None = None
    """TOML file with [[peers]]: bandwidth, download, rtt, gpu, gpus, flops, mfu, cores, price, step_time, count."""


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures of peers, and variation of their speed."""

    mtbf: Annotated[float | None, Duration] = None
    """Mean time between two failures of one peer, such as 6h; default: no failures."""
    restart: Annotated[float, Duration] = 300.0
    """Time from a peer's failure until it has restarted and requests the state."""
    jitter: Annotated[float, Parameter(validator=(at_least(0), up_to(0.5)))] = 0.005
    """Variation of a peer's step time from epoch to epoch, as a fraction."""
    seed: Whole = 0
    """The same seed gives the same run."""
