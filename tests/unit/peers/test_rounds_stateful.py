"""Swarms of pure rounds under schedules that nobody would think of: deaths, freezes, cuts, losses, at any message.

The same schedules every time; more of them, and others, with `pytest --hypothesis-seed=N` on this file.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, core, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.simulated_network import Pair
from tests.support.simulated_swarm import SimulatedSwarm

SETTLES_WITHIN_S = 240.0
"""Two gathers that nobody leads, and the next one."""
_IS_SEARCH = core.global_force_seed is not None
_FATES = (
    "killed unsent",
    "killed",
    "receiver killed",
    "back at once",
    "frozen",
    "cut",
    "broken",
    "lost",
    "twice",
    "late",
)
ranks = st.integers(0, 4)
pairs = st.tuples(ranks, ranks).filter(lambda pair: pair[0] != pair[1])


class SwarmUnderFaults(RuleBasedStateMachine):
    @initialize(num_peers=st.integers(2, 5), seed=st.integers(0, 1 << 16), audit=st.sampled_from([0.0, 0.5]))
    def begin(self, num_peers: int, seed: int, audit: float) -> None:
        self.swarm = SimulatedSwarm(num_peers, seed, audit)
        self.network = self.swarm.network
        self.network.on_send = self._sent
        self.ambushes: list[tuple[str, str]] = []
        self.swarm.run(10.0)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0, 3.0, 10.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.swarm.run(seconds)

    @rule(rank=ranks)
    def a_peer_dies(self, rank: int) -> None:
        if rank in self.swarm.living and len(self.swarm.living) > 1:
            self.swarm.kill(rank)

    @rule(rank=ranks)
    def a_peer_comes_back(self, rank: int) -> None:
        if rank in self.swarm.daemons and rank not in self.swarm.living:
            self.swarm.start(rank)

    @rule(rank=ranks, seconds=st.sampled_from([0.5, 3.0, 6.0, 12.0]))
    def a_peer_freezes(self, rank: int, seconds: float) -> None:
        if rank in self.swarm.living and not self.swarm.daemons[rank].is_frozen:
            self.swarm.daemons[rank].freeze(seconds)

    @rule(pair=pairs)
    def a_link_is_cut(self, pair: tuple[int, int]) -> None:
        if self._exist(*pair):
            self.network.cut_link(frozenset(pair))

    @rule(side=st.sets(ranks, min_size=1, max_size=2))
    def the_swarm_is_parted(self, side: set[int]) -> None:
        for pair in self._all_pairs():
            if len(pair & side) == 1:
                self.network.cut_link(pair)

    @rule()
    def all_links_heal(self) -> None:
        for pair in list(self.network.cut):
            self.network.heal_link(pair)

    @rule(rank=ranks)
    def a_reduction_fails(self, rank: int) -> None:
        self.swarm.failing.add(rank)

    @rule(rank=ranks)
    def a_result_is_garbled(self, rank: int) -> None:
        self.swarm.garbling.add(rank)

    @rule(rank=ranks)
    def true_sums_are_called_false(self, rank: int) -> None:
        self.swarm.accusing.add(rank)

    @precondition(lambda self: len(self.ambushes) < 3)
    @rule(
        kind=st.sampled_from(["Join", "Group", "Vote", "Audit", "Commit", "Abort", "Ask"]),
        fate=st.sampled_from(_FATES),
    )
    def something_happens_at_the_next(self, kind: str, fate: str) -> None:
        self.ambushes.append((kind, fate))

    @invariant()
    def nothing_is_wrong(self) -> None:
        if hasattr(self, "swarm"):
            assert self.swarm.wrong == []
            self._check_forks()

    def teardown(self) -> None:
        if not hasattr(self, "swarm"):
            return
        self.ambushes.clear()
        self.swarm.failing.clear()
        self.swarm.garbling.clear()
        self.swarm.accusing.clear()
        # What has been set off already comes before the healing.
        self.swarm.run(0.01)
        self.all_links_heal()
        began_at = self.network.now
        epochs = {rank: max(d.state.epoch for d in self.swarm.living.values()) for rank in self.swarm.living}
        while not self.swarm.has_settled(epochs):
            self.swarm.run(1.0)
            assert self.network.now < began_at + SETTLES_WITHIN_S, self._standings()
        self.nothing_is_wrong()

    # How it is done

    def _sent(self, sender: int, to: int, message: Any) -> bool:
        kind = type(message).__name__
        fate = next((fate for wanted, fate in self.ambushes if wanted == kind), None)
        if fate is None:
            return True
        self.ambushes.remove((kind, fate))
        return self._befall(fate, sender, to)

    def _befall(self, fate: str, sender: int, to: int) -> bool:
        swarm, network, pair = self.swarm, self.network, frozenset((sender, to))
        is_last = len(swarm.living) == 1
        soon = 1e-6
        match fate:
            case "killed unsent" | "back at once" if not is_last:
                swarm.kill(sender)
                if fate == "back at once":
                    network.after(0.2, lambda: sender in swarm.living or swarm.start(sender))
                return False
            case "killed":
                network.after(
                    soon, lambda: len(swarm.living) > 1 and sender in swarm.living and swarm.kill(sender)
                )
            case "receiver killed":
                network.after(soon, lambda: len(swarm.living) > 1 and to in swarm.living and swarm.kill(to))
            case "frozen":
                swarm.daemons[sender].freeze(6.0)
            case "cut":
                network.after(soon, lambda: network.cut_link(pair))
            case "broken":
                network.break_channel(pair)
            case "lost":
                network.losing[sender, to] += 1
            case "twice":
                network.doubling[sender, to] += 1
            case "late":
                network.reordering[sender, to] += 2
        return True

    def _check_forks(self) -> None:
        """Whoever could talk all the time has committed the same."""
        last = {rank: [c for c in self.swarm.commits if c.rank == rank][-20:] for rank in self.swarm.living}
        for pair in self._all_pairs():
            one, other = sorted(pair)
            if not pair <= self.swarm.living.keys() or pair in self.network.cut:
                continue
            quiet_since = self.network.troubled_at.get(pair, 0.0) + 30.0
            by_lineage = {c.commit.lineage: c.commit for c in last[one] if c.at > quiet_since}
            for committed in last[other]:
                mine = by_lineage.get(committed.commit.lineage, committed.commit)
                assert committed.at <= quiet_since or mine == committed.commit, (
                    f"peers {one} and {other} have parted ways: {mine}, {committed.commit}"
                )

    def _exist(self, *wanted: int) -> bool:
        return all(rank in self.swarm.daemons for rank in wanted)

    def _all_pairs(self) -> list[Pair]:
        known = sorted(self.swarm.daemons)
        return [frozenset((one, other)) for one in known for other in known if one < other]

    def _standings(self) -> str:
        return "; ".join(
            f"peer {rank} {daemon.standing} at {daemon.state.epoch} of {daemon.state.lineage}, "
            f"{daemon.round and daemon.round.phase} waits for {daemon.round and daemon.round.standing}, "
            f"sees { {r: (o.state, o.lineage) for r, o in daemon.others.items()} }"
            for rank, daemon in self.swarm.living.items()
        )


SwarmUnderFaults.TestCase.settings = settings(
    max_examples=2000 if _IS_SEARCH else 40,
    stateful_step_count=25,
    deadline=None,
    derandomize=not _IS_SEARCH,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestSwarmUnderFaults = SwarmUnderFaults.TestCase
