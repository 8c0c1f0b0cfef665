"""Downloads of the outer state, from several donors at once, over links shared with other traffic.

A peer that holds an older state downloads the commits after it if they were recorded, which takes a round's bytes for
each commit instead of the whole state. As in the real daemon, commits are recorded during a download and for a while
afterwards (peers/reduce/commit_log.py). Otherwise the peer downloads the fragments that have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diloco.sim.clock import Clock
from diloco.sim.cost.links import Resource
from diloco.sim.cost.scenario import Scenario
from diloco.sim.cost.traffic import Activity, Traffic
from peers.protocol.certificates import Certificate
from peers.reduce.codecs import result_codec_named
from peers.reduce.commit_log import KEPT_FOR_S


class Downloads:
    """All downloads of a swarm, by world rank."""

    def __init__(self, clock: Clock, traffic: Traffic, scenario: Scenario) -> None:
        self._clock, self._traffic, self._scenario = clock, traffic, scenario
        self.num_bytes = 0.0
        """Total size of all downloads that were started."""
        self._under_way: dict[int, Activity] = {}
        self._recorded_until = 0.0
        self._recorded: set[str] = set()

    def committed(self, head: str, *, is_missed: bool) -> None:
        """Record the commit with this head if commits are recorded now, or if a peer at its parent is not in it."""
        if self._under_way or is_missed or self._clock.now < self._recorded_until:
            self._recorded.add(head)

    def size_of(self, path: Sequence[Certificate], have: Certificate | None) -> float:
        """Bytes to download for the state at the end of `path`; `have` is the certificate of the peer's own state."""
        scenario, count = self._scenario, self._scenario.schedule.num_fragments
        follows = have is not None and path[0].plan.parent == have.head
        if have is None or (not follows and path[-1].head != have.head):
            return scenario.state_bytes
        if all(certificate.head in self._recorded for certificate in path):
            codec = result_codec_named(scenario.codec)
            return sum(codec.encoded_bytes(scenario.fragment_sizes[c.plan.fragment]) for c in path)
        return scenario.state_bytes * min(len(path), count) / count

    def begin(self, joiner: int, donors: Sequence[int], num_bytes: float, then: Callable[[], object]) -> None:
        """Start a download; each donor sends an equal part. If a donor dies, the others send its part at no cost."""
        usage: dict[Resource, float] = {(joiner, "down"): 1.0}
        usage |= {(donor, "up"): 1.0 / len(donors) for donor in donors}

        def done() -> None:
            self._end(joiner)
            then()

        self.stop(joiner)
        self.num_bytes += num_bytes
        activity = self._under_way[joiner] = Activity(usage, num_bytes, done)
        self._traffic.start(activity)

    def stop(self, joiner: int) -> None:
        """Cancel the download of this peer, if there is one."""
        if (activity := self._under_way.get(joiner)) is not None:
            self._traffic.stop(activity)
            self._end(joiner)

    def _end(self, joiner: int) -> None:
        del self._under_way[joiner]
        self._recorded_until = self._clock.now + KEPT_FOR_S
