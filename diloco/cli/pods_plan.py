"""How a plan is shown and agreed to, how pods are given back, and how failures are told."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diloco.cli.pods_flags import ensure_watcher, say
from diloco.errors import UserError

if TYPE_CHECKING:
    from provisioning.errors import ProvisioningError
    from provisioning.ledger.ledger import Ledger
    from provisioning.providers.registry import Access
    from provisioning.renting.plan import Plan

_COLUMNS = ("", "pod", "what", "place", "$/h", "hours", "$")


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
        "price_until_end": agreed.dollars_until_end,
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
        table.add_row(
            "create",
            creation.spec.name,
            f"{offer.gpu_count} × {offer.gpu_type}",
            ", ".join(filter(None, (offer.city, offer.country))) or "–",
            f"{offer.price_per_hour:.2f}",
            "–" if hours is None else f"{hours:g}",
            "–" if hours is None else f"{hours * offer.price_per_hour:.2f}",
        )
    for row in agreed.keep:
        what = f"{row.offer.gpu_count} × {row.offer.gpu_type}"
        table.add_row("keep", row.name, what, row.state, f"{row.offer.price_per_hour:.2f}", "", "")
    for removal in agreed.destroy:
        table.add_row("destroy", removal.row.name, removal.reason, "", "", "", "")
    until = "–" if agreed.dollars_until_end is None else f"{agreed.dollars_until_end:.2f}"
    table.add_row("", "all", "", "", f"{agreed.dollars_per_hour:.2f}", "", until)
    Console(stderr=to_stderr).print(table)


async def agreed_to(agreed: Plan, *, yes: bool) -> None:
    """Raises UserError unless somebody says yes. What neither costs nor destroys anything needs no question."""
    free = not agreed.destroy and agreed.new_dollars_per_hour == 0
    cost = f"rent {len(agreed.create)} pods for {agreed.new_dollars_per_hour:.2f} $/h"
    await confirmed(f"Go on, {cost}, give back {len(agreed.destroy)}?", yes=yes or free)


async def confirmed(question: str, *, yes: bool) -> None:
    """Raises UserError unless somebody says yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError("Nothing was changed: nobody is there to be asked. Give --yes to go on.")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if (await _typed_line()).strip().lower() not in ("y", "yes"):
        raise UserError("Nothing was changed.")


async def _typed_line() -> str:
    """What a person types. Waiting in `readline` itself would keep Ctrl-C from being noticed."""
    import asyncio

    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline()


@contextlib.contextmanager
def interruption_told(ledger: Ledger, give_back: str) -> Iterator[None]:
    """On an interruption inside, tell which pods stay and how to give them back."""
    import asyncio

    try:
        yield
    except asyncio.CancelledError:
        rows = [row for row in ledger.rows() if row.state != "planned"]
        rate = sum(row.offer.price_per_hour for row in rows)
        if rows:
            print(
                f"Interrupted: {len(rows)} pods stay, {rate:.2f} $/h. The same command goes on from here; "
                f"`{give_back}` gives them back.",
                file=sys.stderr,
                flush=True,
            )
        raise


async def given_back(
    ledger: Ledger, where: Access, names: Sequence[str], fetches: Sequence[str] | None, *, yes: bool
) -> int:
    """The exit code of a command that gives pods back, and asks before results are lost."""
    from provisioning.errors import ResultsNotFetched
    from provisioning.renting import operations, watcher

    async def down(names: Sequence[str], *, loses_results: bool) -> dict[str, ProvisioningError]:
        return await operations.down(ledger, where, names, say, fetches=fetches, loses_results=loses_results)

    failures = await down(names, loses_results=yes)
    kept = [name for name, error in failures.items() if isinstance(error, ResultsNotFetched)]
    if kept and sys.stdin.isatty():
        await confirmed(f"Give back {', '.join(kept)} without their results?", yes=False)
        failures = {name: error for name, error in failures.items() if name not in kept}
        failures |= await down(kept, loses_results=True)
    if not ledger.rows():
        watcher.stop(ledger.path)
    ensure_watcher(ledger)
    return shouted(failures)


def shouted(failures: Mapping[str, Exception]) -> int:
    """The exit code; what failed goes to stderr, where it cannot be overlooked."""
    for name, error in failures.items():
        print(f"!!! {name}: {error}", file=sys.stderr, flush=True)
    return 1 if failures else 0
