"""What `diloco peers` prints of a ban list."""

from __future__ import annotations

import pytest

from diloco.cli.peers import _print_banned, _print_outcome
from peers.admission.bans import ChangedBans
from peers.protocol.tokens import BanList


def changed(*peer_ids: str) -> ChangedBans:
    return ChangedBans(BanList(run_id="run", peer_ids=frozenset(peer_ids)), 2, 3, frozenset())


@pytest.mark.parametrize(("peer_ids", "printed"), [((), ""), (("b", "a"), "a\nb\n")])
def test_each_line_of_the_list_is_a_banned_peer(capsys, peer_ids, printed):
    _print_banned(changed(*peer_ids))
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("peer_ids", "count"),
    [((), "0 peers are banned"), (("a",), "1 peer is banned"), (("a", "b"), "2 peers are banned")],
)
def test_banned_peers_are_counted(capsys, peer_ids, count):
    _print_outcome(changed(*peer_ids), "banned")
    assert f"no change\n{count}; the list has reached 2 of 3 members" in capsys.readouterr().out
