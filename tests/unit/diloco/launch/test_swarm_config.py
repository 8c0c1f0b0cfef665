"""What the swarm agrees on, and how a peer takes it over."""

from __future__ import annotations

import contextlib
import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from diloco.data.tokenizer import chat_template_of
from diloco.errors import UserError
from diloco.launch.swarm_config import adopt_manifest, daemon_config, manifest_of
from diloco.options.flags import GrpoConfig
from diloco.options.model_files import load_model_config
from diloco.options.trainer import TrainConfig, as_rollout_peer, parse_train_config
from tests.support.tiny_model import small_bare_model

FRESH = str(Path(__file__).parents[4] / "tests" / "models" / "llama-2m-fresh")


def test_the_daemon_is_told_plain_json():
    config, named = parse_train_config(["--world-rank", "1", "--lr", "0.5", "--path-model", FRESH])
    told = daemon_config(config, named)
    assert told["hardware"].endswith(f", torch {version('torch')}")
    assert json.loads(json.dumps(told)) == told
    assert told["world_rank"] == 1
    assert told["named"] == ["lr", "model", "tokenizer"]
    assert told["manifest"]["lr"] == 0.5


def test_a_peer_without_a_world_rank_and_an_address_is_told_of_both_at_once():
    with pytest.raises(UserError, match=r"--initial-peers is missing.* --world-rank"):
        daemon_config(*parse_train_config([]))


def test_a_model_directory_is_described_by_its_content_not_by_its_path():
    manifest = manifest_of(TrainConfig(path_model=FRESH))
    assert manifest["path_model"] == ""
    assert json.loads(manifest["model"]) == load_model_config(FRESH)
    assert FRESH not in json.dumps(manifest)


def test_a_directory_and_a_preset_with_equal_contents_are_one_model(tmp_path):
    manifest = manifest_of(TrainConfig(path_model=FRESH))
    config, named = parse_train_config(["--path-model", "2m"])
    assert {name: manifest[name] for name in ("model", "tokenizer")}.items() <= manifest_of(config).items()
    assert adopt_manifest(config, manifest, named, run_dir=tmp_path).path_model == "2m"


def test_a_model_that_this_machine_lacks_is_written_down(tmp_path):
    directory = tmp_path / "theirs"
    shutil.copytree(FRESH, directory)
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, "num_hidden_layers": 3}))
    manifest = manifest_of(TrainConfig(path_model=str(directory), lr=0.5))
    shutil.rmtree(directory)
    config = adopt_manifest(TrainConfig(), manifest, (), run_dir=tmp_path / "run")
    assert config.lr == 0.5
    assert config.path_model == str(tmp_path / "run" / "model_config")
    assert load_model_config(config.path_model)["num_hidden_layers"] == 3


def test_a_model_with_a_tokenizer_that_is_not_here_is_refused(tmp_path):
    manifest = {**manifest_of(TrainConfig(seq_length=64)), "tokenizer": "0" * 64}
    with pytest.raises(UserError, match="Copy the model's directory"):
        adopt_manifest(TrainConfig(), manifest, (), run_dir=tmp_path)


def test_a_rollout_peer_takes_any_size_of_batches_which_it_does_not_train(tmp_path):
    mine = TrainConfig(mode="grpo", per_device_train_batch_size=24)
    named, manifest = (
        {"per_device_train_batch_size"},
        manifest_of(TrainConfig(mode="grpo", total_batch_size=32)),
    )
    with pytest.raises(UserError, match="is not a multiple of"):
        adopt_manifest(mine, manifest, named, run_dir=tmp_path)
    config, own = as_rollout_peer(mine, named)
    adopted = adopt_manifest(config, manifest, own, run_dir=tmp_path)
    assert (adopted.total_batch_size, adopted.per_device_train_batch_size) == (32, 16)


@pytest.mark.parametrize("trains", [{"lora_rank": 4}, {"beta": 0.1}], ids=["adapters", "with a reference"])
def test_initial_weights_that_no_peer_sends_are_the_same_on_all_peers(tmp_path, trains):
    """Peers send only the adapters, not the weights beneath them, and no reference model."""
    theirs, copy, other = (tmp_path / name for name in ("theirs", "copy", "other"))
    small_bare_model(theirs)
    save_file({"weight": torch.zeros(2)}, theirs / "model.safetensors")
    shutil.copytree(theirs, copy)
    shutil.copytree(theirs, other)
    save_file({"weight": torch.ones(2)}, other / "model.safetensors")
    manifest = manifest_of(TrainConfig(mode="grpo", path_model=str(theirs), grpo=GrpoConfig(**trains)))

    def adopted(path_model) -> TrainConfig:
        config, named = parse_train_config(["--path-model", str(path_model)], "grpo")
        return adopt_manifest(config, manifest, named, run_dir=tmp_path / "run")

    assert adopted(copy).path_model == str(copy)
    assert {name: getattr(adopted(copy).grpo, name) for name in trains} == trains
    for lacking in (other, small_bare_model(tmp_path / "without")):
        with pytest.raises(UserError, match="weights that this machine does not have"):
            adopted(lacking)
    assert "weights" not in manifest_of(TrainConfig(mode="grpo", path_model=str(theirs)))


