"""A virtual swarm: peers that start, die, freeze and are partitioned on a virtual clock, determined by one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from diloco.sim.clock import Clock
from diloco.sim.download import Downloads
from diloco.sim.invariants import Invariants
from diloco.sim.keys import KeyRing
from diloco.sim.liars import MakeLiar
from diloco.sim.network import NOTICE_S, Network, Quality
from diloco.sim.peer import VirtualPeer
from diloco.sim.reduction import Reductions
from diloco.sim.truth import Pair, Truth
from diloco.sim.values import State, digest, initial_state
from peers.core import events
from peers.core.peer import Peer
from peers.core.settings import Settings

MANIFEST = digest("manifest")
START_NANOSECONDS = 1_700_000_000_000_000_000
VANISHED_S = (5.0, 30.0)
"""How long the others take to notice that a peer's machine is gone."""

Span = tuple[float, float]
"""Shortest and longest duration in seconds."""

PeerRef = int | str
"""A peer by its rank, or by its peer id if that is not `peer_id_of` its rank."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    load_s: Span = (0.2, 1.5)
    """Until a worker has loaded its model."""
    step_s: float = 0.5
    reduce_s: Span = (0.1, 0.8)
    fetch_s: Span = (0.1, 2.0)
    apply_s: Span = (0.001, 0.1)
    """Of the effects Apply, Adopt, Rebase and Answer."""


@dataclass
class Disk:
    """What survives when a peer's processes die."""

    pledges: dict[str, int] = field(default_factory=dict)
    checkpoint: State | None = None


def peer_id_of(peer: PeerRef) -> str:
    return peer if isinstance(peer, str) else f"p{peer}"


def settings_for(num_founders: int, **changes: object) -> Settings:
    """Settings with short epochs, and a grace too short to hide other faults."""
    known: dict[str, object] = {
        "manifest": MANIFEST,
        "steps_per_epoch": 6,
        "galaxy_size": num_founders,
        "founders_timeout_s": 15.0,
        "grace_s": 5.0,
    }
    return Settings(**(known | changes))  # type: ignore[arg-type]


