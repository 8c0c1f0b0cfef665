"""The peers of a simulation, from flags or from a TOML file."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco.errors import UserError
from diloco.sim.command.gpus import PEAK_FLOPS, peak_flops
from diloco.sim.command.values import bits_per_s, count, seconds
from peers.protocol.limits import MAX_PEERS

LEAST_CORES = 0.1
LEAST_FLOPS = 1e6


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    """Hardware and links of one simulated peer."""

    up: float
    """Bits per second."""
    down: float
    """Bits per second."""
    rtt_s: float
    """Round-trip time to another peer with the same link."""
    gpu: str
    gpus: int
    flops: float | None = None
    """Peak FLOP/s of all its GPUs; None: by the GPU's name."""
    cores: float = 8.0
    price: float = 0.0
    """Dollars per hour."""
    step_s: float | None = None
    """Duration of an inner step; None: computed from the model, the tokens and the FLOP/s."""

    @property
    def peak(self) -> float:
        """Peak FLOP/s of all its GPUs. Raises UserError for an unknown GPU."""
        if self.flops is not None:
            return self.flops
        each = peak_flops(self.gpu)
        if each is None:
            known = ", ".join(PEAK_FLOPS)
            raise UserError(f"how fast a {self.gpu} is, is not known here; say --flops, or one of {known}")
        return each * self.gpus


def from_lists(
    usual: PeerSpec, num_peers: int, ups: Sequence[float], downs: Sequence[float]
) -> list[PeerSpec]:
    """Copies of the usual peer with the bandwidths in these lists, which have one value, or one for each peer."""
    for flag, values in (("--bandwidth", ups), ("--download", downs)):
        if len(values) not in (0, 1, num_peers):
            raise UserError(
                f"{flag} has {len(values)} values for {num_peers} peers; give one, or one for each"
            )
    up = _spread(ups, num_peers) or [usual.up] * num_peers
    down = _spread(downs, num_peers) or up
    return [replace(usual, up=u, down=d) for u, d in zip(up, down, strict=True)]


def _spread(values: Sequence[float], num: int) -> list[float]:
    return list(values) * num if len(values) == 1 else list(values)


def from_toml(path: Path, usual: PeerSpec) -> list[PeerSpec]:
    """[[peers]] tables with bandwidth, download, rtt, gpu, gpus, flops, cores, price, step_time, and count."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("peers", [])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is no TOML file: {error}") from error
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UserError(
            f'{path} has no [[peers]]; write, for example:\n[[peers]]\nbandwidth = "500mbit"\ncount = 4'
        )
    return [peer for index, table in enumerate(tables) for peer in _from_table(path, index, table, usual)]


def _from_table(path: Path, index: int, table: Mapping[str, Any], usual: PeerSpec) -> list[PeerSpec]:
    values: dict[str, Any] = {}
    copies = table.get("count", 1)
    for key, value in table.items():
        if key == "count":
            continue
        if key not in _TABLE:
            raise UserError(
                f"{path}, peer {index}: unknown field {key}; there are {', '.join(_TABLE)}, count"
            )
        name, parse = _TABLE[key]
        try:
            values[name] = parse(str(value))
        except ValueError as error:
            raise UserError(f"{path}, peer {index}, {key}: {error}") from error
    values.setdefault("down", values.get("up", usual.down))
    if type(copies) is not int or not 1 <= copies <= MAX_PEERS:
        raise UserError(f"{path}, peer {index}: count is a number from 1 to {MAX_PEERS}, not {copies!r}")
    return [replace(usual, **values)] * copies


def _from(low: float, parse: Callable[[str], float]) -> Callable[[str], float]:
    """A parser that rejects values below `low`, and text that is not a number."""

    def parsed(text: str) -> float:
        try:
            value = parse(text)
        except ValueError:
            raise ValueError(f"{text!r:.40} is not a {'whole ' if parse is int else ''}number") from None
        if not low <= value < math.inf:
            raise ValueError(f"it must be {low:g} or more, and is {text}")
        return value

    return parsed


_TABLE: dict[str, tuple[str, Any]] = {
    "bandwidth": ("up", bits_per_s),
    "download": ("down", bits_per_s),
    "rtt": ("rtt_s", seconds),
    "gpu": ("gpu", str),
    "gpus": ("gpus", _from(1, int)),
    "flops": ("flops", _from(LEAST_FLOPS, count)),
    "cores": ("cores", _from(LEAST_CORES, float)),
    "price": ("price", _from(0, float)),
    "step_time": ("step_s", seconds),
}
