from __future__ import annotations

import pytest

from peers.admission import bans
from peers.admission.bans import resolved
from peers.admission.issuer import Issuer
from peers.admission.secrets import AdmissionKey, AdmissionSettings, load_or_create_key
from peers.errors import UserError
from peers.net.gate import Gate
from peers.protocol.refusal import Refused
from peers.protocol.tokens import BanList
from tests.unit.peers.net.test_gate import new_peer_id

KEY = AdmissionKey.new()
PEERS = [new_peer_id() for _ in range(3)]


def gate() -> Gate:
    return Gate("run", KEY.secret.public_key)


def signed(version: int, *peer_ids: str) -> bytes:
    return BanList(run_id="run", version=version, peer_ids=frozenset(peer_ids)).encode(KEY.private_key)


def test_a_restart_forgets_nobody_who_is_banned(tmp_path):
    before, after, path = gate(), gate(), tmp_path / "run.bans"
    bans.keep(before, path)
    assert not path.exists()
    before.learn(signed(3, PEERS[0]))
    bans.keep(before, path)
    bans.load_into(after, path)
    assert after.bans == before.bans


@pytest.mark.parametrize("content", [b"", b"junk", b"x" * 100_000])
def test_a_file_that_is_no_ban_list_is_passed_over(tmp_path, content):
    path = tmp_path / "run.bans"
    path.write_bytes(content)
    after = gate()
    bans.load_into(after, path)
    assert after.bans.version == 0


def test_everybody_who_asked_hears_of_a_newer_list_and_of_no_older_one():
    door, heard = gate(), []
    door.on_bans.append(lambda: heard.append(door.bans.version))
    for version in (1, 3, 2, 3, 4):
        door.learn(signed(version, PEERS[0]))
    assert heard == [1, 3, 4]


def test_of_two_lists_that_were_made_apart_as_one_version_everybody_keeps_the_same():
    lists = signed(2, PEERS[0]), signed(2, PEERS[1])
    doors = gate(), gate()
    for door, heard in zip(doors, (lists, lists[::-1]), strict=True):
        for blob in heard:
            door.learn(blob)
    assert doors[0].bans == doors[1].bans


def test_a_peer_is_meant_by_its_id_or_by_an_ending_that_is_its_alone():
    assert resolved(PEERS[0], []) == PEERS[0]
    assert resolved(PEERS[1][-8:], PEERS) == PEERS[1]
    ending = PEERS[0][-8:]
    several = [PEERS[0], f"another{ending}"]
    none, many = "means no peer", "could mean several peers"
    cases = (
        (ending, PEERS[1:], none),
        (ending, several, many),
        (PEERS[0][-3:], PEERS, many),
        ("x" * 6, [], none),
    )
    for text, known, why in cases:
        with pytest.raises(UserError, match=f"'{text}' {why}; give the whole peer id"):
            resolved(text, known)


def test_an_allowlist_holds_as_it_is_now_and_lets_nobody_in_while_it_cannot_be_read(tmp_path):
    load_or_create_key(tmp_path / "key", tmp_path / "secret")
    allowlist = tmp_path / "allowed"
    allowlist.write_text(f"{PEERS[0]}\n")
    settings = AdmissionSettings(admission_key_file=str(tmp_path / "key"), allowlist_file=str(allowlist))
    issuer = Issuer("run", PEERS[2], settings, lambda: BanList(run_id="run"), lambda *_: None)
    assert issuer.issue(PEERS[0], 0.0)
    assert issuer.issue(PEERS[2], 0.0), "itself"
    with pytest.raises(Refused, match="allowlist"):
        issuer.issue(PEERS[1], 0.0)
    for change in (allowlist.unlink, lambda: allowlist.write_text("not a peer id\n")):
        change()
        with pytest.raises(UserError, match="allowlist"):
            issuer.issue(PEERS[0], 0.0)
    allowlist.write_text(f"# all of them\n{PEERS[1]} # one\n\n")
    assert issuer.issue(PEERS[1], 0.0)
    with pytest.raises(UserError, match="not a peer id"):
        (tmp_path / "wrong").write_text("peer one\n")
        Issuer(
            "run",
            PEERS[2],
            AdmissionSettings(
                admission_key_file=str(tmp_path / "key"), allowlist_file=str(tmp_path / "wrong")
            ),
            lambda: BanList(run_id="run"),
            lambda *_: None,
        )
