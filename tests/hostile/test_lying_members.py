"""One member that lies among three honest ones, real daemons all: they go on, agree on every bit, and let newcomers in.

The liars are those of the random schedules (`diloco/sim/liars.py`, `forgers.py`).
"""

from __future__ import annotations

import pytest

from diloco.sim.schedules import ALL_LIARS
from tests.support.exhaustive import exhaustive_but
from tests.support.lying_core import LIES
from tests.support.swarm import LightSwarm, check_well, wait_until

LIAR, HONEST, NEWCOMER = 1, (0, 2, 3), 4
EPOCHS, WITHIN_S = 8, 60.0


def least_epoch(light: LightSwarm) -> int:
    return min(light.peers[rank].epoch for rank in HONEST)


@pytest.mark.parametrize("name", exhaustive_but(("forges a commit",), ALL_LIARS))
def test_honest_members_go_on_beside_one_that(name, swarm):
    light = swarm(step_s=0.02, max_steps=10**9)
    light.liars[LIAR] = name
    light.start_all(4)
    wait_until(lambda: least_epoch(light) >= 1, "the first epoch")
    before = least_epoch(light)
    wait_until(lambda: least_epoch(light) >= before + EPOCHS, f"{EPOCHS} more epochs", WITHIN_S)
    light.start(NEWCOMER)
    wait_until(lambda: light.peers[NEWCOMER].epochs, "an epoch of the newcomer", WITHIN_S)
    # When a liar lies is up to its dice.
    wait_until(lambda: LIES in light.peers[LIAR].log, "the lie", WITHIN_S)
    lied_by = least_epoch(light)
    wait_until(lambda: least_epoch(light) >= lied_by + 2, "two more epochs", WITHIN_S)
    honest = [light.peers[rank] for rank in (*HONEST, NEWCOMER)]
    check_well(honest)
    digests: dict[int, set[str]] = {}
    for peer in honest:
        for record in peer.epochs:
            digests.setdefault(record["epoch"], set()).add(record["anchor_digest"])
    assert all(len(found) == 1 for found in digests.values()), digests
    # Nobody was led back, or away from the others.
    epochs = [[record["epoch"] for record in peer.epochs] for peer in honest]
    assert all(of_one == sorted(of_one) for of_one in epochs), epochs
