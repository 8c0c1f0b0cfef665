"""`--discover`: finds a run on the local network."""

from __future__ import annotations

import sys

from diloco.errors import UserError
from diloco.options.flags import HvConfig


def discovered(hv: HvConfig) -> tuple[str, ...]:
    """Addresses of the run's members on this network; none for whoever may begin the run. Raises UserError."""
    from peers.net.lan import ASK_TIMEOUT_S, found_here

    found = tuple(found_here(hv.run_id))
    for maddr in found:
        note = f"found {maddr} on this network, where anybody may answer; to choose the peer, use --initial-peers"
        print(f"note: {note}", file=sys.stderr)
    if not found and hv.world_rank is None:
        raise UserError(
            f"nobody on this network said within {ASK_TIMEOUT_S:g} s that it is in the run {hv.run_id!r}. Is "
            "`diloco dht start --discover` running there, under this --run-id, and does a firewall let UDP through? "
            "Otherwise give --initial-peers."
        )
    return found
