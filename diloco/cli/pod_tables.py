"""Tables of what providers and pods have said: offers, the plan of what to rent, and the state of pods."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from peers.monitor.figures import short_figure

if TYPE_CHECKING:
    from provisioning.pods.pod import Offer
    from provisioning.renting.plan import Plan
    from provisioning.swarm.status import Overview


def plan_json(agreed: Plan) -> dict[str, Any]:
    return {
        "create": [
            {
                "name": creation.spec.name,
                "offer": creation.offer.id,
                "gpu_type": creation.offer.gpu_type,
                "gpu_count": creation.offer.gpu_count,
                "price_per_hour": creation.offer.price_per_hour,
            }
            for creation in agreed.create
        ],
        "keep": [row.name for row in agreed.keep],
        "destroy": [{"name": removal.row.name, "reason": removal.reason} for removal in agreed.destroy],
        "price_per_hour": agreed.dollars_per_hour,
        "price_until_end": agreed.dollars_until_end(time.time()),
    }


def print_plan(agreed: Plan, *, to_stderr: bool) -> None:
    """A table with prices per hour and in total."""
    now = time.time()
    pods = [
        ("create", one.spec.name, one.offer, _place(one.offer), one.spec.ttl_hours) for one in agreed.create
    ]
    pods += [("keep", row.name, row.offer, row.state, row.hours_left(now)) for row in agreed.keep]
    rows = []
    for do, name, offer, place, hours in pods:
        what, price = f"{offer.gpu_count} × {offer.gpu_type}", offer.price_per_hour
        until_end = ("–", "–") if hours is None else (f"{round(hours, 2):g}", f"{hours * price:.2f}")
        rows.append((do, name, what, place, f"{price:.2f}", *until_end))
    rows += [("destroy", removal.row.name, removal.reason, "", "", "", "") for removal in agreed.destroy]
    dollars = agreed.dollars_until_end(now)
    until = "–" if dollars is None else f"{dollars:.2f}"
    rows.append(("", "all", "", "", f"{agreed.dollars_per_hour:.2f}", "", until))
    print_table(("", "pod", "what", "place"), ("$/h", "hours", "$"), rows, to_stderr=to_stderr)


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
            _place(one),
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
    """A table with columns of text, which goes on in the next line where it is too wide, and then of figures.

    Cells are shown as they are: rich would take the brackets of `[rank0]` for markup.
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
    """Such as 1:05 h."""
    minutes = max(round(seconds / 60), 0)
    return f"{minutes // 60}:{minutes % 60:02d} h"


def _place(offer: Offer) -> str:
    return ", ".join(filter(None, (offer.city, offer.country))) or "–"
