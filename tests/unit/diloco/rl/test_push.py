"""The files by which rollout peers get a learner's weights, and the generators that read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diloco.rl import push
from diloco.rl import weights as rl_weights
from diloco.rl.push import PolicyFiles, Publisher
from diloco.rl.weights import ANY_FLOAT, BadBlob, Held, digest_of

SHAPES = {"a": (40, 50), "b": (70,)}
EXPECTED = {name: (ANY_FLOAT, shape) for name, shape in SHAPES.items()}


@pytest.fixture
def publisher():
    return Publisher(torch.bfloat16)


def weights(step: int, num_changed: int = 3) -> dict[str, torch.Tensor]:
    found = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    found["a"].view(-1)[:num_changed] += step
    return found


def written(files: PolicyFiles, publisher: Publisher, step: int, num_changed: int = 3) -> list[dict]:
    publisher.take(weights(step, num_changed).items())
    return files.write(publisher)


def read(held: Held, entries: list[dict]) -> None:
    for entry in entries:
        held.digest, held.state = held.after([Path(entry["path"]).read_bytes()], EXPECTED)


def test_the_first_file_holds_all_weights_and_later_ones_what_has_changed(tmp_path, publisher):
    files, held = PolicyFiles(tmp_path / "policies"), Held()
    first = written(files, publisher, 1)
    entries = written(files, publisher, 2)
    assert entries[0] == first[0] and entries[0]["base"] == ""
    assert entries[1]["base"] == entries[0]["leads_to"] and entries[1]["num_bytes"] < 600
    read(held, entries)
    assert digest_of(held.state) == publisher.digest == entries[1]["leads_to"]
    assert torch.equal(held.state["a"], weights(2)["a"].to(torch.bfloat16))


def test_weights_that_did_not_change_are_not_written_again(tmp_path, publisher):
    files, held = PolicyFiles(tmp_path / "policies"), Held()
    first = written(files, publisher, 1)
    assert written(files, publisher, 1) == first
    read(held, written(files, publisher, 2))
    assert digest_of(held.state) == publisher.digest


def test_all_weights_are_written_anew_after_some_patches_and_older_files_go(tmp_path, publisher, monkeypatch):
    monkeypatch.setattr(push, "MAX_PATCHES", 2)
    files = PolicyFiles(tmp_path / "policies")
    for step in range(1, 12):
        entries = written(files, publisher, step)
        held = Held()
        whole = max(index for index, entry in enumerate(entries) if not entry["base"])
        read(held, entries[whole:])
        assert digest_of(held.state) == publisher.digest
        assert {Path(entry["path"]) for entry in entries} == set((tmp_path / "policies").iterdir())
        assert len(entries) <= 8
    patch = next(entry for entry in entries if entry["leads_to"] == publisher.digest)
    assert patch["base"]


def test_patches_that_are_as_long_as_all_weights_are_all_weights(tmp_path, publisher):
    files = PolicyFiles(tmp_path / "policies")
    written(files, publisher, 1)
    assert [entry["base"] for entry in written(files, publisher, 2, num_changed=2000)] == ["", ""]


def test_a_patch_of_other_weights_is_refused(tmp_path, publisher):
    files = PolicyFiles(tmp_path / "policies")
    written(files, publisher, 1)
    entries = written(files, publisher, 2)
    with pytest.raises(BadBlob, match="the patch is for other weights"):
        read(Held(), entries[1:])


def test_a_patch_of_another_trainer_from_the_same_weights_is_taken(tmp_path, publisher):
    """After a commit, all learners have the same weights, and rollout peers go from one to another."""
    held, other = Held(), Publisher(torch.bfloat16)
    files = [PolicyFiles(tmp_path / name) for name in "ab"]
    written(files[1], other, 5)
    read(held, written(files[0], publisher, 1))
    written(files[1], other, 1)
    read(held, written(files[1], other, 2)[-1:])
    assert held.digest == digest_of(held.state) == other.digest


def test_a_patch_is_from_the_weights_that_were_written_last(tmp_path, publisher):
    files, held = PolicyFiles(tmp_path / "policies"), Held()
    written(files, publisher, 1)
    publisher.take(weights(2).items())
    publisher.take(weights(3).items())
    whole, patch = files.write(publisher)
    assert patch["base"] == whole["leads_to"]
    read(held, [whole, patch])
    assert held.digest == publisher.digest


def test_files_that_are_read_together_are_verified_once(tmp_path, publisher, monkeypatch):
    files = PolicyFiles(tmp_path / "policies")
    for step in (1, 2, 3):
        entries = written(files, publisher, step)
    blobs = [Path(entry["path"]).read_bytes() for entry in entries]
    with pytest.raises(BadBlob, match="the patch is for other weights"):
        Held().after([blobs[0], blobs[2]], EXPECTED)
    hashed = []
    monkeypatch.setattr(rl_weights, "digest_of", lambda state: hashed.append(state) or digest_of(state))
    digest, state = Held().after(iter(blobs), EXPECTED)
    assert digest == publisher.digest == digest_of(state)
    assert len(blobs) == 3 and len(hashed) == 1


def test_the_directory_goes_with_them(tmp_path, publisher):
    files = PolicyFiles(tmp_path / "policies")
    written(files, publisher, 1)
    files.close()
    assert not (tmp_path / "policies").exists()
