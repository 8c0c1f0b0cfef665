"""A swarm of the pure parts of the round, epoch after epoch: what peers/averaging.py and peers/host.py do around them.

Daemons here have workers that train for a while, reductions that can fail at one member and succeed at another, and
downloads that take time; their lives end and begin anew. What goes wrong with the guarantees is noted in `wrong`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from peers.round.credit import Credit

from peers import joining, membership
from peers.records import Announcement
from peers.round.actions import Action, Apply, Cancel, CatchUp, Inspect, Reduce, Send
from peers.round.aggregation import Aggregation
from peers.round.audit import demanded
from peers.round.leader import Timing
from peers.round.messages import Ask, Audit, Commit, Group, Join, Proposal, RoundMessage, Vote
from peers.round.recent_commits import RecentCommits
from peers.rounds import Round
from tests.support.round_world import status
from tests.support.simulated_network import Pair, SimulatedNetwork

TIMING = Timing(gather_s=30.0, attempt_s=20.0, follow_s=2.0)
TRAIN_S = (2.0, 6.0)
REDUCE_S = (0.2, 1.0)
DOWNLOAD_S = (0.05, 1.0)
START_S = (0.5, 2.0)
CONNECT_TIMEOUT_S = 10.0
WAIT_FOR_PEERS_S = 20.0
HEARTBEAT_S, QUIET_BEATS = 1.0, 4
MAX_UNREAD = 64
STALL_TIMEOUT_S = 5.0
SILENCE_S = 8.0
_MAX_PIECES = 100_000


@dataclass(frozen=True)
class SimulatedState:
    """An outer state, and whose work is in it: one name for each piece that a worker has handed over."""

    epoch: int = 0
    lineage: str = "a"
    tokens: int = 0
    work: tuple[str, ...] = ()
    parent: str = ""


@dataclass
class Piece:
    """What a worker has handed over, and the attempt whose result this peer holds."""

    proposal: Proposal
    reduced: str = ""

    @property
    def name(self) -> str:
        return _name_of(self.proposal)


@dataclass(frozen=True)
class Committed:
    rank: int
    incarnation: int
    commit: Commit
    at: float


class SimulatedSwarm:
    def __init__(self, num_peers: int, seed: int = 0, audit: float = 0.0) -> None:
        self.audit = audit
        self.network = SimulatedNetwork(seed)
        self.network.on_cut = self._cut
        self.num_peers = num_peers
        self.daemons: dict[int, SimulatedDaemon] = {}
        self.attempts: dict[str, dict[int, str]] = {}
        """How each member's part in the reduction of each attempt stands."""
        self.groups: dict[str, Group] = {}
        self.states: dict[str, SimulatedState] = {"a": SimulatedState()}
        self.commits: list[Committed] = []
        self.wrong: list[str] = []
        self.failing: set[int] = set()
        """Ranks whose next reduction fails."""
        self.garbling: set[int] = set()
        """Ranks whose next reduction gives other bits than everybody else's."""
        self.accusing: set[int] = set()
        """Ranks that call the sums false that they look at next."""
        for rank in range(num_peers):
            self.start(rank)

    def start(self, rank: int) -> None:
        """A new life."""
        before = self.daemons.get(rank)
        daemon = SimulatedDaemon(self, rank, before.incarnation + 1 if before else 1)
        self.daemons[rank] = daemon
        self.network.add(daemon)
        daemon.begin()

    def kill(self, rank: int) -> None:
        self.daemons[rank].is_running = False
        self.network.remove(rank)
        self.fail_part(rank, self.daemons[rank].reducing, (), "dead")

    @property
    def living(self) -> dict[int, SimulatedDaemon]:
        return {rank: daemon for rank, daemon in self.daemons.items() if daemon.is_running}

    def run(self, seconds: float) -> None:
        self.network.run_until(self.network.now + seconds)

    def has_settled(self, epochs: dict[int, int]) -> bool:
        """Everybody alive trains on one lineage, and has come further than these epochs since."""
        living = self.living.values()
        return (
            len({daemon.state.lineage for daemon in living}) == 1
            and all(daemon.standing in ("training", "averaging") for daemon in living)
            and all(daemon.state.epoch > epochs.get(daemon.rank, 0) for daemon in living)
        )

    def next_of(self, old: SimulatedState, new: SimulatedState) -> tuple[str, ...]:
        """The work in the commit that led on from the old state, if that was on the way to the new one."""
        while new.parent and new.parent != old.lineage:
            new = self.states[new.parent]
        return new.work[len(old.work) :] if new.parent else ()

    # Reductions

    def begin_part(self, rank: int, group: Group) -> None:
        network, parts = self.network, self.attempts.setdefault(group.attempt, {})
        self.groups[group.attempt] = group
        parts[rank] = "running"
        if rank in self.failing:
            self.failing.discard(rank)
            network.after(network.between(REDUCE_S), lambda: self.fail_part(rank, group.attempt, ()))
            return
        for other in group.ranks:
            if parts.get(other) in ("failed", "dead") or (
                other != rank and not network.can_talk(rank, other)
            ):
                network.after(
                    network.between((0.0, 0.5)),
                    lambda other=other: self.fail_part(rank, group.attempt, (other,)),  # type: ignore[misc]
                )
                return
        network.after(CONNECT_TIMEOUT_S, lambda: self._give_up_connecting(rank, group))
        if all(other in parts for other in group.ranks):
            took_s = network.between(REDUCE_S)
            for other in group.ranks:
                last_s = took_s + network.between((0.0, 0.3))
                network.after(last_s, lambda other=other: self._finish_part(other, group))  # type: ignore[misc]

    def fail_part(self, rank: int, attempt: str, suspects: tuple[int, ...], how: str = "failed") -> None:
        """This member's part is over, and so is soon that of all who have not finished theirs."""
        parts = self.attempts.get(attempt, {})
        if parts.get(rank) != "running":
            return
        parts[rank] = how
        if how == "failed":
            self.daemons[rank].reduction_failed(attempt, suspects)
        for other in self.groups[attempt].ranks:
            told = suspects if suspects and self.network.random.random() < 0.5 else (rank,)
            self.network.after(
                self.network.between((0.0, 0.5)),
                lambda other=other, told=told: self.fail_part(other, attempt, told),  # type: ignore[misc]
            )

    def _give_up_connecting(self, rank: int, group: Group) -> None:
        missing = tuple(other for other in group.ranks if other not in self.attempts[group.attempt])
        if missing:
            self.fail_part(rank, group.attempt, missing)

    def _finish_part(self, rank: int, group: Group) -> None:
        if self.attempts[group.attempt].get(rank) != "running":
            return
        if self.daemons[rank].is_frozen:
            self.network.after(0.2, lambda: self._finish_part(rank, group))
            return
        self.attempts[group.attempt][rank] = "done"
        bits = _digest(group.lineage, group.attempt)
        if rank in self.garbling:
            self.garbling.discard(rank)
            bits = _digest(bits, "garbled")
        vote = Vote(
            0,
            group.lineage,
            group.attempt,
            tuple("s" for _ in group.ranks),
            bits,
            bits,
            sent=tuple(f"{rank} to {other}" for other in group.ranks),
            received=tuple(f"{other} to {rank}" for other in group.ranks),
            audit=demanded(group, rank, self.audit, self.network.random),
        )
        self.daemons[rank].reduced(group.attempt, vote)

    def _cut(self, pair: Pair) -> None:
        for rank in pair:
            (other,) = pair - {rank}
            attempt = self.daemons[rank].reducing
            if other in self.attempts.get(attempt, {}):
                self.fail_part(rank, attempt, (other,))


