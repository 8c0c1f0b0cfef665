"""What people are asked before pods change, and told when that is interrupted or fails."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from diloco.errors import UserError

if TYPE_CHECKING:
    from provisioning.ledger.ledger import Ledger


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
    loop, typed = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), typed.set)
    try:
        await typed.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
    return sys.stdin.readline()


@contextlib.contextmanager
def interruption_told(ledger: Ledger, give_back: str, also: str = "") -> Iterator[None]:
    """On an interruption inside, tell which pods stay and how to give them back, and `also`."""
    try:
        yield
    except asyncio.CancelledError:
        rows = [row for row in ledger.rows() if row.state != "planned"]
        rate = sum(row.offer.price_per_hour for row in rows)
        if rows:
            print(
                f"Interrupted: {len(rows)} pods stay, {rate:.2f} $/h. The same command goes on from here; "
                f"`{give_back}` gives them back.{also}",
                file=sys.stderr,
                flush=True,
            )
        raise


def shouted(failures: Mapping[str, Exception]) -> int:
    """The exit code; what failed goes to stderr, where it cannot be overlooked."""
    for name, error in failures.items():
        print(f"!!! {name}: {error}", file=sys.stderr, flush=True)
    return 1 if failures else 0
