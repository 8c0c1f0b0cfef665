"""Prints tables of the providers' offers and of the state of pods."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from diloco.cli.pods_flags import say
from peers.monitor.figures import short_figure

if TYPE_CHECKING:
    from provisioning.pods.pod import Offer, PodSpec
    from provisioning.providers.registry import Access
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


async def tell_offers(specs: Sequence[PodSpec], where: Access, *, as_json: bool) -> int:
    """Print the offers that fit one of these specs, all of which name the same providers."""
    from provisioning.providers.registry import open_provider
    from provisioning.renting.plan import objections
    from provisioning.renting.renters import offers_of

    async with contextlib.AsyncExitStack() as opened:
        providers = []
        for name in specs[0].providers:
            providers.append(open_provider(name, where))
            opened.push_async_callback(providers[-1].close)
        # Without the checks that come before renting: listing offers needs neither an SSH key nor money.
        there = await offers_of(providers, say)
    found = [one for one in there if any(not objections(spec, one) for spec in specs)]
    found.sort(key=lambda one: (one.price_per_hour, one.key))
    if as_json:
        tables = [{key: value for key, value in asdict(one).items() if key != "details"} for one in found]
        print(json.dumps(tables))
    else:
        print_offers(found)
    return 0


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

    Brackets, as of `[rank0]`, are shown as they are: rich would take them for markup.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from provisioning.terminal import printable

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for column in texts:
        table.add_column(column, overflow="fold", min_width=8 if column else None)
    for column in figures:
        table.add_column(column, no_wrap=True, justify="right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(stderr=to_stderr).print(table)


def clock_hours(seconds: float) -> str:
    """Hours and minutes, such as 1:05 h."""
    minutes = max(round(seconds / 60), 0)
    return f"{minutes // 60}:{minutes % 60:02d} h"
