"""The live view of one or more peers on this machine: a table on a terminal, else plain lines."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.train.metrics_file import PeerFigures, Record, Tail, figure, line_of, num_contributors, size
from diloco.train.run_dir import METRICS

if TYPE_CHECKING:
    from rich.table import Table

_READ_INTERVAL_S = 0.25
# On a pipe, every step of every peer would drown the epochs.
_STEP_LINE_INTERVAL_S = 5.0
_COLUMNS = (
    "peer",
    "state",
    "epoch",
    "step",
    "loss",
    "tokens/s",
    "peers",
    "sent",
    "received",
    "round",
)


@dataclass
class Shown:
    """A peer in the view. `state` is kept by whoever watches its process."""

    name: str
    run_dir: Path
    state: str = "starting"
    since: float = 0.0
    """Unix time of its last start: older records are of a life before."""

    def restarted(self, now: float) -> None:
        self.state, self.since = "restarting", now

    def saw(self, records: Iterable[Record]) -> None:
        if any(float(record.get("time") or 0.0) >= self.since for record in records):
            self.state = "training"


async def show(
    peers: Sequence[Shown],
    *,
    on_records: Callable[[int, list[Record]], None] | None = None,
    terminal: bool | None = None,
) -> None:
    """Show the peers until cancelled. `on_records(index of the peer, its new records)` is called first.

    Records older than the peers' `since` at the beginning are passed over.
    """
    terminal = sys.stdout.isatty() if terminal is None else terminal
    screen: _Screen | _Lines = _Screen(peers) if terminal else _Lines(peers)
    tails = [(Tail(peer.run_dir / METRICS), peer.since) for peer in peers]

    def read() -> None:
        for index, (tail, since) in enumerate(tails):
            records = [record for record in tail.read() if float(record.get("time") or since) >= since]
            if records:
                peers[index].saw(records)
                if on_records:
                    on_records(index, records)
                screen.fold(index, records)
        screen.refresh()

    with screen:
        try:
            while True:
                read()
                await asyncio.sleep(_READ_INTERVAL_S)
        finally:
            read()


async def show_log(path: Path) -> None:
    """Print what is appended to a log, until cancelled."""
    offset = path.stat().st_size if path.exists() else 0

    def read() -> None:
        nonlocal offset
        if path.exists():
            with path.open("rb") as log:
                log.seek(offset)
                new = log.read()
            offset += len(new)
            sys.stdout.write(new.decode(errors="replace"))
            sys.stdout.flush()

    try:
        while True:
            read()
            await asyncio.sleep(_READ_INTERVAL_S)
    finally:
        read()


class _Lines:
    """One line an epoch, evaluation and event, and a step's every few seconds."""

    def __init__(self, peers: Sequence[Shown]) -> None:
        self._peers = peers
        self._last_step_line = [float("-inf")] * len(peers)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def fold(self, index: int, records: Iterable[Record]) -> None:
        for record in records:
            if record.get("kind") == "step":
                now = time.monotonic()
                if now - self._last_step_line[index] < _STEP_LINE_INTERVAL_S:
                    continue
                self._last_step_line[index] = now
            line = line_of(record)
            if line:
                print(f"{self._peers[index].name}: {line}", flush=True)

    def refresh(self) -> None: ...


class _Screen:
    """A table that is redrawn in place; what is printed meanwhile scrolls by above it."""

    def __init__(self, peers: Sequence[Shown]) -> None:
        from rich.live import Live

        self._peers = peers
        self._figures = [PeerFigures(peer.name) for peer in peers]
        self._evaluations: list[Record] = []
        self._began = time.monotonic()
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def fold(self, index: int, records: Iterable[Record]) -> None:
        self._figures[index].fold(records)
        self._evaluations += (record for record in records if record.get("kind") == "eval")

    def refresh(self) -> None:
        table = table_of(self._peers, self._figures)
        table.caption = caption_of(self._evaluations, elapsed_s=time.monotonic() - self._began)
        self._live.update(table, refresh=True)


def table_of(peers: Sequence[Shown], figures: Sequence[PeerFigures]) -> Table:
    """One row a peer; fits 80 columns."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True, justify="left" if column in ("peer", "state") else "right")
    for peer, newest in zip(peers, figures, strict=True):
        table.add_row(peer.name, peer.state, *cells_of(newest))
    return table


def caption_of(evaluations: Sequence[Record], *, elapsed_s: float) -> str:
    """How long it has been going on, and what the first and the last evaluation said."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    parts = [f"{minutes}:{seconds:02d}"]
    in_turn = sorted(evaluations, key=lambda record: int(record.get("step") or 0))
    for record in (*in_turn[:1], *in_turn[1:][-1:]):
        parts.append(
            f"{_decimals(record.get('bits_per_byte'), 3)} bits per byte at step {record.get('step')}"
        )
    return ", ".join(parts)


def cells_of(newest: PeerFigures) -> list[str]:
    """The figures of one row, from the epoch on; a dash where nothing is known yet."""
    step, epoch = newest.step, newest.epoch
    return [
        str(step.get("epoch", epoch.get("epoch", "–"))),
        str(step.get("step", "–")),
        _decimals(step.get("loss"), 3),
        figure(step.get("tokens_per_s")),
        num_contributors(epoch),
        size(epoch.get("sent_bytes")),
        size(epoch.get("received_bytes")),
        _decimals(epoch.get("round_s"), 2, " s"),
    ]


def _decimals(value: object, digits: int, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit}" if isinstance(value, int | float) else "–"
