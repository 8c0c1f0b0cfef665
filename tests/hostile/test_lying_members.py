"""One liar among three honest members, all real daemons: these go on, agree on every bit, and let newcomers in.

The liars are those of the random schedules (`diloco/sim/liars.py`, `forgers.py`). What the honest peers have committed
shows that a lie had no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from diloco.sim.forgers import FORGERS
from diloco.sim.schedules import ALL_LIARS
from peers.core.plans import is_quorum
from peers.protocol.certificates import Certificate, verify_signature
from peers.protocol.limits import MAX_TOKENS
from tests.support.exhaustive import exhaustive_but
from tests.support.preparations import LIES, SERVES, commits_in, lie, record_commits
from tests.support.real_liars import NUMEL, SHOWS, made_up_state
from tests.support.swarm import LightSwarm, check_well, wait_until

LIAR, HONEST, NEWCOMER = 1, (0, 2, 3), 4
EPOCHS, WITHIN_S = 8, 180.0
ALWAYS_RUN = ("forges a commit", "claims tokens")
SPOILS_EVERY_ROUND = ("does not reduce", "declines", "accuses")
FORGES = [name for name in FORGERS if name.startswith("forges")]
MOST = 2 / 3
"""The largest weight of one of three members or more, if no tokens count for more than twice their median."""


@pytest.mark.parametrize("name", exhaustive_but(ALWAYS_RUN, ALL_LIARS))
def test_honest_members_go_on_beside_one_that(name, swarm):
    light = swarm(step_s=0.02, max_steps=10**9, numel=NUMEL)
    light.preparations[LIAR] = partial(lie, name)
    for rank in (*HONEST, NEWCOMER):
        light.preparations[rank] = partial(record_commits, light.directory / f"commits{rank}")
    light.start_all(4)
    wait_until(lambda: light.least_epoch(HONEST) >= 1, "the first epoch")
    before = light.least_epoch(HONEST)
    wait_until(lambda: light.least_epoch(HONEST) >= before + EPOCHS, f"{EPOCHS} more epochs", WITHIN_S)
    light.start(NEWCOMER)
    wait_until(lambda: light.peers[NEWCOMER].epochs, "an epoch of the newcomer", WITHIN_S)
    # The liar lies at random times.
    said = SHOWS if name in FORGES else LIES
    wait_until(lambda: said in light.peers[LIAR].log, "the lie", WITHIN_S)
    lied_by = light.least_epoch(HONEST)
    wait_until(lambda: light.least_epoch(HONEST) >= lied_by + 2, "two more epochs", WITHIN_S)
    honest = [light.peers[rank] for rank in (*HONEST, NEWCOMER)]
    check_well(honest)
    digests: dict[int, set[str]] = {}
    for peer in honest:
        for record in peer.epochs:
            digests.setdefault(record["epoch"], set()).add(record["anchor_digest"])
    assert all(len(found) == 1 for found in digests.values()), digests
    # No honest peer was led back to an earlier epoch.
    epochs = [[record["epoch"] for record in peer.epochs] for peer in honest]
    assert all(of_one == sorted(of_one) for of_one in epochs), epochs
    check_effects(name, light, digests)


def check_effects(name: str, light: LightSwarm, digests: dict[int, set[str]]) -> None:
    """Assert that no commit breaks the rules, and that none has what this liar tried to bring into it."""
    commits = commits_of(light, (*HONEST, NEWCOMER))
    check_commits(light, commits)
    liar = light.peer_id(LIAR)
    of_liar = [c for commit in commits.values() for c in commit.plan.contributors if c.peer_id == liar]
    if name in SPOILS_EVERY_ROUND:
        assert not of_liar
    if name == "claims tokens":
        # Its claim is in the commits, and does not count.
        assert of_liar and all(contributor.work.tokens == MAX_TOKENS for contributor in of_liar)
    if name in FORGES:
        assert SERVES not in light.peers[LIAR].log
        assert {made_up_state().anchor_digest} not in digests.values()


def commits_of(light: LightSwarm, ranks: Iterable[int]) -> dict[str, Certificate]:
    """By head, the certificates that these peers have followed."""
    found = [commit for rank in ranks for commit in commits_in(light.directory / f"commits{rank}")]
    return {commit.head: commit for commit in found if not commit.is_genesis}


def check_commits(light: LightSwarm, commits: dict[str, Certificate]) -> None:
    everybody = {light.peer_id(rank) for rank in (*HONEST, LIAR, NEWCOMER)}
    honest = {light.peer_id(rank) for rank in HONEST}
    epochs = set[int]()
    for commit in commits.values():
        plan = commit.plan
        assert plan.epoch not in epochs
        epochs.add(plan.epoch)
        assert commit.is_signed(verify_signature)
        assert honest <= plan.roster_set <= everybody
        assert max(contributor.weight for contributor in plan.contributors) <= MOST
        if (parent := commits.get(plan.parent)) is not None:
            assert is_quorum(plan.signers, parent, 0.5)
