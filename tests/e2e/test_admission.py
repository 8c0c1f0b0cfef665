"""The README's swarm with a secret: only peers with the secret train, and only its own files contain it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.test_readme import (
    ADMITTED,
    BAN,
    CLOSED_DHT,
    LIST_BANS,
    NEW_SECRET,
    SECOND,
    UNBAN,
    digests,
    records_of,
)
from tests.support.commands import Command, text_of_boxes, wait_until
from tests.support.documents import typed

SHORT = ("--fake-data", "--seq-length", 64, "--total-batch-size", 4, "--eval-tokens", 64)
OWN_FILES = (".swarm-secret", ".admission-key", "swarm-secret")


def trained(peer: Command) -> list[Path]:
    """The peer's run directory in a list, which is empty until two epochs are recorded."""
    return [
        path.parent for path in peer.directory.glob("runs/*/metrics.jsonl") if len(digests(path.parent)) >= 2
    ]


def command_lines() -> str:
    """The command lines of all processes on this machine."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(process.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def holders(base: Path, word: str) -> list[str]:
    """Files below `base` that contain the word, except those whose purpose is to hold it (OWN_FILES)."""
    files = (path for path in base.rglob("*") if path.is_file() and not path.name.endswith(OWN_FILES))
    return [str(path.relative_to(base)) for path in files if word.encode() in path.read_bytes()]


@pytest.mark.exhaustive
def test_only_peers_with_the_secret_train_and_it_is_written_nowhere(start, model, tmp_path, monkeypatch):
    """The README's commands, with a tiny model and a training that never finishes."""
    coordinator = start(*typed(CLOSED_DHT, host_maddrs="/ip4/127.0.0.1/tcp/0"), name="dht")
    wait_until(lambda: "swarm secret in" in coordinator.stdout, "where the secret is", command=coordinator)
    maddr = coordinator.stdout.splitlines()[0].removeprefix("--initial-peers ")
    secret_file = Path(re.findall(r"swarm secret in (\S+?):", coordinator.stdout)[0])
    secret = secret_file.read_text().strip()
    assert secret_file.stat().st_mode & 0o077 == 0
    (tmp_path / "first").mkdir()
    shutil.copy(secret_file, tmp_path / "first" / "swarm-secret")

    stranger = start(*typed(SECOND, maddr=maddr), name="stranger")
    more = ("--galaxy-size", 2, "--path-model", model, "--hv.local-steps", 20, *SHORT)
    first = start(*typed(ADMITTED, *more, maddr=maddr), name="first")
    # The first peer of a run publishes the manifest; the second one has no model of its own and needs it.
    wait_until(lambda: "joined the swarm" in first.stdout, "the first peer", command=first)
    monkeypatch.setenv("DILOCO_SWARM_SECRET", secret)
    second = start(*typed(SECOND, "--world-rank", 1, maddr=maddr), name="second")
    monkeypatch.delenv("DILOCO_SWARM_SECRET")
    assert stranger.wait() == 2
    assert "admits only peers that have its secret" in text_of_boxes(stranger.stderr)[0]
    for peer in (first, second):
        wait_until(lambda peer=peer: trained(peer), "two epochs", command=peer)
    shown = command_lines()

    (key,) = tmp_path.glob("second/state/diloco/diloco/1.token")
    assert key.stat().st_mode & 0o077 == 0
    state_dir = coordinator.directory / "state" / "diloco"
    (peer_id,) = re.findall(
        r"starting as (\S+)", next(second.directory.glob("runs/*/logs/daemon.log")).read_text()
    )
    ban = start(*typed(BAN.replace("<peer-id>", peer_id), "--state-dir", state_dir, maddr=maddr), name="ban")
    assert ban.wait() == 0, ban.stderr
    assert f"{peer_id} is banned" in ban.stdout
    assert second.wait() == 1
    assert "is banned from the run" in text_of_boxes(second.stderr)[-1]
    listed = start(*typed(LIST_BANS, "--state-dir", state_dir, maddr=maddr), name="list")
    assert (listed.wait(), listed.stdout) == (0, f"{peer_id}\n"), listed.stderr
    first_dir = trained(first)[0]
    wait_until(
        lambda: records_of(first_dir, "epoch")[-1]["contributors"] == [0], "an epoch alone", command=first
    )
    first.interrupt()
    assert first.wait() == 130

    for word in (secret, *secret.split(".")[2:]):
        assert word not in shown
        assert word not in command_lines()
        assert holders(tmp_path, word) == []
    assert "DILOCO_SWARM_SECRET" not in "".join(
        path.read_text() for path in tmp_path.glob("*/runs/*/config.toml")
    )
    unban = start(
        *typed(UNBAN.replace("<peer-id>", peer_id), "--state-dir", state_dir, maddr=maddr), name="unban"
    )
    assert unban.wait() == 0, unban.stderr
    assert f"{peer_id} is no longer banned" in unban.stdout
    new = start(*typed(NEW_SECRET, "--state-dir", state_dir), name="new")
    assert new.wait() == 0, new.stderr
    assert secret_file.read_text().strip() != secret and secret not in new.stdout
