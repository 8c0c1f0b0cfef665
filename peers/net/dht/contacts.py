"""The peers that a DHT node has known, and when to dial lost ones again. Pure: time is an argument.

Hivemind's node forgets a peer that misses one answer, and a node that has forgotten all others stays alone for good. So
the addresses given by the user are always kept, and those of other peers as long as there is room. Through any of them
this node can enter a swarm whose bootstrap node has died, or end a partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from peers.net.back_off import BackOff
from peers.timing import COMMIT_S, LOOK_S

MAX_CONTACTS = 128
"""Besides those that the user has given."""
MAX_AT_ONCE = 8


@dataclass
class _Contact:
    maddrs: tuple[str, ...]
    is_given: bool
    silence: BackOff = field(default_factory=lambda: BackOff(LOOK_S, COMMIT_S))


class Contacts:
    """Peers by id, with their addresses."""

    def __init__(self, given: Mapping[str, Sequence[str]]) -> None:
        self._contacts = {peer_id: _Contact(tuple(maddrs), True) for peer_id, maddrs in given.items()}

    def remember(self, peer_id: str, maddrs: Sequence[str]) -> None:
        """Record this peer's addresses. If there are too many contacts, the one recorded longest ago is dropped."""
        known = self._contacts.pop(peer_id, None) or _Contact((), False)
        if not known.is_given:
            known.maddrs = tuple(maddrs)
        self._contacts[peer_id] = known
        others = [peer for peer, contact in self._contacts.items() if not contact.is_given]
        for oldest in others[: max(0, len(others) - MAX_CONTACTS)]:
            del self._contacts[oldest]

    def lost(self, reached: Collection[str], now: float) -> list[tuple[str, tuple[str, ...]]]:
        """Peer ids and addresses to dial now: contacts that are not connected and whose back-off is over."""
        due = [
            (contact.silence.until, peer_id)
            for peer_id, contact in self._contacts.items()
            if peer_id not in reached and contact.silence.is_over(now)
        ]
        chosen = [peer_id for _, peer_id in sorted(due)[:MAX_AT_ONCE]]
        return [(peer_id, self._contacts[peer_id].maddrs) for peer_id in chosen]

    def tried(self, answered: Iterable[tuple[str, bool]], now: float) -> None:
        """Record the outcome of a dial: a silent contact is dialled less and less often."""
        for peer_id, has_answered in answered:
            if (contact := self._contacts.get(peer_id)) is not None:
                if has_answered:
                    contact.silence.succeeded()
                else:
                    contact.silence.failed(now)
