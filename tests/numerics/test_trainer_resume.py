"""A training that is interrupted and resumed gives the figures of one that is not, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.options import CkptConfig
from diloco.world import World
from peers.link import LINK_ENV
from tests.support.scripted_daemon import ScriptedDaemon
from tests.support.torch_ranks import Ranks
from tests.support.training import of_kind, tiny_config, train

FIGURES = ("step", "loss", "lr", "grad_norm", "tokens")


def stopped_and_resumed(world, directory, precision):
    """Figures of an undisturbed run of six steps, and of one that stops after three and goes on from two."""
    config = tiny_config(directory, precision=precision)
    whole = train(config, directory / "whole", world)
    ckpt = CkptConfig(path=config.ckpt.path, interval=2)
    first = train(replace(config, max_steps=3, ckpt=ckpt), directory / "parts", world)
    both = train(replace(config, ckpt=replace(ckpt, resume="auto")), directory / "parts", world)
    return of_kind("step", whole, *FIGURES), of_kind("step", both[len(first) :], *FIGURES)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed"])
def test_resumed_figures_equal_the_undisturbed_ones(tmp_path, monkeypatch, precision):
    monkeypatch.delenv(LINK_ENV, raising=False)
    whole, resumed = stopped_and_resumed(World(), tmp_path, precision)
    assert [figures[0] for figures in resumed] == [3, 4, 5, 6]
    assert resumed == whole[2:]


def test_sharded_ranks_resume_from_their_own_shards(tmp_path):
    with Ranks(2) as ranks:
        whole, resumed = ranks.run(stopped_and_resumed, tmp_path, "32-true")[0]
    assert [figures[0] for figures in resumed] == [3, 4, 5, 6]
    assert resumed == whole[2:]


def test_a_peer_resumes_in_mid_epoch_with_its_outer_state(tmp_path, monkeypatch):
    monkeypatch.setenv(LINK_ENV, str(tmp_path / "link.sock"))
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(tmp_path / "checkpoints"), interval=5))
    with ScriptedDaemon(tmp_path / "link.sock", world_rank=1, local_steps=4):
        whole = train(config, tmp_path / "whole")
    part = tmp_path / "checkpoints" / "model_step_5" / "diloco_rank_1"
    assert (part / "outer.bin").is_file()
    with ScriptedDaemon(tmp_path / "link.sock", world_rank=1, local_steps=4) as daemon:
        resume = CkptConfig(path=config.ckpt.path, resume=str(part.parent))
        resumed = train(replace(config, ckpt=resume), tmp_path / "resumed")
    assert daemon.messages[0]["resume"] == str(part)
    assert of_kind("step", resumed, *FIGURES) == of_kind("step", whole, *FIGURES)[5:]


def test_only_the_newest_of_a_peers_own_checkpoints_are_kept(tmp_path, monkeypatch):
    monkeypatch.delenv(LINK_ENV, raising=False)
    path = tmp_path / "checkpoints"
    (path / "model_step_1" / "diloco_rank_0").mkdir(parents=True)
    train(tiny_config(tmp_path, ckpt=CkptConfig(path=str(path), interval=1, topk=2)), tmp_path / "run")
    assert sorted(p.name for p in path.iterdir() if (p / "complete.json").exists()) == [
        "model_step_5",
        "model_step_6",
    ]
    # Another peer's.
    assert (path / "model_step_1" / "diloco_rank_0").is_dir()


def test_nothing_half_written_is_resumed_from(tmp_path, monkeypatch):
    monkeypatch.delenv(LINK_ENV, raising=False)
    ckpt = CkptConfig(path=str(tmp_path / "checkpoints"), interval=2)
    train(tiny_config(tmp_path, ckpt=ckpt, max_steps=4), tmp_path / "first")
    (tmp_path / "checkpoints" / "model_step_4" / "complete.json").unlink()
    config = tiny_config(tmp_path, ckpt=replace(ckpt, resume="auto"), max_steps=4)
    assert of_kind("step", train(config, tmp_path / "second"), "step") == [(3,), (4,)]


@pytest.mark.parametrize(
    ("resume", "message"),
    [("nowhere", "no complete checkpoint in nowhere"), ("{checkpoints}/model_step_4", "holds another model")],
)
def test_what_cannot_be_resumed_is_refused(tmp_path, monkeypatch, resume, message):
    monkeypatch.delenv(LINK_ENV, raising=False)
    path = tmp_path / "checkpoints"
    config = tiny_config(tmp_path, ckpt=CkptConfig(path=str(path), interval=4), max_steps=4)
    train(config, tmp_path / "first")
    other = (tmp_path / "model" / "config.json").read_text().replace("27", "29")
    (tmp_path / "model" / "config.json").write_text(other)
    ckpt = CkptConfig(path=str(path), resume=resume.format(checkpoints=path))
    with pytest.raises(UserError, match=message):
        train(replace(config, ckpt=ckpt), tmp_path / "second")
