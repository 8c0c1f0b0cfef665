"""The command line passes the swarm secret to the daemon alone, as the name of its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.cli.app import exit_code
from diloco.cli.machine_recipes import Choice
from diloco.cli.peer import WorkerSetup
from diloco.launch.local_swarm import environment_of_peers
from diloco.launch.swarm_config import daemon_config
from diloco.options.trainer import parse_train_config
from peers.admission.secrets import SECRET_ENV, AdmissionKey, load_or_create_key
from peers.errors import UserError

SECRET = AdmissionKey.new().secret.to_text()


def test_a_swarm_on_this_machine_does_without_the_secret_of_another(tmp_path):
    assert SECRET_ENV not in environment_of_peers({SECRET_ENV: SECRET}, tmp_path, 2)


def test_the_workers_are_not_given_the_secret(tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET_ENV, SECRET)
    config, named = parse_train_config([])
    command = WorkerSetup(Choice(config=config), named, tmp_path, "1", 0).command(
        {}, True, 0, tmp_path / "link"
    )
    assert SECRET not in (*command.env.values(), *command.argv)
    assert SECRET.split(".")[2] not in (tmp_path / "config.toml").read_text()


def test_the_daemon_is_told_the_files_and_not_what_is_in_them(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    config, named = parse_train_config(["--swarm-secret-file", str(path), "--hv.world-rank", "0"])
    fields = daemon_config(config, named)
    assert fields["swarm_secret_file"] == str(path)
    assert SECRET.split(".")[2] not in str(fields)


@pytest.mark.parametrize("given", ["missing", SECRET], ids=["missing", "the secret"])
def test_a_file_that_cannot_be_read_stops_the_peer_before_it_joins(given, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(["peer", "--world-rank", "0", "--swarm-secret-file", given]) == 2
    said = capsys.readouterr().err
    assert "swarm secret" in said
    assert SECRET.split(".")[2] not in said
    assert not Path("runs").exists()


def test_a_secret_of_another_run_than_the_key_is_refused(tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "key").write_text(AdmissionKey.new().to_text())
    flags = ["--swarm-secret-file", str(tmp_path / "secret"), "--admission-key-file", str(tmp_path / "key")]
    config, named = parse_train_config([*flags, "--hv.world-rank", "0"])
    with pytest.raises(UserError, match="of different runs"):
        daemon_config(config, named)


def test_a_new_secret_is_made_where_the_key_is_and_not_shown(tmp_path, capsys):
    key_path, secret_path = (
        tmp_path / "coordinator" / f"diloco.{end}" for end in ("admission-key", "swarm-secret")
    )
    old = load_or_create_key(key_path, secret_path).secret.to_text()
    assert exit_code(["peers", "new-secret", "--state-dir", str(tmp_path)]) == 0
    new, said = secret_path.read_text().strip(), capsys.readouterr().out
    assert new != old and new.split(".")[1] == old.split(".")[1]
    assert str(secret_path) in said and new.split(".")[2] not in said


@pytest.mark.parametrize("verb", ["new-secret", "list", "ban", "unban"])
def test_a_run_without_an_admission_key_here_is_told_from_a_file_that_is_missing(verb, tmp_path, capsys):
    maddr = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
    flags = ["--run-id", "other", *([] if verb == "new-secret" else ["--initial-peers", maddr])]
    ids = ["AAAAAA"] if verb in ("ban", "unban") else []
    assert exit_code(["peers", verb, *ids, *flags, "--state-dir", str(tmp_path)]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "there is no admission key of the run other here" in said and "without --admission" in said
    assert "other.admission-key" in said.replace(" ", "")
    missing = str(tmp_path / "missing")
    assert exit_code(["peers", verb, *ids, *flags, "--admission-key-file", missing]) == 2
    assert "cannot read the admission key file" in " ".join(capsys.readouterr().err.split())
