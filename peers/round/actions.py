"""What a round asks of whoever drives it: the daemon (peers/averaging.py), or a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from peers.round.messages import Audit, Commit, Group, RoundMessage


@dataclass(frozen=True)
class Send:
    """Send to one peer of the swarm, never to itself."""

    rank: int
    message: RoundMessage


@dataclass(frozen=True)
class Reduce:
    """Start reducing; answer with `on_reduced` or `on_reduce_failed`."""

    group: Group


@dataclass(frozen=True)
class Inspect:
    """Reduce these shares again from what all members send anew; answer with `on_audited` or `on_audit_failed`."""

    group: Group
    audit: Audit


@dataclass(frozen=True)
class Cancel:
    """Stop the reduction or the audit that runs; its outcome no longer matters."""


@dataclass(frozen=True)
class Apply:
    """Advance anchor, momentum, epoch and lineage together by the result this peer holds. The round is over."""

    commit: Commit


@dataclass(frozen=True)
class CatchUp:
    """Adopt the state of this peer, and bring the local work to the round that follows it. This round is over."""

    rank: int
    reason: str
    contributed: bool = False
    """This peer's work is in that state already."""
    resync: bool = False
    """The bits held here are wrong, though the lineage may be the same."""


Action = Send | Reduce | Inspect | Cancel | Apply | CatchUp
