"""`--discover`: finds a run on the local network."""

from __future__ import annotations

from dataclasses import replace

from diloco.errors import UserError, print_note
from diloco.options.flags import HvConfig, TrainConfig


def with_discovered_peers(config: TrainConfig, discover: bool) -> TrainConfig:
    """The configuration with the initial peers that --discover finds, unless --initial-peers is given."""
    if not discover or config.hv.initial_peers:
        return config
    return replace(config, hv=replace(config.hv, initial_peers=discovered(config.hv)))


def discovered(hv: HvConfig) -> tuple[str, ...]:
    """Addresses of the run's members on this network. Raises UserError if there are none.

    A peer with a world rank may start the run, so for that peer an empty list is no error.
    """
    from peers.net.lan import ASK_TIMEOUT_S, found_here

    found = tuple(found_here(hv.run_id))
    for maddr in found:
        print_note(
            f"found {maddr} on this network, where any machine can answer; --initial-peers names a certain peer"
        )
    if not found and hv.world_rank is None:
        raise UserError(
            f"no member of the run {hv.run_id!r} answered on this network within {ASK_TIMEOUT_S:g} s. Is "
            "`diloco dht start --discover` running there with this --run-id, and do firewalls let UDP through? "
            "Otherwise use --initial-peers."
        )
    return found
