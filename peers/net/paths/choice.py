"""What is known of the paths to one peer, and which of them are worth trying. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

from peers.net.back_off import BackOff
from peers.protocol.records import Path
from peers.timing import FORGET_S, START_S


def path_back_off() -> BackOff:
    return BackOff(START_S, FORGET_S)


@dataclass
class Pair:
    """The paths to one peer."""

    direct: BackOff = field(default_factory=path_back_off)
    late: BackOff = field(default_factory=path_back_off)
    """A less preferred path connected before the direct one: from now on only background streams try the direct one."""
    libp2p: BackOff = field(default_factory=path_back_off)
    doubt: BackOff = field(default_factory=path_back_off)
    """The peer did not answer on an open connection, so that connection may be dead."""
    in_use: Path | None = None
    """The path of the newest data stream; before there is one, of any stream."""
    in_use_for_data: bool = False
    rate: float = 0.0
    """Bytes/s that the last round moved to this peer; 0: not known."""

    def passed_over(self, path: Path, now: float) -> None:
        """A less preferred path connected before this one."""
        if path is Path.DIRECT:
            self.late.failed(now)
        elif path is Path.LIBP2P:
            self.libp2p.failed(now)
