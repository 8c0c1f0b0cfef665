"""A live view of one or more peers on this machine: a table on a terminal, else plain lines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.launch.phase_file import read_phase
from diloco.train.file_tail import FileTail
from diloco.train.metrics_file import (
    PhaseLines,
    Record,
    RecordLines,
    Tail,
    decimals,
    figure,
    num_contributors,
    size,
)
from diloco.train.run_dir import METRICS
from peers.monitor.phases import furthest_training, in_short, in_words, span
from peers.protocol.reports import Phase

if TYPE_CHECKING:
    from rich.table import Table

_READ_INTERVAL_S = 0.25
_MAX_PHASES = 3
_COLUMNS = (
    "peer",
    "state",
    "epoch",
    "step",
    "loss",
    "tokens/s",
    "peers",
    "sent",
    "round",
)


@dataclass
class PeerRow:
    """A peer's row in the view. The code that supervises the peer's process sets `state`."""

    name: str
    run_dir: Path
    state: str = "starting"
    since: float = 0.0
    """Unix time of the last start of its process; older records and phases are ignored."""
    phase: Phase | None = None
    """The last phase that the peer has reported."""

    @property
    def state_text(self) -> str:
        """The text in the column `state`."""
        return in_short(self.phase) if self.phase is not None else self.state

    def restarted(self, now: float) -> None:
        self.state, self.since, self.phase = "restarting", now, None

    def update_phase(self) -> None:
        """Read the phase file, unless the peer has ended."""
        is_running = self.state in ("starting", "restarting", "training")
        self.phase = read_phase(self.run_dir, self.since) if is_running else None

    def note_records(self, records: Iterable[Record]) -> None:
        if any(float(record.get("time") or 0.0) >= self.since for record in records):
            self.state = "training"


async def show(
    peers: Sequence[PeerRow],
    *,
    on_records: Callable[[int, list[Record]], None] | None = None,
    terminal: bool | None = None,
) -> None:
    """Show the peers until cancelled. Calls `on_records(index of the peer, new records)` before showing records.

    Records from before a peer's initial `since` are skipped.
    """
    terminal = sys.stdout.isatty() if terminal is None else terminal
    screen: _Screen | _Lines = _Screen(peers) if terminal else _Lines(peers)
    tails = [(Tail(peer.run_dir / METRICS, since=peer.since), peer.since) for peer in peers]

    def read() -> None:
        for index, (tail, since) in enumerate(tails):
            peers[index].update_phase()
            records = [record for record in tail.read() if float(record.get("time") or since) >= since]
            if records:
                peers[index].note_records(records)
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


@contextlib.asynccontextmanager
async def running_view(view: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `show` or `show_log` until the block ends; then it reads its files once more."""
    task = asyncio.create_task(view)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def show_log(path: Path) -> None:
    """Print what is appended to a log, until cancelled."""
    log = FileTail(path)

    def read() -> None:
        sys.stdout.write(log.read().decode(errors="replace"))
        sys.stdout.flush()

    try:
        while True:
            read()
            await asyncio.sleep(_READ_INTERVAL_S)
    finally:
        read()


class _Lines:
    """Prints a line for each epoch, evaluation and event, and every few seconds one for a step or a phase."""

    def __init__(self, peers: Sequence[PeerRow]) -> None:
        self._peers = peers
        self._records = [RecordLines() for _ in peers]
        self._phases = [PhaseLines() for _ in peers]

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def fold(self, index: int, records: Iterable[Record]) -> None:
        for record in records:
            if line := self._records[index].of(record, time.monotonic()):
                self._say(index, line)

    def refresh(self) -> None:
        for index, peer in enumerate(self._peers):
            if peer.phase and (line := self._phases[index].of(peer.phase, time.monotonic())):
                self._say(index, line)

    def _say(self, index: int, line: str) -> None:
        print(f"{self._peers[index].name}: {line}", flush=True)


class _Screen:
    """A table that is redrawn in place; other output scrolls above it."""

    def __init__(self, peers: Sequence[PeerRow]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._peers = peers
        self._newest: list[dict[str, Record]] = [{} for _ in peers]
        """By peer, its newest record of each kind."""
        self._began = time.monotonic()
        # Lines above the table are wrapped by the terminal, not by rich, so that an address can be copied.
        self._live = Live(console=Console(soft_wrap=True), auto_refresh=False)

    def __enter__(self) -> None:
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def fold(self, index: int, records: Iterable[Record]) -> None:
        self._newest[index].update((str(record.get("kind")), record) for record in records)

    def refresh(self) -> None:
        from rich.text import Text

        table = table_of(self._peers, self._newest)
        caption = caption_of(
            [newest["eval"] for newest in self._newest if "eval" in newest],
            elapsed_s=time.monotonic() - self._began,
            phases={peer.name: peer.phase for peer in self._peers},
        )
        table.caption = Text(caption, no_wrap=False, overflow="fold")
        self._live.update(table, refresh=True)


def table_of(peers: Sequence[PeerRow], records: Sequence[Mapping[str, Record]]) -> Table:
    """A table with one row per peer, which fits 80 columns. `records` are each peer's newest of each kind."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True, justify="left" if column in ("peer", "state") else "right")
    for peer, newest in zip(peers, records, strict=True):
        table.add_row(peer.name, peer.state_text, *row_cells(newest))
    return table


def caption_of(
    evaluations: Sequence[Record], *, elapsed_s: float, phases: Mapping[str, Phase | None] | None = None
) -> str:
    """Elapsed and remaining time, and the last evaluation. Until a peer trains, the full phases of the peers,
    for which the table has no room. The keys of `phases` are peer names."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    parts = [f"{minutes}:{seconds:02d}"]
    known = {peer: phase for peer, phase in (phases or {}).items() if phase}
    furthest = furthest_training(known.values())
    if furthest is None:
        parts += [f"{peer} is {in_words(phase)}" for peer, phase in list(known.items())[:_MAX_PHASES]]
    else:
        left = f", {span(furthest.left_s)} left" if furthest.left_s is not None else ""
        parts.append(f"step {furthest.done:.0f} of {furthest.total:.0f}{left}")
    last = max(evaluations, key=lambda record: int(record.get("step") or 0), default=None)
    if last is not None:
        parts.append(f"{decimals(last.get('bits_per_byte'), 3)} bits per byte at step {last.get('step')}")
    return ", ".join(parts)


def row_cells(newest: Mapping[str, Record]) -> list[str]:
    """The cells of one row from the column `epoch` on, with dashes for unknown figures."""
    step: Record = newest.get("step") or {}
    epoch: Record = newest.get("epoch") or {}
    epochs = [int(record["epoch"]) for record in (step, epoch) if record.get("epoch") is not None]
    return [
        str(max(epochs, default="–")),
        str(step.get("step", "–")),
        decimals(step.get("loss"), 3),
        figure(step.get("tokens_per_s")),
        num_contributors(epoch),
        size(epoch.get("sent_bytes")),
        decimals(epoch.get("round_s"), 2, " s"),
    ]
