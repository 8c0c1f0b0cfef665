"""How much of this peer's time another one may take with its messages."""

from __future__ import annotations

from peers.errors import ProtocolError

_PER_MESSAGE_S = 0.005
_PER_BYTE_S = 0.25e-6
_SAVED_S = 5.0


class Allowance:
    """200 small messages a second, or 4 MB, and as much as five seconds' worth at once. Time is an argument.

    Many times what an honest peer says. Not to read further would be no remedy: what a flood leaves in the buffers
    hides the sender's end for minutes.
    """

    def __init__(self, now: float) -> None:
        self._free_at = now - _SAVED_S

    def spend(self, num_bytes: int, now: float) -> None:
        """Count one message. Raises ProtocolError when it is one too many."""
        self._free_at = max(self._free_at, now - _SAVED_S) + _PER_MESSAGE_S + num_bytes * _PER_BYTE_S
        if self._free_at > now:
            raise ProtocolError("sends more messages than anybody has reason to")
