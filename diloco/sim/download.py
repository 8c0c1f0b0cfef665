"""Simulated state transfer: takes a while, and succeeds if one donor that has the state stays reachable.

A state that follows the fetcher's own is not transferred: its commits are repeated, which takes REPEAT_S at the most.
So a peer catches up also where commits are made faster than its link carries a state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from diloco.sim.clock import Clock, Timer
from diloco.sim.network import Network
from peers.core import events
from peers.protocol.certificates import Body

if TYPE_CHECKING:
    from diloco.sim.peer import VirtualPeer

REPEAT_S = 2.0
QUICK_S = (0.05, 0.5)
"""How long a fetch without any reachable donor takes to fail."""


class Downloads:
    """Each peer has one download at a time. `donors`: all live peers, by id. `fetch_s`: least and most duration."""

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        network: Network,
        donors: Mapping[str, VirtualPeer],
        fetch_s: tuple[float, float],
    ) -> None:
        self.fetch_s = fetch_s
        self._clock, self._rng, self._network, self._donors = clock, rng, network, donors
        self._timers: dict[str, Timer] = {}

    def begin(
        self,
        fetcher: VirtualPeer,
        wanted: Body,
        donors: Sequence[str],
        timeout_s: float,
        *,
        follows: bool = False,
    ) -> None:
        """Start a download; `fetched` or FetchFailed follows, unless `end` is called before.

        `follows`: the commits that lead from the fetcher's own state to this one are known.
        """
        self.end(fetcher.peer_id)
        begun = {p: self._donors[p] for p in donors if self._has(fetcher, p, wanted)}
        served = next((donor.state_of(wanted.head) for donor in begun.values()), None)
        takes_s = min(timeout_s, self._rng.uniform(*(self.fetch_s if begun else QUICK_S)))
        takes_s = min(takes_s, REPEAT_S) if follows else takes_s

        def end() -> None:
            del self._timers[fetcher.peer_id]
            there = {p for p, donor in begun.items() if self._reached(fetcher, p) is donor}
            if served is not None and there and takes_s < timeout_s:
                fetcher.fetched(served)
                return
            suspects = frozenset(donors) - there
            fetcher.fetch_failed(events.FetchFailed(wanted.head, "no donor delivered", suspects))

        self._timers[fetcher.peer_id] = self._clock.after(takes_s, end)

    def end(self, peer_id: str) -> None:
        """Cancel this peer's download. May be repeated."""
        if (timer := self._timers.pop(peer_id, None)) is not None:
            timer.cancel()

    def _reached(self, fetcher: VirtualPeer, peer_id: str) -> VirtualPeer | None:
        """The donor, if it is reachable."""
        donor = self._donors.get(peer_id)
        if donor is None or donor.is_frozen or not self._network.is_linked(fetcher.peer_id, peer_id):
            return None
        return donor

    def _has(self, fetcher: VirtualPeer, peer_id: str, wanted: Body) -> bool:
        """Whether the donor is reachable, and its state matches the digests."""
        donor = self._reached(fetcher, peer_id)
        state = donor.state_of(wanted.head) if donor is not None else None
        return state is not None and (state.anchor, state.momentum) == (wanted.anchor, wanted.momentum)
