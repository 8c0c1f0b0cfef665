"""Every error the swarm raises, by what the caller does about it.

PeersError
├── UserError         stop before training and tell the user: a flag, a port, a key, a taken rank (exit 2)
│   └── ClockOff      the swarm's nodes refuse this machine's clock (net/dht/bootstrap.py)
├── PeerUnreachable   skip this peer, or try it again later
│   ├── PeerSilent    try another path: the stream is open, but nothing comes through it
│   ├── NotWanted     the learner takes no rollouts of this peer
│   ├── NotAdmitted   the other peer refuses this one (net/channels.py)
│   ├── NoIssuer      no issuer of tokens answers (admission/own_token.py)
│   └── Busy          the peer answers no more questions for now (net/paths/reachability.py)
├── ProtocolError     drop this peer's stream: it sent what no honest peer sends
│   ├── Refused       drop the stream and tell the peer why: it is not admitted (protocol/refusal.py)
│   └── Untimely      ignore this record: it is too old or from the future (protocol/records.py)
├── RoundFailed       try the round again, without the suspects that the error names
├── StateUnavailable  ask other donors, or wait for one
├── Withheld          show the peer without a report: it is there, but gives this observer none (monitor/observer.py)
└── LinkLost          the other end of the daemon <-> worker link is gone
"""

from __future__ import annotations

from collections.abc import Iterable


class PeersError(Exception):
    """Base of everything raised here."""


class UserError(PeersError):
    """Something the user can fix before training starts."""


class PeerUnreachable(PeersError):
    """No stream to this peer could be opened in time, or it broke."""


class PeerSilent(PeerUnreachable):
    """Nothing came in time on an open stream."""


class NotWanted(PeerUnreachable):
    """A learner takes no rollouts of this peer; the message says why."""


class ProtocolError(PeersError):
    """A peer sent bytes that are too many, malformed, or out of turn."""


class RoundFailed(PeersError):
    """The reduction failed. All arguments are world ranks.

    `suspects`: the members at fault. `told_by`: the members that accused them, if this peer has no evidence of its own.
    `silent`: members from which nothing had come for a while; the network path to them may be down. `offenders`:
    members that sent what no honest member sends.
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
    """No donor handed over the state. `suspects`: peer ids of the donors whose streams opened and then failed."""

    def __init__(self, reason: str, suspects: Iterable[str] = ()) -> None:
        super().__init__(reason)
        self.suspects = frozenset(suspects)


class LinkLost(PeersError):
    """The daemon or the worker at the other end is gone, or silent past its deadline."""
