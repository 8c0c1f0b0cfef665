"""All peers of a simulated run, what they share, and how they are lost and come back."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from diloco.errors import DilocoError
from diloco.sim.clock import Clock
from diloco.simulation.board import Board
from diloco.simulation.daemon import Daemon
from diloco.simulation.downloads import Downloads
from diloco.simulation.figures import EpochOfPeer, Figures, Losses, figures_of
from diloco.simulation.letters import Letters
from diloco.simulation.links import Resource
from diloco.simulation.reduction import Reduction, Streams
from diloco.simulation.scenario import Scenario
from diloco.simulation.state import Names, State
from diloco.simulation.traffic import Traffic
from peers import membership
from peers.live_peer import QUIET_BEATS, heartbeat_s, silence_s
from peers.pace import entry_with_work, progress_of_others
from peers.round.messages import Group

_RETRY_S = 0.5
_LONGEST_EPOCH = 100.0
"""Times what it takes to train: a run that is slower than that has come to a stop."""

Progress = Callable[[int, float], object]
"""Hears of each epoch that has been committed, and when."""


class SimulatedSwarm:
    """Runs once."""

    def __init__(self, scenario: Scenario, progress: Progress = lambda epoch, at: None) -> None:
        self.scenario, self._progress = scenario, progress
        self.clock = Clock()
        links = {rank: peer.link for rank, peer in enumerate(scenario.peers)}
        capacity: dict[Resource, float] = {}
        for rank, peer in enumerate(scenario.peers):
            capacity[rank, "up"] = peer.link.up_bytes_per_s
            capacity[rank, "down"] = peer.link.down_bytes_per_s
            capacity[rank, "processors"] = peer.machine.reduce
        self.traffic = Traffic(self.clock, capacity)
        hops = {rank: peer.machine.hop_s for rank, peer in enumerate(scenario.peers)}
        self.downloads = Downloads(self.clock, self.traffic, scenario)
        self.letters = Letters(self.clock, links, hops)
        delays = sorted(link.delay_s for link in links.values())
        self.board = Board(
            self.clock,
            delay_s=2 * delays[len(delays) // 2],
            num_peers=len(links),
            tell=self._tell,
        )
        self.newest = State()
        """The state that all should hold."""
        self.records: list[EpochOfPeer] = []
        self.losses = Losses()
        self.names = Names()
        self._last_epoch, self._is_over = 1 + scenario.num_epochs, False
        self._last_members: tuple[int, ...] = ()
        self._parents: dict[str, str] = {}
        self._daemons: dict[int, Daemon] = {}
        self._streams = Streams()
        self._reductions: dict[str, Reduction] = {}
        self._num_attempts = 0
        self._share_digests: tuple[str, ...] = ()

    def run(self) -> Figures:
        """Raises DilocoError where no epoch ends any more."""
        scenario = self.scenario
        for rank in range(len(scenario.peers)):
            daemon = self._daemons[rank] = Daemon(self, rank, 1)
            # All of them stand on the board before any round looks at it.
            daemon.state = State()
            daemon.post_standing("training")
            self._plan_loss(daemon)
        for daemon in list(self._daemons.values()):
            daemon.begin(State(), 0)
        trained_s = max(peer.step_s for peer in scenario.peers)
        most_s = _LONGEST_EPOCH * (1.0 + trained_s * scenario.schedule.steps_per_epoch + self._slowest_s)
        if not self.clock.run(lambda: self._is_over, until=most_s * self._last_epoch):
            raise DilocoError(
                f"the simulated run stops at epoch {self.newest.epoch}: its rounds fail one after the other. "
                "Peers are lost faster than they finish a round: raise --mtbf, or --bandwidth, or use a smaller --codec"
            )
        return self._figures()

    def look_for_the_end(self) -> None:
        """It is over when all members of the last commit train on it, those that are lost meanwhile aside."""
        last = self._last_epoch
        self._is_over = self.newest.epoch >= last and all(
            self._daemons[rank].worker.epoch >= last
            for rank in self._last_members
            if self._daemons[rank].is_running and self._daemons[rank].state is not None
        )

    @property
    def _slowest_s(self) -> float:
        """The whole model over the slowest link."""
        slowest = min(min(p.link.up_bytes_per_s, p.link.down_bytes_per_s) for p in self.scenario.peers)
        return 8 * self.scenario.num_params / slowest

    @property
    def _living(self) -> list[Daemon]:
        return [daemon for daemon in self._daemons.values() if daemon.is_running]

    # What peers share

    def chance_of(self, rank: int, incarnation: int) -> random.Random:
        """A source of its own for each life, so that one peer's fate changes nothing of another's luck."""
        return random.Random(f"{self.scenario.seed} {rank} {incarnation}")

    def share_digests(self, count: int) -> tuple[str, ...]:
        """Of as many shares, as long as the product's; all members hold the same."""
        if len(self._share_digests) != count:
            self._share_digests = ("0" * 32,) * count
        return self._share_digests

    def reduction(self, group: Group) -> Reduction:
        """That of this attempt."""
        if (reduction := self._reductions.get(group.attempt)) is None:
            peers = self.scenario.peers
            reduction = Reduction(
                group=group,
                numel=self.scenario.fragment_sizes[group.fragment],
                codec=self.scenario.codec,
                clock=self.clock,
                traffic=self.traffic,
                delay_s={rank: peers[rank].link.delay_s for rank in group.ranks},
                machines={rank: peers[rank].machine for rank in group.ranks},
                window_bytes=self.scenario.window_bytes,
                streams=self._streams,
            )
            # Of earlier attempts nobody speaks any more.
            self._reductions = {
                name: old for name, old in self._reductions.items() if old.group.epoch >= group.epoch
            }
            self._reductions[group.attempt] = reduction
            self._num_attempts += 1
        return reduction

    def committed(self, state: State, group: Group, record: EpochOfPeer) -> None:
        """A peer has made a commit, which led to this state."""
        self.records.append(record)
        self._parents[state.lineage] = state.parent
        # As peers/membership.py has it: of two sides of a fork that with more tokens wins.
        if (state.tokens, state.epoch) > (self.newest.tokens, self.newest.epoch):
            if self.newest.epoch < self._last_epoch:
                self._last_members = group.ranks
            self.downloads.committed(state.parent, state.lineage, record.at - record.parts.round_s)
            self.newest = state
            self._progress(state.epoch, self.clock.now)

    def _tell(self, causes: frozenset[str]) -> None:
        for daemon in list(self._living):
            daemon.rounds.view_changed(causes)

    # Losses and returns

    def _plan_loss(self, daemon: Daemon) -> None:
        if self.scenario.mtbf_s < float("inf"):
            chance = random.Random(f"{self.scenario.seed} loss {daemon.rank} {daemon.incarnation}")
            self.clock.after(chance.expovariate(1 / self.scenario.mtbf_s), lambda: self.lose(daemon.rank))

    def lose(self, rank: int) -> None:
        """The peer's machine is gone; it comes back after the scenario's time."""
        daemon = self._daemons[rank]
        if not daemon.is_running:
            return
        daemon.stop()
        self._streams.lose(rank)
        self.downloads.stop(rank)
        self.losses.peers_lost += 1
        self.losses.lost_train_s += daemon.worker.uncommitted_s
        announcement = self.board.announcements.get(rank)

        def unless_back(notice: Callable[[int], object]) -> Callable[[], object]:
            return lambda: notice(rank) if self.board.announcements.get(rank) is announcement else None

        num_peers = len(self.board.announcements)
        self.clock.after(QUIET_BEATS * heartbeat_s(num_peers), unless_back(self.board.fall_quiet))
        self.clock.after(silence_s(num_peers), unless_back(self.board.remove))
        self.clock.after(self.scenario.restart_s, lambda: self._return(rank))

    def _return(self, rank: int) -> None:
        daemon = self._daemons[rank] = Daemon(self, rank, self._daemons[rank].incarnation + 1)
        self.board.remove(rank)
        self.losses.returns += 1
        self._plan_loss(daemon)
        self._join(daemon, None, self.clock.now)

    def _join(self, daemon: Daemon, have: State | None, since: float) -> None:
        """Fetch the newest state, or what has come since the one that it has; once it has that, train."""
        newest = self.newest
        if have is not None and have.lineage == newest.lineage:
            self.losses.join_s.append(self.clock.now - since)
            daemon.begin(newest, self.progress_of_others(daemon))
        else:
            self.fetch(
                daemon,
                have,
                newest,
                lambda has_come: self._join(daemon, newest if has_come else have, since),
            )

    def fetch(
        self, daemon: Daemon, have: State | None, wanted: State, then: Callable[[bool], object]
    ) -> None:
        """Download that state from those who hold it; `then` hears whether there was anybody who did."""

        def end(has_come: bool) -> None:
            if daemon.is_running:
                then(has_come)

        holders = {o.rank: o.state for o in self._living if o is not daemon and o.state is not None}
        donors = [rank for rank, state in holders.items() if state.lineage == wanted.lineage]
        if donors:
            num_bytes = self.downloads.size_of_way(have, wanted)
            self.downloads.begin(daemon.rank, donors, num_bytes, lambda: end(True))
        else:
            # Where nobody is there at all, there still is a checkpoint.
            self.clock.after(_RETRY_S, lambda: end(not holders))

    def progress_of_others(self, daemon: Daemon) -> int:
        """The local step that a peer enters the running epoch at."""
        return progress_of_others(
            self._view(), self.newest.lineage, daemon.rank, self.scenario.schedule.steps_per_epoch
        )

    def entry_with_work(self, daemon: Daemon) -> int | None:
        """Likewise, of one that brings work of an earlier epoch; None: that waits for the round."""
        schedule, state = self.scenario.schedule, daemon.state
        if schedule.overlap_steps or state is None:
            return None
        return entry_with_work(
            self._view(), state.lineage, daemon.rank, schedule.steps_per_epoch, {}, has_time_budget=False
        )

    def _view(self) -> membership.View:
        """With everybody where its worker is now."""
        return {
            rank: dataclasses.replace(
                announcement,
                local_step=self._daemons[rank].worker.local_step,
                step_s=self.scenario.peers[rank].step_s,
            )
            for rank, announcement in self.board.announcements.items()
        }

    def _kept_records(self) -> list[EpochOfPeer]:
        """Of the commits that led to where the swarm stands: what the losing side of a fork has done is gone."""
        kept, lineage = set(), self.newest.lineage
        while lineage in self._parents:
            kept.add(lineage)
            lineage = self._parents[lineage]
        return [record for record in self.records if record.lineage in kept]

    def _figures(self) -> Figures:
        peers = self.scenario.peers
        self.losses.downloaded_bytes = self.downloads.num_bytes
        self.losses.failed_attempts = self._num_attempts - len({record.attempt for record in self.records})
        return figures_of(
            self._kept_records(),
            self.losses,
            num_peers=len(peers),
            tokens_per_step=self.scenario.tokens_per_step,
            price_per_hour=sum(peer.price_per_hour for peer in peers),
        )


def simulate(scenario: Scenario, progress: Progress = lambda epoch, at: None) -> Figures:
    """Run it. Raises DilocoError where its rounds never end."""
    return SimulatedSwarm(scenario, progress).run()
