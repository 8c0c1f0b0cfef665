"""Prints tables of the providers' offers and of the state of pods."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from peers.monitor.figures import short_figure

if TYPE_CHECKING:
    from provisioning.pods.pod import Offer
    from provisioning.swarm.status import Overview


def print_status(seen: Overview) -> None:
    rows = []
    for one in seen.pods:
        row, progress = one.row, one.progress
        figures = ("–", "–", "–")
        if progress is not None:
            figures = (str(progress.epoch), str(progress.step), short_figure(progress.tokens))
        rows.append(
            (
                row.name,
                row.state,
                f"{row.provider} {row.offer.gpu_count} × {row.offer.gpu_type}",
                one.peer,
                f"{row.offer.price_per_hour:.2f}",
                f"{one.dollars:.2f}",
                "–" if row.ends_at is None else clock_hours(row.ends_at - time.time()),
                *figures,
            )
        )
    if not rows:
        print("there are no pods", flush=True)
        return
    print_table(("pod", "state", "machine", "peer"), ("$/h", "$", "ends in", "epoch", "step", "tokens"), rows)
    rate = sum(one.row.offer.price_per_hour for one in seen.pods if one.may_cost)
    print(f"{sum(one.may_cost for one in seen.pods)} pods may cost {rate:.2f} $/h", flush=True)


def print_offers(found: Sequence[Offer]) -> None:
    from provisioning.pods.pod import MANY

    rows = [
        (
            f"{one.gpu_type}{' (spot)' if one.spot else ''}",
            one.place,
            one.key,
            f"{one.price_per_hour:.2f}",
            str(one.gpu_count),
            "–" if one.upload_mbps is None else f"{one.upload_mbps:.0f}",
            "–" if one.download_mbps is None else f"{one.download_mbps:.0f}",
            "" if one.num_available == MANY else str(one.num_available),
        )
        for one in found
    ]
    if rows:
        print_table(("type", "place", "offer"), ("$/h", "GPUs", "up Mbit/s", "down Mbit/s", "free"), rows)
    else:
        print("nothing that fits is offered now", flush=True)


def print_table(
    texts: Sequence[str], figures: Sequence[str], rows: Iterable[Sequence[str]], *, to_stderr: bool = False
) -> None:
    """Print a table: first the columns of text, which wrap if they are too wide, then right-aligned columns of figures.

    Cells are shown verbatim: rich would take the brackets of `[rank0]` for markup.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in texts:
        table.add_column(column, overflow="fold", min_width=8 if column else None)
    for column in figures:
        table.add_column(column, no_wrap=True, justify="right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(stderr=to_stderr).print(table)


def clock_hours(seconds: float) -> str:
    """Hours and minutes, such as 1:05 h."""
    minutes = max(round(seconds / 60), 0)
    return f"{minutes // 60}:{minutes % 60:02d} h"
