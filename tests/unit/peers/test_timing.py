"""All constants of time are defined in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import peers
from peers.timing import (
    ANNOUNCE_INTERVAL_S,
    EARLY_INTERVAL_S,
    RECORD_TTL_S,
    announce_interval_s,
    look_interval_s,
    rest_s,
)

ROOT = Path(peers.__file__).parent
NOT_WAITS = ("MAX_", "PER_S")
"""Parts of the names of rates and of limits on what others may send."""


def seconds_named_in(path: Path) -> list[str]:
    """The time constants whose seconds this file defines, rather than deriving them from another constant."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and not any(isinstance(n, ast.Name) for n in ast.walk(node.value)):
            targets = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            found += [
                name for name in targets if name.endswith("_S") and not any(w in name for w in NOT_WAITS)
            ]
    return found


def test_every_constant_of_time_follows_from_those_in_one_file():
    elsewhere = {path: seconds_named_in(path) for path in ROOT.rglob("*.py") if path.name != "timing.py"}
    assert {str(path): names for path, names in elsewhere.items() if names} == {}
    assert seconds_named_in(ROOT / "core" / "timing.py") == []
    assert len(seconds_named_in(ROOT / "timing.py")) <= 28


def test_few_peers_announce_news_at_once_and_many_in_turn():
    assert rest_s(2) == rest_s(8) == 0.0
    assert announce_interval_s(5, is_early=True) == EARLY_INTERVAL_S
    assert announce_interval_s(5, is_early=False) == ANNOUNCE_INTERVAL_S
    # However many peers there are, together they write to the DHT as often as sixteen do.
    assert 32 / rest_s(32) == 64 / rest_s(64) == 16 / rest_s(16)


def test_a_record_is_renewed_long_before_it_expires_however_many_there_are():
    for num_peers in (1, 50, 1000, 10**6):
        for is_early in (True, False):
            assert rest_s(num_peers) <= announce_interval_s(num_peers, is_early=is_early) <= RECORD_TTL_S / 4


def test_few_peers_look_whenever_they_announce():
    for is_early in (True, False):
        assert all(
            look_interval_s(count, is_early=is_early) == announce_interval_s(count, is_early=is_early)
            for count in (1, 2, 8)
        )


def test_a_dht_node_sends_as_many_records_however_many_peers_look_for_them():
    for num_peers in (50, 200, 1000):
        record_bytes, look_s = 1250, look_interval_s(num_peers, is_early=False)
        assert num_peers * num_peers * record_bytes / look_s < 50e3
        # In each half of a swarm that has fallen apart, one of its peers looks soon.
        half = num_peers // 2
        assert look_interval_s(half, is_early=False) / half < 30
