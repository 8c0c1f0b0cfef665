"""One liar among three honest members, all real daemons: these go on, agree on every bit, and let newcomers in.

The liars are those of the random schedules (`diloco/sim/liars.py`, `forgers.py`).
"""

from __future__ import annotations

from functools import partial

import pytest

from diloco.sim.schedules import ALL_LIARS
from tests.support.exhaustive import exhaustive_but
from tests.support.preparations import LIES, lie
from tests.support.swarm import check_well, wait_until

LIAR, HONEST, NEWCOMER = 1, (0, 2, 3), 4
EPOCHS, WITHIN_S = 8, 180.0


@pytest.mark.parametrize("name", exhaustive_but(("forges a commit",), ALL_LIARS))
def test_honest_members_go_on_beside_one_that(name, swarm):
    light = swarm(step_s=0.02, max_steps=10**9)
    light.preparations[LIAR] = partial(lie, name)
    light.start_all(4)
    wait_until(lambda: light.least_epoch(HONEST) >= 1, "the first epoch")
    before = light.least_epoch(HONEST)
    wait_until(lambda: light.least_epoch(HONEST) >= before + EPOCHS, f"{EPOCHS} more epochs", WITHIN_S)
    light.start(NEWCOMER)
    wait_until(lambda: light.peers[NEWCOMER].epochs, "an epoch of the newcomer", WITHIN_S)
    # The liar lies at random times.
    wait_until(lambda: LIES in light.peers[LIAR].log, "the lie", WITHIN_S)
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
