"""What is known of the paths to one peer, and which of them are worth trying. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from peers.net.back_off import BackOff
from peers.protocol.records import Path
from peers.timing import FORGET_S, START_S


def path_back_off() -> BackOff:
    return BackOff(START_S, FORGET_S)


@dataclass
class PathsToPeer:
    """Each back-off says for how long something is not tried, or not tried first."""

    direct_failures: BackOff = field(default_factory=path_back_off)
    direct_delays: BackOff = field(default_factory=path_back_off)
    """A less preferred path connected before the direct one: only background streams try the direct one meanwhile."""
    libp2p_delays: BackOff = field(default_factory=path_back_off)
    """A relay connected before libp2p: the relay is asked at once, without libp2p's head start."""
    libp2p_silence: BackOff = field(default_factory=path_back_off)
    """The peer did not answer on an open connection of libp2p, so that connection may be dead: relays come first."""
    in_use: Path | None = None
    """The path of the newest data stream; before there is one, of any stream."""
    in_use_for_data: bool = False
    rate: float = 0.0
    """Bytes/s that the last round moved to this peer; 0: not known."""

    def was_slower(self, path: Path, now: float) -> None:
        """A less preferred path connected before this one."""
        if path is Path.DIRECT:
            self.direct_delays.failed(now)
        elif path is Path.LIBP2P:
            self.libp2p_delays.failed(now)
