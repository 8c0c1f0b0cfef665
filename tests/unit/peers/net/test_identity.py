from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from peers.errors import UserError
from peers.net import identity
from peers.net.identity import claim_slot, is_one_more, load
from peers.protocol import libp2p_keys
from peers.protocol.certificates import Signature, verify_signature

# Test vectors of https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
SPEC_ED25519_PRIVATE_KEY = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_ED25519_PUBLIC_KEY = bytes.fromhex(
    "080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)


def test_a_key_of_the_libp2p_specification_is_read_and_its_public_half_matches(tmp_path):
    path = tmp_path / "spec.key"
    path.write_bytes(SPEC_ED25519_PRIVATE_KEY)
    peer = load(path)
    assert peer.public_key == SPEC_ED25519_PUBLIC_KEY
    # An Ed25519 id is the key itself after the header that base58 shows as 12D3KooW.
    assert libp2p_keys.base58_decode(peer.peer_id) == b"\x00\x24" + SPEC_ED25519_PUBLIC_KEY
    assert peer.peer_id.startswith("12D3KooW")


def test_rsa_keys_sign_and_verify_too(tmp_path):
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    der = key.private_bytes(Encoding.DER, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    path = tmp_path / "rsa.key"
    path.write_bytes(b"\x08\x00\x12" + bytes([len(der) & 0x7F | 0x80, len(der) >> 7]) + der)
    peer = load(path)
    assert peer.peer_id.startswith("Qm")
    signature = peer.sign(b"payload")
    assert verify_signature(peer.peer_id, b"payload", signature)
    assert not verify_signature(peer.peer_id, b"another", signature)


def test_a_signature_holds_for_its_payload_and_its_peer_only(tmp_path):
    one, other = claim_slot(tmp_path, "run", 0), claim_slot(tmp_path, "run", 1)
    signature = one.sign(b"payload")
    assert verify_signature(one.peer_id, b"payload", signature)
    assert not verify_signature(one.peer_id, b"payload!", signature)
    assert not verify_signature(other.peer_id, b"payload", signature)
    with_another_key = replace(signature, public_key=other.public_key)
    assert not verify_signature(other.peer_id, b"payload", with_another_key)


@given(st.binary(max_size=100), st.binary(max_size=100), st.binary(max_size=100), st.booleans())
def test_verify_refuses_garbage_without_an_error(public_key, payload, signature, names_its_id):
    peer_id = libp2p_keys.peer_id_of(public_key) if names_its_id else "12D3KooW"
    claimed = Signature(public_key=public_key, signature=signature)
    assert verify_signature(peer_id, payload, claimed) is False


@pytest.mark.parametrize(
    "other_form", [lambda key: b"\x09" + key[1:], lambda key: key[:3] + b"\xa0\x00" + key[4:]]
)
def test_one_key_has_one_peer_id_and_in_any_other_form_it_signs_for_nobody(tmp_path, other_form):
    peer = claim_slot(tmp_path, "run", 0)
    signature = peer.sign(b"payload")
    claimed = replace(signature, public_key=other_form(peer.public_key))
    assert not verify_signature(libp2p_keys.peer_id_of(claimed.public_key), b"payload", claimed)


@given(st.binary(max_size=60))
def test_base58_gives_back_the_bytes(data):
    assert libp2p_keys.base58_decode(libp2p_keys.base58_encode(data)) == data


def test_the_same_command_is_the_same_peer_again(tmp_path):
    first = claim_slot(tmp_path, "run", None)
    first.release()
    again = claim_slot(tmp_path, "run", None)
    assert again.peer_id == first.peer_id
    assert again.path == tmp_path / "run" / "0.key"
    assert stat.S_IMODE(again.path.stat().st_mode) == 0o600


def test_two_peers_on_one_machine_take_different_slots(tmp_path):
    one, two = claim_slot(tmp_path, "run", None), claim_slot(tmp_path, "run", None)
    assert [one.path.name, two.path.name] == ["0.key", "1.key"]
    assert one.peer_id != two.peer_id
    assert [is_one_more(one), is_one_more(two)] == [False, True]


def test_a_rank_that_runs_here_already_is_refused(tmp_path):
    held = claim_slot(tmp_path, "run", 3)
    with pytest.raises(UserError, match="world rank 3 of run run already runs on this machine"):
        claim_slot(tmp_path, "run", 3)
    held.release()
    assert claim_slot(tmp_path, "run", 3).peer_id == held.peer_id


def test_a_slot_of_a_killed_process_is_free_at_once(tmp_path):
    code = (
        "import sys, time, pathlib; from peers.net.identity import claim_slot\n"
        "print(claim_slot(pathlib.Path(sys.argv[1]), 'run', 0).peer_id, flush=True); time.sleep(60)"
    )
    root = Path(identity.__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            peer_id = process.stdout.readline().strip()
            with pytest.raises(UserError, match="already runs"):
                claim_slot(tmp_path, "run", 0)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert claim_slot(tmp_path, "run", 0).peer_id == peer_id


def test_a_file_system_without_locks_is_named_in_the_error(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match=r"cannot lock the identity .*/run/0\.key: No locks available"):
        claim_slot(tmp_path, "run", None)


@pytest.mark.parametrize("run_id", ["", "..", ".hidden", "a/b", "a b", "x" * 65, "run\n"])
def test_a_run_id_that_is_no_safe_file_name_is_refused(tmp_path, run_id):
    with pytest.raises(UserError, match="cannot name a run"):
        claim_slot(tmp_path, run_id, 0)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\x08\x01\x12\x40", b"-----BEGIN PRIVATE KEY-----", b"\0" * 9000]
)
def test_a_file_that_is_no_key_is_named_in_the_error(tmp_path, content):
    path = tmp_path / "bad.key"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.key is not a libp2p private key"):
        load(path)
