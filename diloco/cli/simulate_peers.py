"""The peers of `diloco simulate`: from its flags, which may give each a bandwidth of its own, or from a TOML file."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.cli.simulate_flags import LEAST_CORES, LEAST_FLOPS, Pods
from diloco.errors import UserError
from diloco.sim.command.values import bits_per_s, count, seconds
from peers.protocol.limits import MAX_PEERS

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "A6000": 155e12,
    "V100": 125e12,
    "RTX 5090": 210e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
}
"""Peak FLOP/s of GPUs in bf16, dense (without sparsity).

From the makers' data sheets: NVIDIA's for H100, H200, B200, A100, L40S, L4, A10, RTX A6000 and V100 (fp16 there), the
whitepapers of the Ada, Ampere and Blackwell RTX architectures for the GeForce cards (fp32 accumulation), AMD's for
MI300X.
"""


def each_peer(pods: Pods) -> list[Pods]:
    """The flags of each peer, with one upload and one download bandwidth."""
    if pods.peers_file is None:
        return from_lists(pods)
    for flag, values in (("--bandwidth", pods.bandwidth), ("--download", pods.download)):
        if len(values) > 1:
            raise UserError(
                f"{flag} takes only one value with --peers-file: the default for listed peers that have none"
            )
    found = from_toml(pods.peers_file, pods)
    if pods.peers not in (None, len(found)):
        raise UserError(f"{pods.peers_file} has {len(found)} peers; leave --peers {pods.peers} out")
    if len(found) > MAX_PEERS:
        raise UserError(f"{pods.peers_file} has {len(found)} peers; the maximum is {MAX_PEERS}")
    return found


def from_lists(pods: Pods) -> list[Pods]:
    """Peers with the bandwidths in these lists, which have one value, or one for each peer."""
    num = pods.peers or 8
    for flag, values in (("--bandwidth", pods.bandwidth), ("--download", pods.download)):
        if len(values) not in (0, 1, num):
            raise UserError(f"{flag} has {len(values)} values for {num} peers; give one, or one for each")
    ups, downs = (
        values * num if len(values) == 1 else values
        for values in (pods.bandwidth, pods.download or pods.bandwidth)
    )
    return [replace(pods, bandwidth=(up,), download=(down,)) for up, down in zip(ups, downs, strict=True)]


def from_toml(path: Path, usual: Pods) -> list[Pods]:
    """[[peers]] tables with the fields of _TABLE, and count; what a table leaves out is as usual."""
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


def _from_table(path: Path, index: int, table: Mapping[str, Any], usual: Pods) -> list[Pods]:
    values: dict[str, Any] = {}
    copies = table.get("count", 1)
    for key, value in table.items():
        if key == "count":
            continue
        if key not in _TABLE:
            raise UserError(
                f"{path}, peer {index}: unknown field {key}; there are {', '.join(_TABLE)}, count"
            )
        try:
            values[key] = _TABLE[key](str(value))
        except ValueError as error:
            raise UserError(f"{path}, peer {index}, {key}: {error}") from error
    values.setdefault("download", values.get("bandwidth", usual.download or usual.bandwidth))
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


_TABLE: dict[str, Callable[[str], Any]] = {
    "bandwidth": lambda text: (bits_per_s(text),),
    "download": lambda text: (bits_per_s(text),),
    "rtt": seconds,
    "gpu": str,
    "gpus": _from(1, int),
    "flops": _from(LEAST_FLOPS, count),
    "cores": _from(LEAST_CORES, float),
    "price": _from(0, float),
    "step_time": seconds,
}
"""By field of a table, which is that of Pods, too: how it is read."""


def peak_of(peer: Pods) -> float:
    """Peak FLOP/s of all its GPUs. Raises UserError for an unknown GPU."""
    if peer.flops is not None:
        return peer.flops
    each = peak_flops(peer.gpu)
    if each is None:
        known = ", ".join(PEAK_FLOPS)
        raise UserError(f"how fast a {peer.gpu} is, is not known here; say --flops, or one of {known}")
    return each * peer.gpus


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of one GPU with this name, in any spelling: NVIDIA-H100-SXM5-80GB is an H100. None if unknown."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    for known in sorted(PEAK_FLOPS, key=len, reverse=True):
        words = known.lower().removeprefix("rtx ").split()
        if all(re.search(rf"(?<![{_before(word)}]){word}(?![0-9])", text) for word in words):
            return PEAK_FLOPS[known]
    return None


def _before(word: str) -> str:
    """Characters that must not precede a word: letters may precede a number, since RTX4090 is a 4090."""
    return "0-9" if word[0].isdigit() else "a-z0-9"
