"""Enough real daemons on loopback for a grid."""

from __future__ import annotations

import re

import pytest

from peers.reduce.shares import GRID_FROM
from tests.support.swarm import wait_until


@pytest.mark.exhaustive
def test_a_member_of_a_grid_killed_while_its_bytes_are_on_the_wire_costs_the_others_no_epoch(swarm):
    light = swarm(numel=8_000_000, local_steps=2, max_steps=100000, step_s=0.2)
    light.start_all(GRID_FROM)
    victim, *survivors = light.peers.values()
    everybody = list(range(GRID_FROM))
    wait_until(
        lambda: survivors[0].epochs and survivors[0].epochs[-1]["contributors"] == everybody, "all in one"
    )
    neighbours = re.findall(r"exchanging with (\d+) of (\d+) others", survivors[0].log)[-1]
    assert neighbours == ("6", str(GRID_FROM - 1))
    attempts = victim.log.count("reducing with")
    wait_until(lambda: victim.log.count("reducing with") > attempts, "the next reduction")
    victim.kill()
    before = survivors[0].epoch
    wait_until(lambda: all(peer.epoch > before + 1 for peer in survivors), "two more epochs of the survivors")
    light.check_none_is_missed()
