"""The state files beside the default one: each set of experiments has its own."""

from __future__ import annotations

import sys

from diloco.cli.pods_flags import ensure_watcher, opened, opened_existing, typed


def tell_other_state_files(command: str) -> None:
    """Say which other files in the state directory still hold pods, and how this command is typed for each."""
    from diloco.launch.swarm_config import state_dir
    from provisioning.errors import UserError

    default = opened(None)
    default.close()
    for path in (*sorted(state_dir().glob("*.sqlite")), *sorted(state_dir().glob("experiments/*.sqlite"))):
        if path.absolute() == default.path:
            continue
        try:
            ledger = opened_existing(path)
            rows = [row for row in ledger.rows() if row.state != "planned"]
        except UserError as error:
            print(f"!!! {error}", file=sys.stderr, flush=True)
            continue
        if rows:
            rate = sum(row.offer.price_per_hour for row in rows)
            print(
                f"{path} holds {', '.join(row.name for row in rows)}, {rate:.2f} $/h: `{typed(command, ledger)}`",
                file=sys.stderr,
                flush=True,
            )
            # This machine may have been off since it was started.
            ensure_watcher(ledger)
        ledger.close()