@pytest.mark.parametrize(
    ("trains", "is_refused"),
    [({"lora_rank": 4}, True), ({"beta": 0.1}, False), ({"lora_rank": 4, "beta": 0.1}, True)],
)
def test_a_rollout_peer_needs_weights_under_adapters_but_none_for_a_reference(tmp_path, trains, is_refused):
    theirs = small_bare_model(tmp_path / "theirs")
    own = shutil.copytree(theirs, tmp_path / "own")
    save_file({"weight": torch.zeros(2)}, theirs / "model.safetensors")
    manifest = manifest_of(TrainConfig(mode="grpo", path_model=str(theirs), grpo=GrpoConfig(**trains)))
    config, named = as_rollout_peer(*parse_train_config(["--path-model", str(own)], "grpo"))
    with pytest.raises(UserError, match="weights that") if is_refused else contextlib.nullcontext():
        adopted = adopt_manifest(config, manifest, named, run_dir=tmp_path / "run", is_learner=False)
        assert adopted.path_model == str(own)


def test_weights_that_are_drawn_from_the_runs_seed_need_no_copy(tmp_path):
    theirs = small_bare_model(tmp_path / "theirs")
    (theirs / "chat_template.jinja").write_text(chat_template_of("2m"))
    manifest = manifest_of(TrainConfig(mode="grpo", path_model=str(theirs), grpo=GrpoConfig(lora_rank=4)))
    shutil.rmtree(theirs)
    config, named = parse_train_config([], "grpo")
    written = adopt_manifest(config, manifest, named, run_dir=tmp_path / "run").path_model
    assert written == str(tmp_path / "run" / "model_config")


def test_a_chat_template_is_not_taken_from_another_peer(tmp_path):
    """It is a program. Without it, the prompts of a peer would be formatted in another way than those of the others."""
    theirs, copy = (small_bare_model(tmp_path / name) for name in ("theirs", "copy"))
    manifest = manifest_of(TrainConfig(mode="grpo", path_model=str(theirs)))
    config, named = parse_train_config(["--path-model", str(copy)], "grpo")
    assert adopt_manifest(config, manifest, named, run_dir=tmp_path / "run").path_model == str(copy)
    (copy / "chat_template.jinja").write_text("another")
    for lacking in ((config, named), (TrainConfig(mode="grpo"), ())):
        with pytest.raises(UserError, match="a chat template that this machine does not have"):
            adopt_manifest(lacking[0], manifest, lacking[1], run_dir=tmp_path / "run")
    assert "another" not in json.dumps(manifest_of(config))
    assert "chat_template" not in manifest_of(TrainConfig(path_model=str(theirs)))


@pytest.mark.parametrize("model", ["[1]", "{", '{"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}'])
def test_a_manifest_with_a_bad_model_is_refused(tmp_path, model):
    with pytest.raises(UserError, match="manifest"):
        adopt_manifest(
            TrainConfig(), {"model": model, "tokenizer": "", "path_model": ""}, (), run_dir=tmp_path
        )


def test_code_that_the_manifest_names_is_run_only_where_the_user_names_it_too(tmp_path):
    name = "subprocess:getoutput,cmd=id"
    theirs = manifest_of(TrainConfig(mode="grpo", grpo=GrpoConfig(dataset=name)))
    with pytest.raises(UserError, match=r"environment is code: 'subprocess:getoutput.* --dataset"):
        adopt_manifest(TrainConfig(mode="grpo"), theirs, (), run_dir=tmp_path)
    config, named = parse_train_config(["--dataset", name], "grpo")
    assert adopt_manifest(config, theirs, named, run_dir=tmp_path).grpo.dataset == name
    ours = manifest_of(TrainConfig(mode="grpo", grpo=GrpoConfig(dataset="gsm8k")))
    assert adopt_manifest(TrainConfig(mode="grpo"), ours, (), run_dir=tmp_path).grpo.dataset == "gsm8k"
