"""Checks which members of the run answer on the local network."""

from __future__ import annotations

from diloco.doctor.findings import Finding, failed, passed
from diloco.options.flags import HvConfig
from peers.net.lan import ASK_TIMEOUT_S, found_here


def check_discover(hv: HvConfig) -> tuple[Finding, tuple[str, ...]]:
    """Check what --discover finds; also returns the addresses of the members that answer."""
    found = tuple(found_here(hv.run_id))
    if found:
        return passed("discover", f"the run {hv.run_id!r} answers at {' '.join(found)}"), found
    nobody = f"nobody on this network said within {ASK_TIMEOUT_S:g} s that it is in the run {hv.run_id!r}"
    if hv.world_rank is not None:
        return passed("discover", f"{nobody}: this peer would begin it"), ()
    fix = f"on a machine of this network: diloco dht start --discover --run-id {hv.run_id}"
    return failed("discover", nobody, f"{fix}  # and let UDP through there and here"), ()
