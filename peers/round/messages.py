"""What the members of a round tell each other, and the checks every such message passes before it is believed.

member -> leader   Join      what I bring, and which attempt I am in doubt about
leader -> member   Group     who averages, with what weights
member -> leader   Vote      what I would commit, or whom I lost
leader -> member   Audit     reduce these shares again before you vote once more (peers/round/audit.py)
leader -> member   Commit    all votes were equal
leader -> member   Abort     try again, without these
anyone -> anyone   Ask       did this lineage go on? A peer that knows answers with the Commit
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from peers.errors import ProtocolError

MAX_MEMBERS = 4096
MAX_WORLD_RANK = 1 << 20
MAX_TOKENS = 1 << 40
"""Of one peer in one epoch. Far more than anybody trains, and far from the limit of what the swarm can count."""
MAX_NORM = 1e30
"""Of one pseudo-gradient: longer than any whose squares fit fp32, and its own square far from the limit of a double."""
_MAX_COUNT = 1 << 62
_MAX_TEXT = 512


def _count(value: Any, most: int = _MAX_COUNT) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ProtocolError(f"not a count up to {most}: {value!r:.80}")
    return value


def _rank(value: Any) -> int:
    return _count(value, MAX_WORLD_RANK)


def _real(value: Any, most: float = sys.float_info.max) -> float:
    # A comparison with what is not a number is false.
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ProtocolError(f"not a number from 0 to {most:g}: {value!r:.80}")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise ProtocolError(f"not a short text: {value!r:.80}")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"not a truth value: {value!r:.80}")
    return value


def _sequence(value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > MAX_MEMBERS:
        raise ProtocolError(f"not a list of at most {MAX_MEMBERS}: {value!r:.80}")
    return list(value)


@dataclass(frozen=True)
class Proposal:
    """What one member brings to a round."""

    rank: int
    tokens: int
    """Trained since its work was last averaged in."""
    norm: float
    """L2 norm of its pseudo-gradient."""
    step: int
    """The nominal step its weights were copied at."""
    last: bool
    """It leaves after this round."""
    bandwidth: float = 0.0
    """Bytes per second that its link carries, as far as it has been measured; 0 where that is not known."""

    @classmethod
    def parse(cls, value: Any) -> Proposal:
        rank, tokens, norm, step, last, bandwidth = _exactly(value, 6)
        return cls(
            _rank(rank),
            _count(tokens, MAX_TOKENS),
            _real(norm, MAX_NORM),
            _count(step),
            _flag(last),
            _real(bandwidth),
        )

    def plain(self) -> list[Any]:
        return list(dataclasses.astuple(self))


@dataclass(frozen=True)
class Join:
    kind: ClassVar[str] = "join"
    fragment: int
    lineage: str
    proposal: Proposal
    in_doubt: str
    """The attempt this member voted for without hearing how it ended; empty: none."""


@dataclass(frozen=True)
class Group:
    kind: ClassVar[str] = "group"
    attempt: str
    """32 hex digits, unique to this attempt."""
    fragment: int
    epoch: int
    """The epoch that a commit ends; the state is at `epoch` until then, at `epoch + 1` after."""
    lineage: str
    leader: int
    members: tuple[Proposal, ...]
    """In order of world rank."""
    weights: tuple[float, ...]
    """Of each member, clipping included; without clipping they sum to 1."""
    data_width: int
    """How many data blocks this epoch has handed out: the next epoch's begin after them."""

    def __post_init__(self) -> None:
        ranks = self.ranks
        if not ranks or list(ranks) != sorted(set(ranks)) or len(self.weights) != len(ranks):
            raise ProtocolError(f"not a group: members {ranks}, {len(self.weights)} weights")
        if len(self.attempt) != 32 or not set(self.attempt) <= set("0123456789abcdef"):
            raise ProtocolError(f"not an attempt id: {self.attempt!r}")

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(member.rank for member in self.members)

    @property
    def tokens(self) -> int:
        return sum(member.tokens for member in self.members)


@dataclass(frozen=True)
class Vote:
    kind: ClassVar[str] = "vote"
    fragment: int
    lineage: str
    attempt: str
    shares: tuple[str, ...] = ()
    """xxh3 of each share as received, in member order."""
    anchor: str = ""
    """Digest of the anchor this member would have; empty: its reduction failed."""
    momentum: str = ""
    suspects: tuple[int, ...] = ()
    """Where it failed: the members it was lost to."""
    told_by: tuple[int, ...] = ()
    """Those by whose word alone they are suspected."""
    sent: tuple[str, ...] = ()
    """Where sums are audited: BLAKE3 of what this member contributed to each share, in member order."""
    received: tuple[str, ...] = ()
    """The same of what each member contributed to this one's share."""
    audit: tuple[int, ...] = ()
    """Owners whose sums this member wants looked at by all."""
    disproved: tuple[int, ...] = ()
    """Owners whose sums are false, as an audit has shown."""


