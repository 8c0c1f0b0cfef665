"""All peers of a simulated run, their shared resources, and their losses and returns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from diloco.errors import DilocoError
from diloco.sim.clock import Clock
from diloco.sim.cost.downloads import Downloads
from diloco.sim.cost.figures import EpochOfPeer, Figures, InHand, Losses, figures_of
from diloco.sim.cost.links import Resource
from diloco.sim.cost.messages import Messages
from diloco.sim.cost.peer import CostPeer
from diloco.sim.cost.reduction import Reduction
from diloco.sim.cost.scenario import FP32_BYTES, Scenario
from diloco.sim.cost.traffic import Traffic
from diloco.sim.keys import BelievedKeys, believe
from diloco.sim.values import digest
from peers.core import events
from peers.core.founding import genesis_of
from peers.core.peer import Peer
from peers.core.settings import Settings
from peers.net.live_peer import silence_s
from peers.protocol.certificates import Certificate, Plan
from peers.protocol.messages import Certificates, Offer
from peers.timing import FULL_MESH

_LONGEST_EPOCH = 100.0
"""A run whose epochs take longer than this multiple of their training time is considered stuck."""
_SETTLES_IN = 4.0
"""After this multiple of the silence timeout, all peers count a lost peer as gone."""
_PEER_ID = "peer{:048d}"
"""As long as real peer ids, so that messages have real sizes."""
_UNTRAINED = Offer(anchor=digest("initial anchor"), momentum=digest("no momentum"))

Progress = Callable[[int, float], object]
"""Called with each committed epoch and its time."""


class CostSwarm:
    """A simulated swarm, which can be run once."""

    def __init__(self, scenario: Scenario, progress: Progress = lambda epoch, at: None) -> None:
        self.scenario, self._progress = scenario, progress
        self.clock = Clock()
        self.peer_ids = [_PEER_ID.format(rank) for rank in range(len(scenario.peers))]
        """By world rank."""
        capacity: dict[Resource, float] = {}
        for rank, peer in enumerate(scenario.peers):
            capacity[rank, "up"] = peer.link.up_bytes_per_s
            capacity[rank, "down"] = peer.link.down_bytes_per_s
            capacity[rank, "processors"] = peer.machine.reduce
        self.traffic = Traffic(self.clock, capacity)
        self.downloads = Downloads(self.clock, self.traffic, scenario)
        self.settings = Settings(
            manifest=digest("manifest"),
            steps_per_epoch=scenario.schedule.steps_per_epoch,
            num_fragments=scenario.schedule.num_fragments,
            epoch_s=scenario.schedule.seconds_per_epoch,
            overlap_steps=max(0, scenario.schedule.overlap_steps),
            never_waits=scenario.schedule.never_waits,
            founders_timeout_s=scenario.restart_s,
            galaxy_size=len(scenario.peers),
        )
        self.newest: Certificate
        """The commit with the highest epoch."""
        self.records: list[EpochOfPeer] = []
        self.losses = Losses()
        self._in_hand: dict[int, InHand] = {}
        self.pledges: list[dict[str, int]] = [{} for _ in scenario.peers]
        """By world rank, pledges by head: they are stored on disk and survive a restart."""
        self.living: dict[str, CostPeer] = {}
        """By peer id."""
        self.messages = Messages(
            self.clock, dict(zip(self.peer_ids, scenario.peers, strict=True)), self.living
        )
        self._lives: dict[int, CostPeer] = {}
        self._last_epoch, self._is_over = scenario.num_uncounted + scenario.num_epochs, False
        self._last_members: frozenset[int] = frozenset()
        self.parents: dict[str, str] = {}
        """By head: the head before it."""
        self.here: set[str] = set()
        """The peers that the mesh of a large swarm has not lost."""
        self._settles_at = 0.0
        self.open_streams: set[int] = set()
        """The peers between which streams are open: a successful reduction leaves them so, a failed one closes them."""
        self._reductions: dict[str, Reduction] = {}
        self._num_attempts = 0

    def run(self) -> Figures:
        """Run to the end. Raises DilocoError if no epoch ends any more."""
        scenario = self.scenario
        self.newest = genesis = self._genesis()
        for rank in range(len(scenario.peers)):
            self._start(rank, 1, _UNTRAINED)
        for peer in list(self.living.values()):
            founded = Certificates(head=genesis.head, certificates=(genesis,))
            peer.post(events.Received(self.peer_ids[0 if peer.rank else -1], founded))
        trained_s = max(peer.step_s for peer in scenario.peers)
        most_s = _LONGEST_EPOCH * (1.0 + trained_s * scenario.schedule.steps_per_epoch + self._slowest_s)
        if not self.clock.run(lambda: self._is_over, until=most_s * self._last_epoch):
            raise DilocoError(
                f"the simulated run stops at epoch {self.newest.plan.epoch}: its rounds fail one after the other. "
                "Peers are lost faster than they finish a round: raise --mtbf, or --bandwidth, or use a smaller --codec"
            )
        return self._figures()

    def check_end(self) -> None:
        """End the simulation once all members of the last commit that are still alive train on top of it."""
        last = self._last_epoch
        members = [self._lives[rank] for rank in self._last_members]
        self._is_over = self.newest.plan.epoch >= last and all(
            peer.worker.epoch_merged >= last
            for peer in members
            if peer.is_running and peer.certificate is not None
        )

    @property
    def _slowest_s(self) -> float:
        """Time to transfer the whole state over the slowest link."""
        slowest = min(min(p.link.up_bytes_per_s, p.link.down_bytes_per_s) for p in self.scenario.peers)
        return 8 * self.scenario.num_params / slowest

    def _genesis(self) -> Certificate:
        """The genesis certificate, signed by all peers."""
        founders = {peer_id: (rank, _UNTRAINED) for rank, peer_id in enumerate(self.peer_ids)}
        body = genesis_of(self.settings, founders, 0)
        signature = BelievedKeys(self.peer_ids[0]).sign(b"")
        return Certificate(body=body, signatures=(signature,) * len(founders))

    def _start(self, rank: int, incarnation: int, offer: Offer) -> CostPeer:
        peer = self._lives[rank] = CostPeer(self, rank, incarnation, offer)
        self.living[peer.peer_id] = peer
        self.here.add(peer.peer_id)
        core = Peer(
            keys=BelievedKeys(peer.peer_id),
            verify=believe,
            settings=self.settings,
            incarnation=int(1e9 * self.clock.now) + incarnation,
            world_rank=rank,
            pledges=self.pledges[rank],
            now=self.clock.now,
        )
        core.timing.set_sizes(
            fragment_bytes=FP32_BYTES * max(self.scenario.fragment_sizes),
            state_bytes=self.scenario.state_bytes,
        )
        self._plan_loss(peer)
        peer.start(core)
        return peer

    # When heartbeats are skipped

    @property
    def is_quiet(self) -> bool:
        """Whether all peers are on one head and no loss is recent: heartbeats have no effect then and are skipped."""
        if self.clock.now < self._settles_at:
            return False
        head = self.newest.head
        return all(peer.is_idle and peer.machine.head == head for peer in self.living.values())

    def _wake(self) -> None:
        """Resume heartbeats before a peer is lost or returns."""
        for peer in list(self.living.values()):
            peer.pump()
        silences = [peer.machine.timing.silence_s for peer in self.living.values()]
        self._settles_at = self.clock.now + self._mesh_silence_s + _SETTLES_IN * max(silences, default=0.0)

    # What the mesh of a large swarm says: in a small one, peers hear one another's statuses often enough

    @property
    def is_large(self) -> bool:
        return len(self.peer_ids) > FULL_MESH

    @property
    def _mesh_silence_s(self) -> float:
        """Time after which the neighbours of a lost peer have noticed it."""
        return silence_s(len(self.peer_ids)) if self.is_large else 0.0

    def _tell_of_loss(self, peer_id: str) -> None:
        if peer_id in self.living:
            return
        self.here.discard(peer_id)
        for peer in list(self.living.values()):
            peer.post(events.Disconnected(peer_id))

    # What peers share

    def chance_of(self, rank: int, incarnation: int) -> random.Random:
        """Separate randomness for each incarnation of each peer, so that one peer's events do not affect another's."""
        return random.Random(f"{self.scenario.seed} {rank} {incarnation}")

    def reduction(self, plan: Plan) -> Reduction:
        """The reduction of this attempt, shared by its members."""
        if (reduction := self._reductions.get(plan.digest)) is None:
            reduction = Reduction(self, plan)
            # Drop the reductions of earlier epochs.
            self._reductions = {
                name: old for name, old in self._reductions.items() if old.plan.epoch >= plan.epoch
            }
            self._reductions[plan.digest] = reduction
            self._num_attempts += 1
        return reduction

    def committed(self, certificate: Certificate, record: EpochOfPeer) -> None:
        """Called when a peer has applied a commit."""
        self.records.append(record)
        plan = certificate.plan
        self.parents[certificate.head] = plan.parent
        if plan.epoch > self.newest.plan.epoch:
            if self.newest.plan.epoch < self._last_epoch:
                self._last_members = frozenset(contributor.world_rank for contributor in plan.contributors)
            outside = self.living.keys() - plan.signer_set
            is_missed = any(self.living[peer_id].machine.head == plan.parent for peer_id in outside)
            self.downloads.committed(certificate.head, is_missed=is_missed)
            self.newest = certificate
            in_hand_s = sum(peer.worker.uncommitted_s for peer in self.living.values())
            self._in_hand[plan.epoch] = InHand(self.clock.now, in_hand_s)
            self._progress(plan.epoch, self.clock.now)

    # Losses and returns

    def _plan_loss(self, peer: CostPeer) -> None:
        if self.scenario.mtbf_s < float("inf"):
            chance = random.Random(f"{self.scenario.seed} loss {peer.rank} {peer.incarnation}")
            after_s = chance.expovariate(1 / self.scenario.mtbf_s)
            self.clock.after(after_s, lambda: self._lose(peer))

    def lose(self, rank: int) -> None:
        """Lose the peer; it returns after the scenario's `restart_s`."""
        self._lose(self._lives[rank])

    def _lose(self, peer: CostPeer) -> None:
        if not peer.is_running:
            return
        self._wake()
        peer.stop()
        del self.living[peer.peer_id]
        self.open_streams.discard(peer.rank)
        self.losses.peers_lost += 1
        self.losses.lost_train_s += peer.worker.uncommitted_s
        if self._mesh_silence_s:
            self.clock.after(self._mesh_silence_s, lambda: self._tell_of_loss(peer.peer_id))
        self.clock.after(self.scenario.restart_s, lambda: self._return(peer))

    def _return(self, before: CostPeer) -> None:
        """Start the peer again with a checkpoint of its last state."""
        held = before.certificate
        offer = _UNTRAINED
        if held is not None and not held.is_genesis:
            offer = Offer(anchor=held.body.anchor, momentum=held.body.momentum, certificate=held)
        self.losses.returns += 1
        self._wake()
        self._start(before.rank, before.incarnation + 1, offer)

    # Results

    def _kept_records(self) -> list[EpochOfPeer]:
        """Records of the commits on the chain that most peers are on, without those of abandoned forks."""
        held = (peer.certificate for peer in self.living.values())
        ends = Counter(c.head for c in held if c is not None and c.plan.epoch >= self._last_epoch)
        head = max(ends, key=lambda end: (ends[end], end), default=self.newest.head)
        kept = set()
        while head in self.parents:
            kept.add(head)
            head = self.parents[head]
        return [record for record in self.records if record.head in kept]

    def _figures(self) -> Figures:
        peers = self.scenario.peers
        self.losses.downloaded_bytes = self.downloads.num_bytes
        self.losses.failed_attempts = self._num_attempts - len({record.head for record in self.records})
        return figures_of(
            self._kept_records(),
            self.losses,
            num_peers=len(peers),
            num_uncounted=self.scenario.num_uncounted,
            tokens_per_step=self.scenario.tokens_per_step,
            price_per_hour=sum(peer.price_per_hour for peer in peers),
            in_hand=self._in_hand,
        )


def simulate(scenario: Scenario, progress: Progress = lambda epoch, at: None) -> Figures:
    """Simulate a scenario. Raises DilocoError if its rounds never succeed."""
    return CostSwarm(scenario, progress).run()
