from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.admission.secrets import (
    SECRET_ENV,
    AdmissionKey,
    AdmissionSettings,
    SwarmSecret,
    load_key,
    load_or_create_key,
    load_secret,
    replace_secret,
)
from peers.errors import UserError

KEY = AdmissionKey.new()
SECRET = KEY.secret


def test_a_secret_and_a_key_survive_their_files():
    assert SwarmSecret.parse(SECRET.to_text() + "\n") == SECRET
    assert AdmissionKey.parse(KEY.to_text() + "\n").secret == SECRET


def test_a_proof_is_good_for_one_peer_one_issuer_one_run_and_one_nonce():
    proof = SECRET.proof("run", "peer", "issuer", b"n" * 32)
    assert SECRET.is_proved_by(proof, "run", "peer", "issuer", b"n" * 32)
    for other in (
        ("another", "peer", "issuer", b"n" * 32),
        ("run", "another", "issuer", b"n" * 32),
        ("run", "peer", "another", b"n" * 32),
        ("run", "peer", "issuer", b"m" * 32),
        ("runp", "eer", "issuer", b"n" * 32),
    ):
        assert not SECRET.is_proved_by(proof, *other)
    assert not AdmissionKey.new().secret.is_proved_by(proof, "run", "peer", "issuer", b"n" * 32)


def test_both_files_are_made_once_and_only_their_owner_reads_them(tmp_path):
    paths = tmp_path / "state" / "run.admission-key", tmp_path / "state" / "run.swarm-secret"
    made = load_or_create_key(*paths)
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]
    assert load_or_create_key(*paths).to_text() == made.to_text()
    assert load_secret(str(paths[1]), {}) == made.secret
    paths[1].unlink()
    load_or_create_key(*paths)
    assert load_secret(str(paths[1]), {}) == made.secret


def test_a_new_secret_leaves_the_key_and_locks_out_the_old_one(tmp_path):
    paths = tmp_path / "run.admission-key", tmp_path / "run.swarm-secret"
    old = load_or_create_key(*paths).secret
    replace_secret(*paths)
    new = load_secret(str(paths[1]), {})
    assert new is not None and new.public_key == old.public_key and new != old
    assert load_key(paths[0]).secret == new
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o600]


def test_the_file_beats_the_environment_and_neither_means_none(tmp_path):
    path, other = tmp_path / "secret", AdmissionKey.new().secret
    path.write_text(SECRET.to_text())
    assert load_secret(str(path), {SECRET_ENV: other.to_text()}) == SECRET
    assert load_secret(None, {SECRET_ENV: other.to_text()}) == other
    assert load_secret(None, {SECRET_ENV: ""}) is None
    assert load_secret(None, {}) is None


def test_a_secret_and_a_key_of_different_runs_are_refused(tmp_path):
    secret, key, other = (tmp_path / name for name in ("secret", "key", "other"))
    secret.write_text(SECRET.to_text())
    key.write_text(KEY.to_text())
    other.write_text(AdmissionKey.new().to_text())
    both = AdmissionSettings(swarm_secret_file=str(secret), admission_key_file=str(key))
    assert both.secret() == SECRET
    with pytest.raises(UserError, match="different runs"):
        AdmissionSettings(swarm_secret_file=str(secret), admission_key_file=str(other)).secret()


@pytest.mark.parametrize(
    "text",
    [SECRET.to_text()[:-5], "x" + SECRET.to_text(), KEY.to_text(), "diloco1.ä.ö"],
    ids=["cut short", "of another form", "a key", "no text of ours"],
)
def test_no_error_repeats_what_was_read(tmp_path, text):
    path = tmp_path / "secret"
    path.write_text(text)
    for read in (
        lambda: load_secret(str(path), {}),
        lambda: load_secret(None, {SECRET_ENV: text}),
        lambda: load_key(path) if text != KEY.to_text() else load_secret(str(path), {}),
    ):
        with pytest.raises(UserError) as caught:
            read()
        said = "".join(str(error) for error in (caught.value, caught.value.__cause__))
        assert not any(word in said for word in text.split(".")[1:])


@pytest.mark.parametrize("text", [SECRET.to_text(), KEY.to_text()], ids=["secret", "key"])
def test_a_secret_where_a_path_belongs_is_refused_and_not_repeated(text):
    for read in (load_key, lambda given: load_secret(given, {})):
        with pytest.raises(UserError, match="name of its file") as caught:
            read(text)
        assert text.split(".")[2] not in str(caught.value)


def test_neither_is_in_its_repr():
    for shown in (repr(SECRET), repr(KEY), str(SECRET), f"{KEY}"):
        assert SECRET.to_text().split(".")[2] not in shown
        assert repr(SECRET._random) not in shown
        assert KEY.to_text().split(".")[1] not in shown


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: "diloco1." + raw.decode("latin-1")))
def test_any_other_text_is_neither(text):
    for parse in (SwarmSecret.parse, AdmissionKey.parse):
        with pytest.raises(ValueError, match=r"it is|a part"):
            parse(text)
