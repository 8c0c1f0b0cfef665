"""Simulated state transfer: takes a while, and succeeds if one donor has the state and stays reachable."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from diloco.sim.clock import Clock, Timer
from diloco.sim.network import Network
from diloco.sim.values import State
from peers.core import events
from peers.protocol.certificates import Body

if TYPE_CHECKING:
    from diloco.sim.peer import VirtualPeer

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

    def begin(self, fetcher: VirtualPeer, wanted: Body, donors: Sequence[str], timeout_s: float) -> None:
        """Start a download; `fetched` or FetchFailed follows, unless `end` is called before."""
        self.end(fetcher.peer_id)
        asked = [p for p in donors if self._deliver(fetcher, p, wanted) is not None]
        takes_s = min(timeout_s, self._rng.uniform(*(self.fetch_s if asked else QUICK_S)))

        def end() -> None:
            del self._timers[fetcher.peer_id]
            states = [state for p in asked if (state := self._deliver(fetcher, p, wanted)) is not None]
            if states and takes_s < timeout_s:
                fetcher.fetched(states[0])
                return
            suspects = frozenset(p for p in donors if self._deliver(fetcher, p, wanted) is None)
            fetcher.post(events.FetchFailed(wanted.head, "no donor delivered", suspects))

        self._timers[fetcher.peer_id] = self._clock.after(takes_s, end)

    def end(self, peer_id: str) -> None:
        """Cancel this peer's download. May be repeated."""
        if (timer := self._timers.pop(peer_id, None)) is not None:
            timer.cancel()

    def _deliver(self, fetcher: VirtualPeer, peer_id: str, wanted: Body) -> State | None:
        """The donor's state, if the donor is reachable and the state matches the digests."""
        donor = self._donors.get(peer_id)
        if donor is None or donor.is_frozen or not self._network.is_linked(fetcher.peer_id, peer_id):
            return None
        state = donor.state_of(wanted.head)
        if state is None or (state.anchor, state.momentum) != (wanted.anchor, wanted.momentum):
            return None
        return state
