"""The peers of `diloco simulate`: equal ones from its flags, or those that a TOML file lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from diloco.cli.simulate_flags import Pods
from diloco.errors import UserError
from diloco.options.parse_errors import parse_error_text
from diloco.options.sources import ValueSource
from peers.protocol.limits import MAX_PEERS
from provisioning.pods.tables import read_toml, tables_in

_DEFAULT_PEERS = 8
_OF_ALL = {"peers", "peers_file", "window"}
"""Fields of Pods that a table cannot have."""

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
    """The flags of each peer."""
    if pods.peers_file is None:
        return [pods] * (pods.peers or _DEFAULT_PEERS)
    found = from_toml(pods.peers_file, pods)
    if pods.peers not in (None, len(found)):
        raise UserError(f"{pods.peers_file} has {len(found)} peers; leave --peers {pods.peers} out")
    if len(found) > MAX_PEERS:
        raise UserError(f"{pods.peers_file} has {len(found)} peers; the maximum is {MAX_PEERS}")
    return found


def from_toml(path: Path, usual: Pods) -> list[Pods]:
    """[[peers]] tables with fields of Pods, and count; fields that a table leaves out are those of `usual`."""
    tables = tables_in(read_toml(path), "peers", str(path))
    return [
        peer
        for index, table in enumerate(tables)
        for peer in _from_table(f"{path}, peer {index}", table, usual)
    ]


def _from_table(where: str, table: Mapping[str, Any], usual: Pods) -> list[Pods]:
    copies = table.get("count", 1)
    if type(copies) is not int or not 1 <= copies <= MAX_PEERS:
        raise UserError(f"{where}: count is a number from 1 to {MAX_PEERS}, not {copies!r}")
    values = {name: value for name, value in table.items() if name != "count"}
    if of_all := values.keys() & _OF_ALL:
        raise UserError(f"{where}: {min(of_all)} applies to all peers; give it as a flag")
    source = ValueSource(values, "the table")
    app = App(config=[source], help_flags=(), version_flags=())
    app.default(_pods)
    try:
        _, bound, _ = app.parse_args([], exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        raise UserError(f"{where}: {parse_error_text(error)}") from error
    own = {name: getattr(bound.arguments["pods"], name) for name in source.named}
    if "bandwidth" in own:
        # As with the flags, a peer downloads as fast as it uploads unless its table says otherwise.
        own = {"download": None, **own}
    return [replace(usual, **own)] * copies


def _pods(*, pods: Annotated[Pods, Parameter(name="*")] = Pods()) -> None:  # noqa: B008
    """The fields of a table."""


def peak_of(peer: Pods) -> float:
    """Peak FLOP/s of all GPUs of a peer. Raises UserError for an unknown GPU."""
    if peer.flops is not None:
        return peer.flops
    each = peak_flops(peer.gpu)
    if each is None:
        known = ", ".join(PEAK_FLOPS)
        raise UserError(f"the speed of {peer.gpu} is not known; give --flops, or one of {known}")
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
