"""Tables of what providers and pods have said: offers, the plan of what to rent, and the state of pods."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diloco.cli.state_files import typed
from peers.monitor.figures import short_figure

if TYPE_CHECKING:
    from rich.table import Table

    from provisioning.ledger.ledger import Ledger
    from provisioning.ledger.row import Row
    from provisioning.pods.pod import Offer
    from provisioning.renting.plan import Plan
    from provisioning.swarm.status import Overview

_COLUMNS = ("", "pod", "what", "place", "$/h", "hours", "$")
_SAME_HOURS = 0.1


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
        "price_until_end": _dollars_until_end(agreed, time.time()),
    }


def print_plan(agreed: Plan, *, to_stderr: bool) -> None:
    """A table with prices per hour and in total."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in _COLUMNS:
        is_figure = column in _COLUMNS[4:]
        # Figures are never cut; what is too wide for the terminal goes on in the next line.
        table.add_column(
            column,
            overflow="fold",
            min_width=8 if is_figure else None,
            justify="right" if is_figure else "left",
        )
    for creation in agreed.create:
        offer, hours = creation.offer, creation.spec.ttl_hours
        add_plain_row(
            table,
            "create",
            creation.spec.name,
            f"{offer.gpu_count} × {offer.gpu_type}",
            ", ".join(filter(None, (offer.city, offer.country))) or "–",
            f"{offer.price_per_hour:.2f}",
            "–" if hours is None else f"{hours:g}",
            "–" if hours is None else f"{hours * offer.price_per_hour:.2f}",
        )
    now = time.time()
    for row in agreed.keep:
        what, price = f"{row.offer.gpu_count} × {row.offer.gpu_type}", row.offer.price_per_hour
        left = _hours_left(row, now)
        until_end = ("–", "–") if row.ends_at is None else (f"{left:.1f}", f"{left * price:.2f}")
        add_plain_row(table, "keep", row.name, what, row.state, f"{price:.2f}", *until_end)
    for removal in agreed.destroy:
        add_plain_row(table, "destroy", removal.row.name, removal.reason, "", "", "", "")
    dollars = _dollars_until_end(agreed, now)
    until = "–" if dollars is None else f"{dollars:.2f}"
    add_plain_row(table, "", "all", "", "", f"{agreed.dollars_per_hour:.2f}", "", until)
    Console(stderr=to_stderr).print(table)


def tell_unmoved_ends(agreed: Plan, ledger: Ledger) -> None:
    """Say of which pods that are kept the end stays where it is, although their `ttl_hours` has changed."""
    asked = {row.label: row.spec.ttl_hours for row in ledger.rows()}
    for row in agreed.keep:
        if row.spec.ttl_hours != asked.get(row.label) and (said := _unmoved_end(row, ledger)):
            print(f"note: {said}", file=sys.stderr, flush=True)


def print_status(seen: Overview) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    # Figures are never cut; what is too wide for the terminal goes on in the next line.
    for column in ("pod", "state", "machine"):
        table.add_column(column, overflow="fold")
    for column in ("$/h", "$", "ends in", "epoch", "step", "tokens"):
        table.add_column(column, no_wrap=True)
    table.add_column("peer", overflow="fold", min_width=8)
    for one in seen.pods:
        row = one.row
        add_plain_row(
            table,
            row.name,
            row.state,
            f"{row.provider} {row.offer.gpu_count} × {row.offer.gpu_type}",
            f"{row.offer.price_per_hour:.2f}",
            f"{one.dollars:.2f}",
            "–" if row.ends_at is None else clock_hours(row.ends_at - time.time()),
            "–" if one.progress is None else str(one.progress.epoch),
            "–" if one.progress is None else str(one.progress.step),
            "–" if one.progress is None else short_figure(one.progress.tokens),
            one.peer,
        )
    Console().print(table if seen.pods else "there are no pods")
    if not seen.pods:
        return
    rate = sum(one.row.offer.price_per_hour for one in seen.pods if one.may_cost)
    print(f"{sum(one.may_cost for one in seen.pods)} pods may cost {rate:.2f} $/h", flush=True)


def print_offers(found: Sequence[Offer]) -> None:
    from rich.console import Console
    from rich.table import Table

    from provisioning.pods.pod import MANY

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("$/h", "GPUs", "type", "up Mbit/s", "down Mbit/s", "place", "free", "offer"):
        is_text = column in ("type", "place", "offer")
        # Figures are never cut; what is too wide for the terminal goes on in the next line.
        table.add_column(
            column,
            overflow="fold",
            min_width=None if is_text else max(len(column), 6),
            justify="left" if is_text else "right",
        )
    for one in found:
        place = ", ".join(filter(None, (one.city, one.country))) or "–"
        add_plain_row(
            table,
            f"{one.price_per_hour:.2f}",
            str(one.gpu_count),
            f"{one.gpu_type}{' (spot)' if one.spot else ''}",
            "–" if one.upload_mbps is None else f"{one.upload_mbps:.0f}",
            "–" if one.download_mbps is None else f"{one.download_mbps:.0f}",
            place,
            "" if one.num_available == MANY else str(one.num_available),
            one.key,
        )
    Console().print(table if found else "nothing that fits is offered now")


def clock_hours(seconds: float) -> str:
    """Such as 1:05 h."""
    minutes = max(round(seconds / 60), 0)
    return f"{minutes // 60}:{minutes % 60:02d} h"


def add_plain_row(table: Table, *cells: str) -> None:
    """Add a row whose cells are shown as they are: rich would take the brackets of `[rank0]` for markup."""
    from rich.text import Text

    table.add_row(*map(Text, cells))


def _unmoved_end(row: Row, ledger: Ledger) -> str:
    """When this pod ends, and how to move that; empty if it has been moved to where `ttl_hours` wants it."""
    wanted, end, advice = row.spec.ttl_hours, "has no end", ""
    if row.ends_at is not None:
        end = f"still ends in {_hours_left(row, time.time()):.1f} h"
        more = math.inf if wanted is None else wanted - (row.ends_at - row.asked_at) / 3600
        if abs(more) < _SAME_HOURS:
            return ""
        if more > 0:
            hours = "HOURS" if wanted is None else f"{more:.3g}"
            advice = f"`{typed(f'diloco pods extend {row.name} --hours {hours}', ledger)}` moves its end"
    advice = advice or f"`{typed(f'diloco pods down {row.name}', ledger)}` gives it back sooner"
    return f"{row.name} is kept and {end}: ttl_hours counts for new pods only. {advice}."


def _dollars_until_end(agreed: Plan, now: float) -> float | None:
    """What the new pods and those that are kept cost from now on; None: one that costs has no end."""
    if agreed.dollars_until_end is None:
        return None
    if any(row.ends_at is None and row.offer.price_per_hour for row in agreed.keep):
        return None
    kept = (_hours_left(row, now) * row.offer.price_per_hour for row in agreed.keep)
    return agreed.dollars_until_end + sum(kept)


def _hours_left(row: Row, now: float) -> float:
    """Until the end of its rental; 0 if it has none."""
    return max((row.ends_at or 0.0) - now, 0.0) / 3600
