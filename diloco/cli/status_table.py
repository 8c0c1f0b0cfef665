"""Renders the state of a swarm for a terminal: its peers, stragglers, last rounds and events. Pure.

Text from peers is never interpreted as markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diloco.train.metrics_file import decimals, figure, size
from peers.monitor.figures import span
from peers.protocol.records import shown_rank

Peer = Mapping[str, Any]

_GONE = ("lost", "silent")
_STYLES = {"lost": "bold red", "silent": "yellow", "training": "green", "averaging": "cyan"}
_VERDICT_STYLES = {"good": "green", "busy": "cyan", "warning": "yellow", "fault": "bold red"}
_MAX_FINDINGS = 3
_ROUND_PARTS = ("wait_s", "connect_s", "reduce_s", "vote_s", "apply_s")
_TABLE_LINES = 4
"""Lines of the table of rounds besides its rows: a blank line, the head, and two to spare."""


def render(swarm: Mapping[str, Any], *, width: int, height: int | None = None) -> RenderableType:
    """The whole view, with as many rounds and events as fit `height` lines."""
    peers = swarm["peers"]
    parts: list[RenderableType] = [_title(swarm), *_verdict(swarm["verdict"])]
    if peers:
        parts.append(_peers_table(peers, width))
    parts += [_straggler(straggler) for straggler in swarm["stragglers"]]
    parts += [_rollout_peer(peer, sender) for peer in peers for sender in peer["rollout_peers"]]
    num_senders = sum(len(peer["rollout_peers"]) for peer in peers)
    left = (height or 10_000) - len(peers) - len(swarm["stragglers"]) - num_senders - 3
    left -= len(swarm["verdict"]["more"])
    if swarm["rounds"] and (rows := min(8, left - _TABLE_LINES)) > 0:
        parts += [Text(), _rounds_table(swarm["rounds"][-rows:], swarm["time"])]
        left -= _TABLE_LINES + min(rows, len(swarm["rounds"]))
    if swarm["events"] and (rows := min(8, left - 2)) > 0:
        parts += [Text(), *(_event(event) for event in swarm["events"][-rows:])]
    return Group(*parts)


def _title(swarm: Mapping[str, Any]) -> Text:
    number = sum(peer["state"] not in _GONE for peer in swarm["peers"])
    gone = len(swarm["peers"]) - number
    line = f"run {swarm['run_id']}: epoch {swarm['epoch']}, {number} peer{'' if number == 1 else 's'}"
    progress = swarm["progress"]
    if progress["end_step"]:
        line += f", step {progress['step']} of {progress['end_step']}"
    if progress["left_s"] is not None:
        line += f", {span(progress['left_s'])} left"
    if swarm["tokens_per_s"]:
        line += f", {figure(swarm['tokens_per_s'])} tokens/s"
    return Text(line + (f", {gone} gone" if gone else ""))


def _verdict(verdict: Mapping[str, Any]) -> list[Text]:
    lines = [verdict["text"], *(f"and {text}" for text in verdict["more"][:_MAX_FINDINGS])]
    return [Text(line, style=_VERDICT_STYLES[verdict["level"]]) for line in lines]


_COLUMNS: Sequence[tuple[str, str, Callable[[Peer], str]]] = (
    ("rank", "right", lambda peer: shown_rank(peer["world_rank"])),
    ("doing", "left", lambda peer: state_text(peer)),
    ("epoch", "right", lambda peer: str(peer["epoch"])),
    ("step", "right", lambda peer: str(peer["step"])),
    ("loss", "right", lambda peer: decimals(peer["loss"], 3)),
    ("tokens/s", "right", lambda peer: figure(peer["tokens_per_s"])),
    ("anchor", "left", lambda peer: peer["anchor_digest"][:12] or "–"),
    ("path", "left", lambda peer: peer["path"] or "–"),
    ("seen", "right", lambda peer: f"{peer['last_seen_s']:.0f} s ago"),
    ("link up", "right", lambda peer: size(peer["upload_bytes_per_s"] or None)),
    ("link down", "right", lambda peer: size(peer["download_bytes_per_s"] or None)),
    # Shortened as in the coordinator's output; --json has the whole id.
    ("peer", "left", lambda peer: f"…{peer['peer_id'][-6:]}"),
    ("hardware", "left", lambda peer: peer["hardware"] or "–"),
)


def state_text(peer: Peer) -> str:
    """The phase that the peer reports, or else its state."""
    phase = peer["phase"]
    text = str(phase["short"] if phase else peer["state"])
    return f"{text}, stands still" if peer["is_still"] else text


_OPTIONAL_COLUMNS = ("hardware", "peer", "link down", "link up", "anchor", "seen")
"""Columns that a narrow terminal drops, in this order."""


def _peers_table(peers: Sequence[Peer], width: int) -> Table:
    columns = {name: [cell(peer) for peer in peers] for name, _, cell in _COLUMNS}
    for name in _OPTIONAL_COLUMNS:
        if sum(2 + max(len(name), *map(len, cells)) for name, cells in columns.items()) <= width:
            break
        del columns[name]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, justify, _ in _COLUMNS:
        if name in columns:
            table.add_column(name, no_wrap=True, justify="left" if justify == "left" else "right")
    for index, peer in enumerate(peers):
        row = [Text(cells[index]) for cells in columns.values()]
        row[list(columns).index("doing")].stylize(
            "yellow" if peer["is_still"] else _STYLES.get(peer["state"], "")
        )
        table.add_row(*row, style="dim" if peer["state"] in _GONE else None)
    return table


def _straggler(straggler: Mapping[str, Any]) -> Text:
    return Text(
        f"peer {straggler['leader']} waits for peer {straggler['world_rank']}: {straggler['reason']}",
        style="yellow",
    )


def _rollout_peer(peer: Peer, sender: Mapping[str, Any]) -> Text:
    line = (
        f"peer {shown_rank(peer['world_rank'])} trains on rollouts of …{sender['peer_id'][-6:]}: "
        f"{figure(sender['rollouts_per_s'])}/s, {sender['taken']} taken, {sender['staleness_mean']:.1f} steps old "
        f"on average, {sender['staleness_max']} at most, {sender['dropped']} dropped"
    )
    return Text(line if sender["is_here"] else f"{line}, gone", style="" if sender["is_here"] else "dim")


def _rounds_table(rounds: Sequence[Mapping[str, Any]], now: float) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    heads = ("epoch", "ago", "peers", *(part.removesuffix("_s") for part in _ROUND_PARTS), "sent")
    for head in heads:
        table.add_column(head, no_wrap=True, justify="right")
    table.add_column("failed", justify="left")
    for entry in rounds:
        peers = entry["peers"]
        slowest = [max(float(peer.get(part, 0.0)) for peer in peers) for part in _ROUND_PARTS]
        table.add_row(
            str(entry["epoch"]),
            f"{max(0.0, now - entry['time']):.0f} s",
            str(len(entry["contributors"])),
            *(f"{seconds:.2f} s" for seconds in slowest),
            size(sum(peer["sent_bytes"] for peer in peers)),
            Text(_failures(entry), style="red"),
        )
    return table


def _failures(entry: Mapping[str, Any]) -> str:
    failures = [*entry["failures"], *([] if entry["agrees"] else ["ANCHORS DIFFER"])]
    if not failures and entry["num_failures"]:
        return str(entry["num_failures"])
    return "; ".join(failures)


def _event(event: Mapping[str, Any]) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    is_reported = event["said_by"] is not None
    return Text(
        f"{clock} peer {shown_rank(event['world_rank'])}{':' if is_reported else ''} {event['what']}",
        style="dim",
    )
