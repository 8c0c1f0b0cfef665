"""The `diloco export` command: from a swarm's checkpoint to a model that transformers loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from diloco.checkpoint.export import exported
from diloco.checkpoint.mark import COMPLETE, read_mark
from diloco.checkpoint.store import own_part
from diloco.cli import export as export_verb
from diloco.errors import UserError
from peers.state import files as state_files
from peers.state.header import HEADER_FILE
from peers.state.whole_files import record_of
from tests.support.checkpoint_commands import EXPORT, SAVE
from tests.support.commands import DILOCO, ROOT, Command, model_directory, text_of_boxes, training_flags


@pytest.fixture(scope="module")
def trained(tmp_path_factory, bootstrap) -> Path:
    """The directory of a peer, started as in the README, that has saved steps 3 (mid-epoch) and 6 (its last)."""
    directory = tmp_path_factory.mktemp("export")
    model = model_directory(directory / "tiny", tie_word_embeddings=True)
    more = {"hv.local-steps": 2, "run-id": "export", "world-rank": 0, "host-maddrs": "/ip4/127.0.0.1/tcp/0"}
    flags = training_flags(model, run_dir="run", total_steps=6, lr=1e-2, warmup_steps=0, **more)
    words = SAVE.replace("<maddr>", bootstrap).replace("interval 100", "interval 3").split()[1:]
    peer = Command([*DILOCO, *words, *flags], directory / "peer")
    try:
        assert peer.wait() == 0, peer.stdout + peer.stderr
    finally:
        peer.close()
    return peer.directory


def export(directory: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "diloco", "export", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(directory).decode([104, 105]) == "hi"
    return dict(AutoModelForCausalLM.from_pretrained(directory).state_dict())


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_newest_checkpoint_becomes_the_model_that_training_ended_with(trained):
    done = export(trained, *EXPORT.split()[2:])
    assert done.returncode == 0, done.stderr
    assert same(weights_of(trained / "model"), weights_of(trained / "run" / "model"))
    with pytest.raises(UserError, match="model already exists"):
        export_verb.export("checkpoints", trained / "model")


def test_of_a_step_between_two_rounds_the_agreed_weights_and_the_peers_own_differ(trained, capsys):
    step = trained / "checkpoints" / "model_step_3"
    for name in ("agreed", "own"):
        export_verb.export(str(step), trained / f"model-{name}", weights=name)
        said = f"{trained}/model-{name}: the {name} weights of {step / own_part(0)}\n"
        assert capsys.readouterr().out == said
    agreed, own = weights_of(trained / "model-agreed"), weights_of(trained / "model-own")
    assert not same(agreed, own)
    anchor = state_files.load(step / own_part(0)).anchor[0]
    embedding = agreed["model.embed_tokens.weight"].flatten()
    assert torch.equal(embedding, anchor[: embedding.numel()])


def test_a_checkpoint_from_before_certificates_becomes_a_model(trained, tmp_path):
    copy = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints", copy)
    part = copy / "model_step_6" / own_part(0)
    header = json.loads((part / HEADER_FILE).read_text())
    del header["certificate"]
    header["lineage"] = header.pop("head")
    (part / HEADER_FILE).write_text(json.dumps(header))
    mark = read_mark(part)
    files = {**mark.files, HEADER_FILE: record_of(part / HEADER_FILE)}
    now = replace(mark, files=files).to_bytes()
    # The seal is the hash of the mark itself with zeros in place of the seal.
    unsealed = re.sub(rb'"seal": "[0-9a-f]{64}"', b'"seal": "' + b"0" * 64 + b'"', now).replace(
        b'"head"', b'"lineage"'
    )
    seal = blake3(unsealed).hexdigest().encode()
    (part / COMPLETE).write_bytes(unsealed.replace(b'"seal": "' + b"0" * 64, b'"seal": "' + seal))
    told = exported(str(copy / "model_step_6"), tmp_path / "model", weights="agreed")
    assert (told["step"], told["weights"]) == (6, "agreed")
    assert same(weights_of(tmp_path / "model"), weights_of(trained / "run" / "model"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_exported(trained, tmp_path, caplog):
    copy = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints", copy)
    file = copy / "model_step_6" / own_part(0) / "outer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"outer\.safetensors does not hold"):
        exported(str(copy / "model_step_6"), tmp_path / "model", weights="agreed")
    assert exported(str(copy), tmp_path / "model", weights="agreed")["step"] == 3
    assert "outer.safetensors does not hold" in caplog.text


def test_a_damaged_mark_is_named_whether_there_is_one_before_or_not(trained, tmp_path, caplog):
    copy = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints", copy)
    newest, before = (copy / f"model_step_{step}" / own_part(0) / "complete.json" for step in (6, 3))
    newest.write_bytes(newest.read_bytes()[:-2])
    assert exported(str(copy), tmp_path / "model", weights="agreed")["step"] == 3
    assert "model_step_6" in caplog.text and "does not describe a checkpoint" in caplog.text
    before.write_bytes(b"")
    with pytest.raises(UserError, match=r"no complete checkpoint in .*model_step_.*does not describe a"):
        exported(str(copy), tmp_path / "again", weights="agreed")


@pytest.mark.exhaustive
def test_a_place_that_takes_no_model_is_named_in_one_box(trained):
    (trained / "file").touch()
    done = export(trained, "checkpoints", "file/model")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (box,) = text_of_boxes(done.stderr)
    assert box.startswith("file/model cannot be written")