class VirtualSwarm:
    """Peers with ranks 0 to num_peers - 1; all start at once unless `starts` is False.

    `liars`: by rank, the function that makes the machine. `saves`: peers write a checkpoint at every commit. `traced`:
    `trace` tells people of all events and effects. Every method that lets time pass raises InvariantViolated.
    """

    peer_type = VirtualPeer

    def __init__(
        self,
        num_peers: int,
        seed: int = 0,
        *,
        starts: bool = True,
        settings: Settings | None = None,
        durations: Durations | None = None,
        quality: Quality | None = None,
        liars: dict[int, MakeLiar] | None = None,
        saves: bool = False,
        traced: bool = False,
        encodes: bool = True,
        rng: random.Random | None = None,
    ) -> None:
        self.num_peers, self.saves, self.traced = num_peers, saves, traced
        self.settings, self.durations = settings or settings_for(num_peers), durations or Durations()
        self.machines = {peer_id_of(rank): make for rank, make in (liars or {}).items()}
        """By peer id: the functions that make the liars' machines."""
        self.liars = frozenset(self.machines)
        self.disks: dict[str, Disk] = {}
        self.offers: dict[str, State] = {}
        """By peer id: the state it offers, if not the common initial one."""
        self.slowness: dict[str, float] = {}
        self.live: dict[str, VirtualPeer] = {}
        """By peer id."""
        self.trace: list[str] = []
        self.clock, self.rng, self.ring, self.truth = (
            Clock(),
            rng or random.Random(seed),
            KeyRing(seed),
            Truth(),
        )
        self.network = Network(self.clock, self.rng, quality, encodes=encodes)
        self.reductions = Reductions(self.clock, self.rng, self.network, self.durations.reduce_s)
        self.downloads = Downloads(self.clock, self.rng, self.network, self.live, self.durations.fetch_s)
        self.invariants = Invariants(
            self.clock, self.truth, self.ring.verify, self.liars, self.live, self.settings
        )
        self._incarnations = self._num_steps = 0
        self._cuts: dict[Pair, int] = {}
        """By (sender, receiver): how many faults keep this direction cut."""
        self.network.on_channel = self._on_channel
        for rank in range(num_peers):
            self._add(peer_id_of(rank))
        if starts:
            for rank in range(num_peers):
                self.start(rank)

    # What peers share

    def new_pieces(self) -> range:
        """The pieces of the next step of any worker, one of each fragment."""
        self._num_steps += 1
        num_fragments = self.settings.num_fragments
        return range(num_fragments * self._num_steps, num_fragments * (self._num_steps + 1))

    def between(self, span: Span) -> float:
        return self.rng.uniform(*span)

    def note(self, who: str, text: str) -> None:
        """For the trace."""
        if self.traced:
            self.trace.append(f"{self.now:9.3f}  {who:<6} {text}")

    # Time

    @property
    def now(self) -> float:
        return self.clock.now

    def run(self, seconds: float) -> None:
        self.clock.advance(self.now + seconds)

    def run_until(self, is_over: Callable[[], bool], within_s: float) -> bool:
        """Run until `is_over`, for at most so long. Whether it came to be over."""
        return self.clock.run(is_over, until=self.now + within_s)

    def at(self, when: float, event: Callable[[], object]) -> None:
        self.clock.at(when, event)

    # Processes

    def _add(self, peer_id: str) -> None:
        """Before its first process starts, nobody hears this peer, and it hears nobody."""
        self.disks[peer_id] = Disk()
        self.truth.outages.begin(self._pairs_of(peer_id), self.now)

    def start(self, rank: PeerRef) -> None:
        """Start a process of this peer, unless it runs."""
        peer_id = peer_id_of(rank)
        if peer_id in self.live:
            return
        self._incarnations += 1
        disk = self.disks[peer_id]
        peer = self.peer_type(
            self, peer_id, disk, disk.checkpoint or self.offers.get(peer_id) or initial_state("seed")
        )
        self.note(peer_id, "** starts")
        self.live[peer_id] = peer
        self.truth.held_since[peer_id] = self.now
        for until in (self.truth.left_until, self.truth.idle_until):
            if peer_id in until:
                until[peer_id] = self.now
        self.network.open(peer)
        nanoseconds = START_NANOSECONDS + int(self.now * 1e9) + self._incarnations
        peer.start(self._machine_of(peer, nanoseconds))

    def _machine_of(self, peer: VirtualPeer, incarnation: int) -> Peer:
        keys = self.ring.keys_of(peer.peer_id)
        honest = Peer(
            keys=keys,
            verify=self.ring.verify,
            settings=self.settings,
            incarnation=incarnation,
            world_rank=self.world_rank_of(peer.peer_id),
            pledges=peer.disk.pledges,
            now=self.now,
        )
        if (make := self.machines.get(peer.peer_id)) is None:
            return honest
        return make(
            inner=honest, keys=keys, rng=self.rng, now=self.now, lies_at=self.now, made_up=peer.made_up
        )

    def world_rank_of(self, peer_id: str) -> int:
        """The world rank that this peer is given; -1 for every second peer, which claims one itself."""
        rank = int(peer_id.removeprefix("p"))
        return -1 if rank % 2 else rank

    def kill(self, rank: PeerRef, *, vanishes: bool = False) -> None:
        """Kill the daemon and the worker of this peer. `vanishes`: with their machine, so that channels do not break at
        once. May be repeated."""
        peer_id, notice_s = peer_id_of(rank), VANISHED_S if vanishes else NOTICE_S
        peer = self.live.pop(peer_id, None)
        if peer is None:
            return
        self.note(peer_id, "** is killed")
        self.network.close(peer_id, notice_s=notice_s)
        peer.kill()
        self.truth.drops(peer_id, self.now)

    def freeze(self, rank: PeerRef, seconds: float) -> None:
        """Stop its daemon for so long; its worker continues."""
        peer_id = peer_id_of(rank)
        peer = self.live.get(peer_id)
        if peer is None or peer.is_frozen:
            return
        self.note(peer_id, f"** freezes for {seconds:.1f} s")
        outages, others = self.truth.outages, self._pairs_of(peer_id)
        outages.begin(others, self.now)
        peer.freeze()

        def thaw() -> None:
            outages.end(others, self.now)
            if peer.is_running:
                self.note(peer_id, "** thaws")
                peer.thaw()

        self.clock.after(seconds, thaw)

    def slow_down(self, rank: PeerRef, factor: float) -> None:
        """Make it train, reduce and write its state `factor` times as slowly; 1: at normal speed."""
        peer_id = peer_id_of(rank)
        self.slowness[peer_id] = factor
        if (peer := self.live.get(peer_id)) is not None:
            peer.slowness = factor
            if peer.worker is not None:
                peer.worker.step_s = self.durations.step_s * factor
            self.note(peer_id, f"** takes {factor:.1f} times as long from now on")

    def leave(self, rank: PeerRef, ends_after_s: float = 1.0) -> None:
        """Ask it to leave: it announces that, and ends."""
        if (peer := self.live.get(peer_id_of(rank))) is not None:
            self.note(peer.peer_id, "** leaves")
            self.truth.left_until[peer.peer_id] = math.inf
            peer.post(events.Leave())
            self.clock.after(ends_after_s, lambda: self.kill(rank) if peer.is_running else None)

    def finish(self, rank: PeerRef) -> None:
        """End its training with this epoch: the peer leaves with the commit that contains this work."""
        if (peer := self.live.get(peer_id_of(rank))) is not None and peer.worker is not None:
            self.note(peer.peer_id, "** is to end with its next commit")
            self.truth.left_until[peer.peer_id] = math.inf
            peer.worker.ends_after_this = True

    def crash_worker(self, rank: PeerRef, back_after_s: float) -> None:
        peer = self.live.get(peer_id_of(rank))
        if peer is None or peer.worker is None:
            return
        self.note(peer.peer_id, "** loses its worker")
        self.truth.idle_until[peer.peer_id] = math.inf
        peer.crash_worker()
        self.clock.after(back_after_s, lambda: self._bring_worker_back(peer))

    def _bring_worker_back(self, peer: VirtualPeer) -> None:
        if peer.is_running and peer.worker is None:
            self.note(peer.peer_id, "** gets a worker again")
            self.truth.idle_until[peer.peer_id] = self.now
            if peer.peer_id in self.truth.left_until:
                self.truth.left_until[peer.peer_id] = self.now
            peer.start_worker()

    # Links

    def cut(self, one: PeerRef, other: PeerRef, *, one_way: bool = False) -> None:
        """Cut the link in both directions; `one_way`: from `one` to `other` only."""
        for sender, receiver in self._directions(one, other, one_way):
            self._cuts[sender, receiver] = self._cuts.get((sender, receiver), 0) + 1
            self.truth.outages.begin([(receiver, sender)], self.now)
            self.network.cut(sender, receiver)
        self.note(peer_id_of(one), f"** is cut off from {peer_id_of(other)}{', one way' if one_way else ''}")
        self.reductions.links_changed()

    def heal(self, one: PeerRef, other: PeerRef, *, one_way: bool = False) -> None:
        """End one cut."""
        for sender, receiver in self._directions(one, other, one_way):
            self._cuts[sender, receiver] -= 1
            self.truth.outages.end([(receiver, sender)], self.now)
            if not self._cuts[sender, receiver]:
                self.network.heal(sender, receiver)
        self.note(peer_id_of(one), f"** is linked to {peer_id_of(other)} again")
        self.reductions.links_changed()

    def partition(self, *sides: Iterable[PeerRef]) -> None:
        for one, other in _across(sides):
            self.cut(one, other)

    def heal_partition(self, *sides: Iterable[PeerRef]) -> None:
        for one, other in _across(sides):
            self.heal(one, other)

    # Results

    @property
    def peers(self) -> dict[int, VirtualPeer]:
        """The live ones, by rank."""
        return {int(peer_id[1:]): peer for peer_id, peer in sorted(self.live.items())}

    @property
    def honest(self) -> list[VirtualPeer]:
        return [peer for peer in self.live.values() if peer.is_honest]

    def state(self, rank: int) -> State:
        state = self.peers[rank].state
        assert state is not None, f"peer {rank} has no state"
        return state

    def epochs(self) -> dict[int, int]:
        return {rank: peer.machine.epoch for rank, peer in self.peers.items()}

    def heads(self) -> set[str]:
        return {peer.machine.head for peer in self.live.values()}

    def contributors(self, head: str) -> set[int]:
        plan = self.truth.certificates[head].plan
        return {int(contributor.peer_id[1:]) for contributor in plan.contributors}

    def roster(self, head: str) -> set[int]:
        return {int(peer_id[1:]) for peer_id in self.truth.roster_after(head)}

    def _directions(self, one: PeerRef, other: PeerRef, one_way: bool) -> Sequence[Pair]:
        there = (peer_id_of(one), peer_id_of(other))
        return [there] if one_way else [there, there[::-1]]

    def _pairs_of(self, peer_id: str) -> list[Pair]:
        others = [other for other in self.disks if other != peer_id]
        return [(other, peer_id) for other in others] + [(peer_id, other) for other in others]

    def _on_channel(self, one: str, other: str, is_open: bool) -> None:
        outages, both = self.truth.outages, [(one, other), (other, one)]
        (outages.end if is_open else outages.begin)(both, self.now)


def _across(sides: Sequence[Iterable[PeerRef]]) -> list[tuple[PeerRef, PeerRef]]:
    """All pairs of peers on different sides, each once."""
    known = [tuple(side) for side in sides]
    return [(a, b) for one, other in permutations(known, 2) for a in one for b in other if str(a) < str(b)]
