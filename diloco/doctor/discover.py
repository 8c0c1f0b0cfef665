"""Checks which members of the run answer on the local network (--discover)."""

from __future__ import annotations

from diloco.doctor.findings import Finding, failed, passed
from diloco.options.flags import HvConfig
from peers.net.lan import ASK_TIMEOUT_S, found_here


def check_discover(hv: HvConfig) -> tuple[Finding, tuple[str, ...]]:
    """Check what --discover finds; also returns the addresses of the members that answer."""
    found = tuple(found_here(hv.run_id))
    if found:
        return passed("discover", f"the run {hv.run_id!r} answers at {' '.join(found)}"), found
    no_answer = f"no member of the run {hv.run_id!r} answered on this network within {ASK_TIMEOUT_S:g} s"
    if hv.world_rank is not None:
        return passed("discover", f"{no_answer}; this peer would start the run"), ()
    fix = f"on a machine of this network: diloco dht start --discover --run-id {hv.run_id}"
    return failed("discover", no_answer, f"{fix}  # and allow UDP on both machines"), ()
