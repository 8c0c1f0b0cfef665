"""Every error the swarm raises, by what the caller would do about it.

PeersError
├── UserError         stop before training and tell the user: a flag, a port, a key, a taken rank (exit 2)
│   └── ClockOff      the swarm's nodes do not take this machine's clock (net/dht/bootstrap.py)
├── PeerUnreachable   skip this peer, or try it again later
│   ├── PeerSilent    try another way: the stream stands, and may carry nothing
│   ├── NotWanted     it takes no rollouts of this peer, and says why
│   ├── NotAdmitted   it says that this peer may not be there (net/channels.py)
│   └── NoIssuer      there is nobody who issues tokens (admission/own_token.py)
├── ProtocolError     drop this peer's stream: it sent what no honest peer sends
│   └── Refused       drop it, and tell it why: it may not be here (protocol/refusal.py)
├── RoundFailed       try the round again, without the suspects it names
├── StateUnavailable  ask other donors, or wait for one
└── LinkLost          the other end of the daemon <-> worker link is gone
"""

from __future__ import annotations

from collections.abc import Iterable


class PeersError(Exception):
    """Base of everything raised here."""


class UserError(PeersError):
    """Something the user can mend before training starts."""


class PeerUnreachable(PeersError):
    """No stream to this peer could be opened in time, or it broke."""


class PeerSilent(PeerUnreachable):
    """Nothing came in time on a stream that stands."""


class NotWanted(PeerUnreachable):
    """A learner takes no rollouts of this peer; the message says why."""


class ProtocolError(PeersError):
    """A peer sent bytes that are too many, malformed, or out of turn."""


class RoundFailed(PeersError):
    """The reduction did not finish; `suspects` are the world ranks it was lost to.

    `told_by`: where it is hearsay, who says so; our own streams with the suspects have done nothing wrong. Whoever it
    was lost to, nothing had come from those in `silent` for a while: what stands between us may carry nothing. Those in
    `offenders` have sent us what no honest member sends.
    """

    def __init__(
        self,
        reason: str,
        suspects: Iterable[int] = (),
        *,
        told_by: Iterable[int] = (),
        silent: Iterable[int] = (),
        offenders: Iterable[int] = (),
    ) -> None:
        super().__init__(reason)
        self.suspects, self.silent, self.told_by = map(frozenset, (suspects, silent, told_by))
        self.offenders = frozenset(offenders)


class StateUnavailable(PeersError):
    """No donor could hand over the state that was asked for. `suspects`: peer ids of those who began to, and failed."""

    def __init__(self, reason: str, suspects: Iterable[str] = ()) -> None:
        super().__init__(reason)
        self.suspects = frozenset(suspects)


class LinkLost(PeersError):
    """The daemon or the worker at the other end is gone, or silent past its deadline."""
