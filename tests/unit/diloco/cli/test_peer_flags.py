"""What `diloco provision` refuses of the flags behind `--` before it rents anything, and what it leaves to the pods."""

from __future__ import annotations

import json
import shutil

import pytest

from diloco.cli.app import exit_code
from diloco.cli.peer_flags import check_peer_flags
from diloco.errors import UserError
from diloco.options.model_files import PRESETS_DIR
from peers.errors import UserError as PeersUserError
from provisioning.errors import UserError as PodsUserError
from provisioning.machines.setup import Setup, mount_of
from tests.support.commands import ROOT

REFUSED = (UserError, PeersUserError, PodsUserError)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A directory with a model and a configuration in it, in which the command is typed."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PRESETS_DIR / "2m", tmp_path / "model")
    (tmp_path / "run.toml").write_text('path_model = "mine"\ntotal_steps = 5\n')
    return tmp_path


def check(flags, *mounts):
    return check_peer_flags(flags.split(), Setup(source=ROOT, mounts=[mount_of(words) for words in mounts]))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bogus 3", r"There is no flag --bogus\.\n.*`diloco peer --help`"),
        ("--total-stps 3", r"Did you mean --total-steps\?"),
        ("--total-steps many", '"many" is not a whole number'),
        ("stray", 'Unexpected argument "stray"'),
        ("--run-id mine", "--run-id is given to each peer by `diloco provision` itself"),
        ("--nproc-per-node x", "neither `auto` nor a number"),
        ("--path-model 99z", "99z is not a model"),
        ("--path-model model", "--path-model model exists here, but is not copied to the pods: add --mount"),
        ("--config run.toml", "--config run.toml exists here, but is not copied to the pods: add --mount"),
        ("--config code/recipes/no.toml", "No such file"),
        ("--total-batch-size 10 --per-device-train-batch-size 4", "is not a multiple of"),
        ("--hv.num-fragments 3", "does not divide by --hv.num-fragments 3"),
        ("--path-model 2m --hv.num-fragments 25 --hv.local-steps 50", "too few for --hv.num-fragments 25"),
        ("--mode grpo --dataset gsm9", "--dataset gsm9 is no task"),
        ("--optimizer muon --role rollout", "--optimizer muon is for pretraining"),
    ],
)
def test_flags_that_no_pod_could_use_are_refused(flags, said):
    with pytest.raises(REFUSED, match=said):
        check(flags)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--path-model 2m --total-steps 100",
        "--path-model owner/model",
        "--path-model /data/model --hv.num-fragments 2",
        "--path-model runs/peer/model",
        "--config /data/run.toml",
        "--config code/recipes/four-pods.toml",
        "--dataset-name-or-path /data/texts.jsonl --ckpt.resume /data/model_step_5",
        "--device cuda --nproc-per-node 8 --metric-logger-type wandb",
        "--mode grpo --dataset /data/game.py:Game --path-model owner/model",
        "--role rollout --rollout hf",
        # A rollout peer trains no batch, so the two sizes need not match.
        "--role rollout --rollout hf --total-batch-size 10 --per-device-train-batch-size 4",
        "--worker ./train.sh --path-model nothing",
        # 8 divides the batch of the smallest recipe but not that of the largest.
        "--per-device-train-batch-size 8",
    ],
)
def test_what_only_the_pods_can_tell_is_left_to_them(flags):
    check(flags)


@pytest.mark.parametrize(
    ("flags", "extras"),
    [
        ("--path-model 2m", []),
        (
            "--metric-logger-type wandb,tensorboard --ckpt.path s3://bucket/run",
            ["wandb", "tensorboard", "s3"],
        ),
        ("--mode grpo", ["grpo", "vllm"]),
        ("--mode grpo --grpo.vllm-python /opt/vllm/bin/python", ["grpo"]),
        ("--role rollout --rollout hf", ["grpo"]),
        ("--worker ./train.sh --metric-logger-type wandb", []),
        ("--config /data/run.toml --mode grpo", []),
    ],
)
def test_the_pods_get_the_packages_that_these_flags_need(flags, extras):
    assert check(flags) == extras


def test_what_is_sent_to_the_pods_is_read_where_it_comes_from(here):
    check("--path-model mine", "model:mine")
    check("--config run.toml", "model:mine", "run.toml")
    with pytest.raises(UserError, match="mine is not a model"):
        check("--config run.toml", "run.toml")
    (here / "run.toml").write_text("total_stps = 5\n")
    with pytest.raises(UserError, match='Unknown key "total_stps"'):
        check("--config run.toml", "run.toml")
    (here / "model/config.json").write_text(json.dumps({"no": "model"}))
    with pytest.raises(UserError, match="has no model_type"):
        check("--path-model mine", "model:mine")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-- --total-stps 5", "Did you mean --total-steps?"),
        # A mistyped flag of the command itself, perhaps its price limit, is not passed to the peers.
        ("--max-prise 3", "Did you mean --max-price?"),
    ],
)
def test_the_command_ends_before_anything_is_planned(words, said, tmp_path, capsys):
    state_file = str(tmp_path / "pods.sqlite")
    assert exit_code(["provision", "--pods", "2", "--state-file", state_file, *words.split()]) == 2
    told = capsys.readouterr()
    assert said in told.err and "create" not in told.out
