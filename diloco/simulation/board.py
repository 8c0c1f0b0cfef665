"""Who stands where, as the rounds of all peers see it.

In the product every peer tells every other how it stands. Here all of them read one board, and are told when it has
changed: one delay after the change, all changes of that time at once. In a swarm of a thousand that is what can be
computed; what it leaves out is that two peers may see a third differently for as long as a message takes.

What a peer has announced by a commit that another one has made too is no news to that one, who is not told of it
(membership.after_commit).
"""

from __future__ import annotations

from collections.abc import Callable

from diloco.sim.clock import Clock, Timer
from peers import membership
from peers.membership import View
from peers.records import Announcement
from peers.round.messages import Commit

_COALESCED_S = 1e-3
"""Per peer: how long changes are gathered at the least, so that large swarms take no longer to compute than small
ones, peer by peer."""
NEWS = ""
"""In place of an attempt: a change that everybody is told of."""


class Board:
    """`tell` is called with the attempts whose commits made the changes since the last time, NEWS among them or not."""

    def __init__(
        self, clock: Clock, *, delay_s: float, num_peers: int, tell: Callable[[frozenset[str]], None]
    ) -> None:
        self._clock, self._tell = clock, tell
        self._delay_s = max(delay_s, _COALESCED_S * num_peers)
        self.announcements: dict[int, Announcement] = {}
        self.quiet: frozenset[int] = frozenset()
        """World ranks that have not been heard of for a while, and may be gone."""
        self._causes: set[str] = set()
        self._timer: Timer | None = None
        self._plain: View | None = None
        self._moved: dict[str, View] = {}

    def post(self, announcement: Announcement, cause: str = NEWS) -> None:
        """`cause`: the attempt by whose commit this peer has come where it stands."""
        self.announcements[announcement.world_rank] = announcement
        self._change(cause)

    def fall_quiet(self, rank: int) -> None:
        if rank in self.announcements:
            self.quiet |= {rank}
            self._change(NEWS)

    def remove(self, rank: int) -> None:
        self.quiet -= {rank}
        if self.announcements.pop(rank, None) is not None:
            self._change(NEWS)

    def view(self, mine: Announcement, last: Commit | None) -> View:
        """As this peer sees it, which stands there, and whose last commit that is."""
        if last is None:
            if self._plain is None:
                self._plain = dict(self.announcements)
            return self._plain
        attempt = last.group.attempt
        if (view := self._moved.get(attempt)) is None:
            view = membership.after_commit(self.announcements, last.group.ranks, last.lineage, mine)
            self._moved[attempt] = view
        return view

    def _change(self, cause: str) -> None:
        self._plain = None
        # Whoever is moved by a commit stands there already in the views of those who have made it.
        kept = self._moved.get(cause)
        self._moved = {cause: kept} if kept is not None else {}
        self._causes.add(cause)
        if self._timer is None:
            self._timer = self._clock.after(self._delay_s, self._notify)

    def _notify(self) -> None:
        causes, self._causes, self._timer = frozenset(self._causes), set(), None
        self._tell(causes)