class SimulatedDaemon:
    """One life of one peer."""

    def __init__(self, swarm: SimulatedSwarm, rank: int, incarnation: int) -> None:
        self.swarm, self.network = swarm, swarm.network
        self.rank, self.incarnation = rank, incarnation
        self.is_running = True
        self.is_frozen = False
        self.standing = "joining"
        self.state = SimulatedState()
        self.has_state = False
        self.others: dict[int, Announcement] = {}
        self._unanswered: Counter[int] = Counter()
        self.round: Round | None = None
        self._commits = RecentCommits()
        self.piece: Piece | None = None
        self.reducing = ""
        """The last attempt whose reduction this peer has begun."""
        self._credit, self._early = Credit(), deque[tuple[int, RoundMessage]](maxlen=4096)
        self._joining_credit = Credit()
        self._num_pieces = self._num_left_out = 0
        self._is_busy = False
        self._events: deque[Callable[[float], list[Action]]] = deque()
        self._num_unread: Counter[int] = Counter()
        self._tick_at = 0.0

    # Life

    def begin(self) -> None:
        self._later(START_S, self._offer)
        self._started_at = self.network.now
        self._beat()

    def _offer(self) -> None:
        """The worker's initial weights."""
        self.has_state = True
        self._open_round()
        self._show("waiting")
        self._look_for_state()

    def _look_for_state(self) -> None:
        if self.standing != "waiting":
            return
        now = self.network.now
        view = self._joining_credit.credible(self._fresh_view(), self.state.lineage, now)
        source = joining.state_source(
            view,
            me=self.rank,
            galaxy_size=self.swarm.num_peers,
            waited_out=now - self._started_at > WAIT_FOR_PEERS_S,
        )
        if source is None:
            self._later((0.2, 1.0), self._look_for_state)
        elif source.lineage == self.state.lineage:
            self._show("training")
            self._train()
        else:
            donors = membership.donors_of(view, source.lineage, self.rank)
            self._download(
                donors, source.lineage, lambda state: self._joined(state, donors, source.peer_id, now)
            )

    def _joined(self, state: SimulatedState | None, donors: list[str], source: str, asked_at: float) -> None:
        if state is None:
            self._joining_credit.failed({*donors, source}, asked_at, self.network.now)
        else:
            self._joining_credit.delivered(donors)
            self._take(state)
            self._open_round()
        self._later((0.0, 0.5), self._look_for_state)

    def _train(self) -> None:
        self._later(TRAIN_S, self._hand_over)

    def _hand_over(self) -> None:
        self._num_pieces += 1
        tokens = 100 + self.network.random.randrange(50)
        # The step tells one piece from all others of this rank.
        step = _step_of(self.state.epoch) + self.incarnation * _MAX_PIECES + self._num_pieces
        self.piece = Piece(Proposal(self.rank, tokens, 1.0, step, False))
        self._show("averaging")
        self._propose()

    def freeze(self, seconds: float) -> None:
        """Nothing moves in this process for so long; what reaches it waits."""
        self.is_frozen = True
        if seconds > STALL_TIMEOUT_S:
            self.network.after(STALL_TIMEOUT_S, self._stall)
        if seconds > SILENCE_S:
            self.network.after(SILENCE_S, lambda: self.is_running and self.network.hang_up(self.rank))
        self.network.after(seconds, self._thaw)

    @property
    def is_answering(self) -> bool:
        return self.is_running and not self.is_frozen

    def _stall(self) -> None:
        group = self.swarm.groups.get(self.reducing)
        for other in group.ranks if group and self.is_running else ():
            if other != self.rank:
                self.swarm.fail_part(other, self.reducing, (self.rank,))

    def _thaw(self) -> None:
        self.is_frozen = False
        if self.is_running:
            self.network.add(self)
            self._drain()

    # The mesh

    def announcement(self) -> Announcement:
        state = self.state if self.has_state else SimulatedState(lineage="")
        last = self._commits.newest
        return dataclasses.replace(
            status(
                self.rank,
                lineage=state.lineage,
                epoch=state.epoch,
                state=self.standing,
                tokens=state.tokens,
            ),
            incarnation=self.incarnation,
            led_by=-1 if last is None else last.group.leader,
        )

    def status_message(self) -> Announcement:
        return self.announcement()

    def connected(self, other: int, status: Announcement) -> None:
        self.others[other] = status
        self._view_changed()

    def disconnected(self, other: int) -> None:
        self._unanswered.pop(other, None)
        if self.others.pop(other, None) is not None:
            self._view_changed()

    def received(self, sender: int, message: RoundMessage | Announcement) -> None:
        if self._unanswered.pop(sender, 0) >= QUIET_BEATS:
            self._view_changed()
        if isinstance(message, Announcement):
            before = self.others.get(sender)
            self.others[sender] = message
            if before is None or _essence(before) != _essence(message):
                self._view_changed()
        elif self._num_unread[sender] < MAX_UNREAD:
            self._num_unread[sender] += 1
            self._post(lambda now: self._read(sender, message, now))

    def _read(self, sender: int, message: RoundMessage, now: float) -> list[Action]:
        self._num_unread[sender] -= 1
        return self._route(sender, message, now)

    def _show(self, standing: str) -> None:
        self.standing = standing
        self._publish()

    def _publish(self) -> None:
        for other in self.network.ends:
            if other != self.rank:
                self.network.send(self.rank, other, self.announcement())
        self._view_changed()

    def _beat(self) -> None:
        if not self.is_frozen:
            for other in self.network.ends:
                if other != self.rank:
                    self.network.send(self.rank, other, self.announcement())
            self._unanswered.update(self.others.keys())
            if QUIET_BEATS in self._unanswered.values():
                self._view_changed()
        self._later((HEARTBEAT_S, HEARTBEAT_S), self._beat)

    # As peers/averaging.py has it

    def _fresh_view(self) -> dict[int, Announcement]:
        return {**self.others, self.rank: self.announcement()}

    def _view(self) -> membership.View:
        view, last = self._fresh_view(), self._commits.newest
        return (
            view
            if last is None
            else membership.after_commit(view, last.group.ranks, last.lineage, view[self.rank])
        )

    def _credible_view(self) -> membership.View:
        return self._credit.credible(self._view(), self.state.lineage, self.network.now)

    def _view_changed(self) -> None:
        self._post(
            lambda now: self.round.on_view(self._credible_view(), now, self._quiet()) if self.round else []
        )

    def _quiet(self) -> frozenset[int]:
        return frozenset(rank for rank, missed in self._unanswered.items() if missed >= QUIET_BEATS)

    def _propose(self) -> None:
        self._post(
            lambda now: self.round.on_ready(self.piece.proposal, now) if self.round and self.piece else []
        )

    def reduced(self, attempt: str, vote: Vote) -> None:
        assert self.piece is not None
        self.piece.reduced = attempt
        round_ = self.round
        self._post(lambda now: round_.on_reduced(attempt, vote, now))

    def reduction_failed(self, attempt: str, suspects: tuple[int, ...]) -> None:
        round_ = self.round
        self._post(lambda now: round_.on_reduce_failed(attempt, suspects, now))

    def _route(self, sender: int, message: RoundMessage, now: float) -> list[Action]:
        if self.round is None:
            return []
        if message.lineage == self.round.lineage:
            return self.round.on_message(sender, message, now)
        if (commit := self._commits.on(message.lineage)) is not None:
            return [Send(sender, commit)] if isinstance(message, (Join, Ask)) else []
        if isinstance(message, Join):
            self._early.append((sender, message))
        return []

    def _open_round(self) -> None:
        self.round = Round(
            me=self.rank,
            incarnation=self.incarnation,
            fragment=0,
            epoch=self.state.epoch,
            lineage=self.state.lineage,
            parent=self.state.parent,
            timing=TIMING,
            view=self._credible_view(),
            quiet=self._quiet(),
            first_step=_step_of(self.state.epoch) - 1,
            aggregation=Aggregation(audit=self.swarm.audit),
            num_left_out=self._num_left_out,
        )
        for _ in range(len(self._early)):
            self.received(*self._early.popleft())
        self._publish()

    def _post(self, event: Callable[[float], list[Action]]) -> None:
        self._events.append(event)
        self._drain()

    def _drain(self) -> None:
        while self._events and not self._is_busy and not self.is_frozen and self.is_running:
            # One after the other, whatever they lead to.
            self._is_busy = True
            event, now = self._events.popleft(), self.network.now
            actions = event(now)
            if self.round and now >= self.round.deadline:
                actions = actions + self.round.on_tick(now)
            self._is_busy = False
            self._perform(actions)
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        now = self.network.now
        due = now + min(max(self.round.deadline - now, 0.02), 1.0) if self.round else now + 1.0
        if self._tick_at <= now or due < self._tick_at:
            self._tick_at = due
            self.network.after(due - now, lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if self._tick_at == due and self.is_running and self.round:
            round_ = self.round
            self._post(lambda now: round_.on_tick(now) if self.round is round_ else [])

    def _perform(self, actions: list[Action]) -> None:
        self._is_busy = True
        for action in actions:
            if not self.is_running:
                return
            match action:
                case Send(to, message):
                    if to in self.others:
                        self.network.send(self.rank, to, message)
                case Reduce(group):
                    self._stop_reducing()
                    self.reducing = group.attempt
                    self.swarm.begin_part(self.rank, group)
                case Inspect(group, audit):
                    self._inspect(group, audit)
                case Cancel():
                    self._stop_reducing()
                case Apply(commit):
                    self._apply(commit)
                case CatchUp():
                    self._stop_reducing()
                    self._catch_up(action)
                    return
        self._is_busy = False

    def _inspect(self, group: Group, audit: Audit) -> None:
        round_, accusing = self.round, self.swarm.accusing

        def done() -> None:
            away = tuple(r for r in group.ranks if r != self.rank and not self.network.can_talk(self.rank, r))
            false = audit.owners if self.rank in accusing else ()
            if false:
                # Whoever leaves the others for a lie goes its own way for a while.
                accusing.discard(self.rank)
                for other in self.swarm.daemons.keys() - {self.rank}:
                    self.network.troubled_at[frozenset((self.rank, other))] = self.network.now
            if away or false:
                self._post(lambda now: round_.on_audit_failed(group.attempt, away, false, now))
            else:
                self._post(lambda now: round_.on_audited(group.attempt, now))

        self._later((0.05, 0.5), done)

    def _stop_reducing(self) -> None:
        self.swarm.fail_part(self.rank, self.reducing, (), "cancelled")

    def _apply(self, commit: Commit) -> None:
        piece, swarm, group = self.piece, self.swarm, commit.group
        if piece is None or piece.reduced != group.attempt:
            swarm.wrong.append(
                f"peer {self.rank} applies {group.attempt} and holds {piece and piece.reduced}"
            )
            return
        if self.round is None or self.round.is_led_by_first:
            self._num_left_out = 0
        work = (*self.state.work, *map(_name_of, group.members))
        state = SimulatedState(
            self.state.epoch + 1,
            _digest(self.state.lineage, commit.anchor),
            self.state.tokens + group.tokens,
            work,
            self.state.lineage,
        )
        if swarm.states.setdefault(state.lineage, state) != state:
            swarm.wrong.append(f"peer {self.rank} has other bits of lineage {state.lineage}")
        swarm.commits.append(Committed(self.rank, self.incarnation, commit, self.network.now))
        self._take(state)
        self._commits.add(commit)
        self._answer()
        self._open_round()

    def _take(self, state: SimulatedState) -> None:
        self.state = state

    def _answer(self) -> None:
        """The worker trains on, once it has been told."""
        self.piece = None
        self._later((0.0, 0.05), lambda: self._show("training"))
        self._train()

    def _catch_up(self, action: CatchUp) -> None:
        """Busy until it is done: other events wait."""
        view = self._credible_view()
        target = membership.ahead_of(view, self.rank) or view.get(action.rank)
        if target is None or (target.lineage == self.state.lineage and not action.resync):
            self._caught_up(action, None)
            return
        donors, asked_at = membership.donors_of(view, target.lineage, self.rank), self.network.now
        peer_id = target.peer_id

        def downloaded(state: SimulatedState | None) -> None:
            if state is not None:
                self._credit.delivered(donors)
                self._caught_up(action, state)
                return
            self._credit.failed({*donors, peer_id}, asked_at, self.network.now)
            if membership.ahead_of(self._credible_view(), self.rank) is None:
                self._caught_up(action, None)
            else:
                self._later((0.5, 0.5), lambda: self._catch_up(action))

        self._download(donors, target.lineage, downloaded)

    def _caught_up(self, action: CatchUp, new: SimulatedState | None) -> None:
        old, self._is_busy = self.state, False
        if new is None:
            self._open_round()
            self._propose()
        else:
            self._check_catch_up(action, old, new)
            if self.piece is not None:
                self._num_left_out = 0 if action.contributed else self._num_left_out + 1
            self._take(new)
            self._commits.clear()
            if self.piece is not None and action.contributed:
                self._answer()
            self._open_round()
            if self.piece is not None:
                self._propose()
        self._drain()

    def _check_catch_up(self, action: CatchUp, old: SimulatedState, new: SimulatedState) -> None:
        if self.piece is not None and action.contributed and self.piece.name not in new.work:
            self.swarm.wrong.append(f"peer {self.rank} is told that its work is in {new.lineage}: it is lost")
        # Once it has left the lineage that it has voted on, nobody tells it any more how that went on.
        comes_again = not action.contributed and self.piece is not None
        if comes_again and self.piece.name in self.swarm.next_of(old, new):
            knowing = [o for o in self.swarm.living.values() if self._could_tell(o, old.lineage, new.lineage)]
            if knowing:
                self.swarm.wrong.append(f"peer {self.rank} brings work again that is in {new.lineage}")
        if new.tokens < old.tokens:
            self.swarm.wrong.append(f"peer {self.rank} goes back from {old.tokens} to {new.tokens} tokens")

    def _could_tell(self, other: SimulatedDaemon, lineage: str, ahead: str) -> bool:
        """Whether that one has been where it could be asked, for long enough, and knows how the lineage went on."""
        pair = frozenset((self.rank, other.rank))
        return (
            other.rank in self.others
            and other.state.lineage == ahead
            and other._commits.on(lineage) is not None
            and self.network.now - self.network.troubled_at.get(pair, 0.0) > 2 * TIMING.doubt_s
            and not other.is_frozen
        )

    def _download(
        self, donors: list[str], lineage: str, then: Callable[[SimulatedState | None], None]
    ) -> None:
        ranks = [int(peer_id.removeprefix("peer")) for peer_id in donors]
        asked = [
            self.swarm.daemons[rank]
            for rank in ranks
            if self.network.can_talk(self.rank, rank) and self.swarm.daemons[rank].state.lineage == lineage
        ]
        state = asked[0].state if asked else None

        def done() -> None:
            came = any(donor.is_answering and self.network.can_talk(self.rank, donor.rank) for donor in asked)
            then(state if came else None)

        self._later(DOWNLOAD_S, done)

    def _later(self, bounds: tuple[float, float], event: Callable[[], None]) -> None:
        """While this life lasts; what falls into a freeze happens after it."""

        def happen() -> None:
            if self.is_frozen:
                self.network.after(0.1, happen)
            elif self.is_running:
                event()

        self.network.after(self.network.between(bounds), happen)


def _essence(announcement: Announcement) -> tuple[object, ...]:
    """What the mesh takes for a change."""
    a = announcement
    return (a.world_rank, a.incarnation, a.state, a.epoch, a.lineage, a.manifest_digest)


def _digest(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _step_of(epoch: int) -> int:
    """That this epoch begins with: far above all that the one before can have."""
    return (epoch + 1) * _MAX_PIECES * _MAX_PIECES


def _name_of(member: Proposal) -> str:
    return f"{member.rank}.{member.step}"