@dataclass(frozen=True)
class Commit:
    kind: ClassVar[str] = "commit"
    group: Group
    anchor: str
    momentum: str

    @property
    def lineage(self) -> str:
        return self.group.lineage

    @property
    def fragment(self) -> int:
        return self.group.fragment


@dataclass(frozen=True)
class Abort:
    kind: ClassVar[str] = "abort"
    fragment: int
    lineage: str
    attempt: str
    excluded: tuple[int, ...]
    resync: bool
    """The excluded hold other bits than the rest and must fetch its state."""
    reason: str


@dataclass(frozen=True)
class Ask:
    kind: ClassVar[str] = "ask"
    fragment: int
    lineage: str


@dataclass(frozen=True)
class Audit:
    kind: ClassVar[str] = "audit"
    fragment: int
    lineage: str
    attempt: str
    owners: tuple[int, ...]
    """World ranks, ascending, whose shares everybody reduces again."""
    inputs: tuple[tuple[str, ...], ...]
    """For each of them, BLAKE3 of what every member has contributed, as sender and owner both say."""

    def fits(self, ranks: tuple[int, ...], most: int) -> bool:
        """Whether it can be of a group of these ranks that audits so many shares at most."""
        return (
            0 < len(self.owners) <= most
            and list(self.owners) == sorted(set(self.owners) & set(ranks))
            and len(self.inputs) == len(self.owners)
            and all(len(digests) == len(ranks) for digests in self.inputs)
        )


RoundMessage = Join | Group | Vote | Commit | Abort | Ask | Audit


def to_message(message: RoundMessage) -> dict[str, Any]:
    """A map that msgpack takes."""
    fields = {f.name: _plain(getattr(message, f.name)) for f in dataclasses.fields(message)}
    return {"kind": message.kind, **fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Proposal):
        return value.plain()
    if isinstance(value, Group):
        return to_message(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _exactly(value: Any, length: int) -> list[Any]:
    items = _sequence(value)
    if len(items) != length:
        raise ProtocolError(f"expected {length} items: {value!r:.80}")
    return items


def _group(m: Mapping[str, Any]) -> Group:
    return Group(
        attempt=_text(m["attempt"]),
        fragment=_count(m["fragment"]),
        epoch=_count(m["epoch"]),
        lineage=_text(m["lineage"]),
        leader=_rank(m["leader"]),
        members=tuple(Proposal.parse(item) for item in _sequence(m["members"])),
        weights=tuple(_real(item) for item in _sequence(m["weights"])),
        data_width=_rank(m["data_width"]),
    )


def _vote(m: Mapping[str, Any]) -> Vote:
    return Vote(
        fragment=_count(m["fragment"]),
        lineage=_text(m["lineage"]),
        attempt=_text(m["attempt"]),
        shares=tuple(_text(item) for item in _sequence(m["shares"])),
        anchor=_text(m["anchor"]),
        momentum=_text(m["momentum"]),
        suspects=tuple(_rank(item) for item in _sequence(m["suspects"])),
        told_by=tuple(_rank(item) for item in _sequence(m["told_by"])),
        sent=tuple(_text(item) for item in _sequence(m["sent"])),
        received=tuple(_text(item) for item in _sequence(m["received"])),
        audit=tuple(_rank(item) for item in _sequence(m["audit"])),
        disproved=tuple(_rank(item) for item in _sequence(m["disproved"])),
    )


def _audit(m: Mapping[str, Any]) -> Audit:
    return Audit(
        fragment=_count(m["fragment"]),
        lineage=_text(m["lineage"]),
        attempt=_text(m["attempt"]),
        owners=tuple(_rank(item) for item in _sequence(m["owners"])),
        inputs=tuple(tuple(_text(item) for item in _sequence(row)) for row in _sequence(m["inputs"])),
    )


def _abort(m: Mapping[str, Any]) -> Abort:
    return Abort(
        fragment=_count(m["fragment"]),
        lineage=_text(m["lineage"]),
        attempt=_text(m["attempt"]),
        excluded=tuple(_rank(item) for item in _sequence(m["excluded"])),
        resync=_flag(m["resync"]),
        reason=_text(m["reason"]),
    )


_PARSERS: dict[str, Callable[[Mapping[str, Any]], RoundMessage]] = {
    "join": lambda m: Join(
        _count(m["fragment"]), _text(m["lineage"]), Proposal.parse(m["proposal"]), _text(m["in_doubt"])
    ),
    "group": _group,
    "vote": _vote,
    "commit": lambda m: Commit(_group(m["group"]), _text(m["anchor"]), _text(m["momentum"])),
    "abort": _abort,
    "audit": _audit,
    "ask": lambda m: Ask(_count(m["fragment"]), _text(m["lineage"])),
}


def is_round_message(message: Mapping[str, Any]) -> bool:
    kind = message.get("kind")
    return isinstance(kind, str) and kind in _PARSERS


def parse(message: Mapping[str, Any]) -> RoundMessage:
    """Raises ProtocolError for anything an honest peer would not send."""
    try:
        return _PARSERS[message["kind"]](message)
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"malformed round message: {error!r}") from error
