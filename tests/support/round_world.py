"""A swarm of pure rounds on a simulated clock and network, for tests of the round's decisions.

Channels between two peers are in order and delayed by a seeded random time; everything else may happen in any order.
A peer that dies takes what it has not yet sent with it, and the others hear of it a little later.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from peers.records import Announcement
from peers.round.actions import Action, Apply, Cancel, CatchUp, Inspect, Reduce, Send
from peers.round.aggregation import Aggregation
from peers.round.leader import Timing
from peers.round.messages import Abort, Ask, Audit, Commit, Group, Join, Proposal, RoundMessage, Vote
from peers.rounds import Phase, Round
from tests.support.announcements import announced

TIMING = Timing(gather_s=30.0, attempt_s=20.0)


def status(
    rank: int, *, lineage: str = "a", epoch: int = 0, state: str = "training", tokens: int = 0
) -> Announcement:
    return announced(
        f"peer{rank}",
        run_id="test",
        world_rank=rank,
        state=state,
        epoch=epoch,
        lineage=lineage,
        committed_tokens=tokens,
        anchor_digest=lineage,
        time=0.0,
    )


@dataclass
class SimulatedPeer:
    round: Round
    view: dict[int, Announcement]
    alive: bool = True
    commit: Commit | None = None
    committed_at: float | None = None
    caught_up: CatchUp | None = None
    num_reductions: int = 0
    num_audits: int = 0
    reducing: str = ""
    tick_at: float = float("inf")


@dataclass
class World:
    """`outcome_of(rank, attempt)` gives each member's digests; None makes its reduction fail, blaming `suspects`."""

    num_peers: int
    seed: int = 0
    delay_s: tuple[float, float] = (0.001, 0.2)
    outcome_of: Callable[[int, str], Vote | None] | None = None
    suspects: dict[int, tuple[int, ...]] = field(default_factory=dict)
    told_by: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By whose word alone each rank suspects them."""
    on_send: Callable[[World, int, int, RoundMessage], None] | None = None
    loses: Callable[[int, int, RoundMessage], bool] | None = None
    """Whether this message from one rank to another is lost, as when a channel breaks and stands again at once."""
    reduction_s: Callable[[str], float] | None = None
    """How long this attempt's reduction takes; default: half a second to a second."""
    timing: Timing = TIMING
    barred: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Whom each rank neither follows nor takes."""
    num_left_out: dict[int, int] = field(default_factory=dict)
    """Rounds in a row that the others have committed without this rank."""
    led_by: int = -1
    """Who led the last commit."""
    audit: float = 0.0
    demands: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Whose sums each rank wants looked at."""
    finding_of: Callable[[int, Audit], tuple[tuple[int, ...], tuple[int, ...]]] | None = None
    """What a rank finds in an audit: (whom it lost it to, whose sums are false); default: nothing."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self.random = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._channel_free: dict[tuple[int, int], float] = {}
        self.aborts: list[Abort] = []
        statuses = {
            rank: dataclasses.replace(status(rank), led_by=-1 if rank in self.num_left_out else self.led_by)
            for rank in range(self.num_peers)
        }
        self.peers = {
            rank: SimulatedPeer(
                Round(
                    me=rank,
                    incarnation=1,
                    fragment=0,
                    epoch=0,
                    lineage="a",
                    parent="before a",
                    timing=self.timing,
                    view=statuses,
                    aggregation=Aggregation(audit=self.audit),
                    barred=self.barred.get(rank, ()),
                    num_left_out=self.num_left_out.get(rank, 0),
                ),
                dict(statuses),
            )
            for rank in range(self.num_peers)
        }

    # What a test does

    def ready(self, rank: int, at: float, tokens: int = 100, norm: float = 1.0) -> None:
        proposal = Proposal(rank, tokens, norm, 10, False)
        self.schedule(at, lambda: self._feed(rank, lambda r, now: r.on_ready(proposal, now)))

    def kill(self, rank: int, at: float | None = None, notice_s: float = 0.3) -> None:
        self.schedule(self.now if at is None else at, lambda: self._kill(rank, notice_s))

    def deliver(self, sender: int, to: int, message: RoundMessage) -> None:
        """Now, whoever has made it up."""
        self._feed(to, lambda r, now: r.on_message(sender, message, now))

    def restart(self, rank: int, at: float) -> None:
        """Die and come back at once, as another incarnation that has not got to training yet."""

        def back(other: int) -> None:
            peer = self.peers[other]
            peer.view[rank] = dataclasses.replace(status(rank, lineage="", state="joining"), incarnation=2)
            self._feed(other, lambda r, now: r.on_view(dict(peer.view), now))

        def die() -> None:
            self.peers[rank].alive = False
            for other in self.peers:
                if other != rank:
                    self.schedule(self.now + self.random.uniform(0, 0.3), lambda other=other: back(other))

        self.schedule(at, die)

    def part(self, one: int, other: int, at: float) -> None:
        """These two lose each other; all others still see both."""

        def lose(rank: int, lost: int) -> None:
            peer = self.peers[rank]
            del peer.view[lost]
            self._feed(rank, lambda r, now: r.on_view(dict(peer.view), now))

        self.schedule(at, lambda: lose(one, other))
        self.schedule(at, lambda: lose(other, one))

    def stop_answering(self, rank: int) -> None:
        """Alive to the mesh, but its round gets no more turns."""
        self.peers[rank].round.phase = Phase.OVER
        self.peers[rank].tick_at = float("inf")

    def run(self, until: float = 300.0) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def schedule(self, at: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    @property
    def survivors(self) -> dict[int, SimulatedPeer]:
        return {rank: peer for rank, peer in self.peers.items() if peer.alive}

    # How the world goes

    def _feed(self, rank: int, event: Callable[[Round, float], list[Action]]) -> None:
        peer = self.peers[rank]
        if not peer.alive:
            return
        for action in event(peer.round, self.now):
            if not peer.alive:
                return
            self._carry_out(rank, action)
        self._schedule_tick(rank)

    def _schedule_tick(self, rank: int) -> None:
        peer = self.peers[rank]
        due = max(peer.round.deadline, self.now + 0.02)
        if due < peer.tick_at and due < float("inf"):
            peer.tick_at = due
            self.schedule(due, lambda: self._tick(rank, due))

    def _tick(self, rank: int, due: float) -> None:
        if self.peers[rank].tick_at == due:
            self.peers[rank].tick_at = float("inf")
            self._feed(rank, lambda r, now: r.on_tick(now))

    def _carry_out(self, rank: int, action: Action) -> None:
        peer = self.peers[rank]
        match action:
            case Send(to, message):
                if self.on_send:
                    self.on_send(self, rank, to, message)
                if isinstance(message, Abort):
                    self.aborts.append(message)
                if peer.alive and not (self.loses and self.loses(rank, to, message)):
                    self._transmit(rank, to, lambda: self._deliver(rank, to, message))
            case Reduce(group):
                peer.num_reductions += 1
                peer.reducing = group.attempt
                self._reduce(rank, group.attempt, group.ranks)
            case Inspect(group, audit):
                peer.num_audits += 1
                self.schedule(
                    self.now + self.random.uniform(0.1, 0.3), lambda: self._inspect(rank, group, audit)
                )
            case Cancel():
                peer.reducing = ""
            case Apply(commit):
                peer.commit, peer.committed_at = commit, self.now
                self._advance(rank, commit)
            case CatchUp():
                peer.caught_up = action

    def _transmit(self, sender: int, to: int, arrive: Callable[[], None]) -> None:
        at = max(self.now + self.random.uniform(*self.delay_s), self._channel_free.get((sender, to), 0.0))
        self._channel_free[sender, to] = at + 1e-9
        self.schedule(at + 1e-9, arrive)

    def _deliver(self, sender: int, to: int, message: RoundMessage) -> None:
        peer = self.peers[to]
        if peer.commit is not None and isinstance(message, (Join, Ask)):
            self._carry_out(to, Send(sender, peer.commit))
            return
        self._feed(to, lambda r, now: r.on_message(sender, message, now))

    def _reduce(self, rank: int, attempt: str, ranks: tuple[int, ...]) -> None:
        """All members have to be alive until the end; a death fails it for everybody still in it."""

        def finish() -> None:
            peer = self.peers[rank]
            if peer.reducing != attempt:
                return
            peer.reducing = ""
            dead = tuple(r for r in ranks if not self.peers[r].alive)
            vote = Vote(
                0,
                "a",
                attempt,
                tuple("s" for _ in ranks),
                "b",
                "m",
                sent=tuple(f"{rank} to {other}" for other in ranks),
                received=tuple(f"{other} to {rank}" for other in ranks),
                audit=tuple(other for other in self.demands.get(rank, ()) if other in ranks),
            )
            if self.outcome_of is not None:
                given = self.outcome_of(rank, attempt)
                vote = dataclasses.replace(given, attempt=attempt) if given else None
            if dead or vote is None:
                blamed = dead or self.suspects.get(rank, ())
                told_by = () if dead else self.told_by.get(rank, ())
                self._feed(rank, lambda r, now: r.on_reduce_failed(attempt, blamed, now, told_by=told_by))
            else:
                self._feed(rank, lambda r, now: r.on_reduced(attempt, vote, now))

        took_s = self.reduction_s(attempt) if self.reduction_s else self.random.uniform(0.5, 1.0)
        self.schedule(self.now + took_s, finish)

    def _inspect(self, rank: int, group: Group, audit: Audit) -> None:
        dead = tuple(r for r in group.ranks if not self.peers[r].alive)
        lost, false = self.finding_of(rank, audit) if self.finding_of else ((), ())
        if dead or lost or false:
            blamed = dead or lost
            self._feed(rank, lambda r, now: r.on_audit_failed(group.attempt, blamed, false, now))
        else:
            self._feed(rank, lambda r, now: r.on_audited(group.attempt, now))

    def _advance(self, rank: int, commit: Commit) -> None:
        """Everybody hears that this peer is at the next lineage."""
        ahead = status(rank, lineage="b", epoch=1, tokens=commit.group.tokens)
        self.peers[rank].view[rank] = ahead
        for other in self.peers:
            if other != rank:
                self._transmit(rank, other, lambda other=other: self._see(other, ahead))

    def _see(self, rank: int, announcement: Announcement) -> None:
        peer = self.peers[rank]
        if announcement.world_rank not in peer.view:
            return
        peer.view[announcement.world_rank] = announcement
        self._feed(rank, lambda r, now: r.on_view(dict(peer.view), now))

    def _kill(self, rank: int, notice_s: float) -> None:
        self.peers[rank].alive = False
        for other in self.peers:
            if other != rank:
                self.schedule(
                    self.now + self.random.uniform(0, notice_s), lambda other=other: self._lose(other, rank)
                )

    def _lose(self, rank: int, lost: int) -> None:
        peer = self.peers[rank]
        if peer.view.pop(lost, None) is not None:
            self._feed(rank, lambda r, now: r.on_view(dict(peer.view), now))
