"""Flags, TOML and manifests: the same fields, the same checks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diloco.errors import UserError
from diloco.options.trainer import (
    TrainConfig,
    flat_values,
    notes_on_unused_flags,
    parse_train_config,
    shared_fields,
    shared_values,
    to_toml,
    with_fitting_batch_size,
    with_shared,
)
from peers.core.schedule import AS_LONG_AS_THE_ROUND, Schedule
from peers.core.weights import Aggregation
from peers.protocol.codecs import CODEC_NAMES

PEER_ID = "12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
ADDRESS = f"/ip4/127.0.0.1/tcp/30001/p2p/{PEER_ID}"
OTHER = f"/ip4/10.0.0.7/tcp/30002/p2p/{PEER_ID}"

EVERY_FLAG = (
    "--per-device-train-batch-size 4 --total-batch-size 16 --lr 1e-2 --path-model tests/models/llama-2m-fresh "
    "--metric-logger-type dummy --no-torch-compile --fake-data --max-steps 5 --total-steps 10 --warmup-steps 2 "
    "--seq-length 64 --precision bf16-mixed --sharding-strategy NO_SHARD --dataset-name-or-path text/ "
    "--num-workers 2 --attn-implementation eager --project p --log-activations-steps 3 --ckpt.path here "
    "--ckpt.interval 5 --ckpt.resume auto --ckpt.topk 2 "
    f"--hv.initial-peers {ADDRESS} --hv.galaxy-size 2 --hv.world-rank 1 --hv.local-steps 7 --hv.outer-lr 0.6 "
    "--hv.host-maddrs /ip4/0.0.0.0/tcp/30003 --hv.announce-maddrs /ip4/10.0.0.1/tcp/30003 "
    "--hv.matchmaking-time 9 --hv.averaging-timeout 60 --hv.hivemind-compression scaled-fp16 "
    "--hv.all-reduce-strategy NO_WAIT --hv.timeout-waiting-for-peers 30 --hv.skip-load-from-peers "
    "--hv.fail-rank-drop --seed 7 --run-dir r --activation-checkpointing --device cpu"
).split()
SNAKE = [part if not part.startswith("--") else "--" + part[2:].replace("-", "_") for part in EVERY_FLAG]


def test_every_flag_of_the_original_instructions_is_understood():
    config, named = parse_train_config(EVERY_FLAG)
    assert config.per_device_train_batch_size == 4
    assert (config.lr, config.torch_compile, config.fake_data) == (1e-2, False, True)
    assert (config.ckpt.path, config.ckpt.interval, config.ckpt.resume, config.ckpt.topk) == (
        "here",
        5,
        "auto",
        2,
    )
    assert config.hv.initial_peers == (ADDRESS,)
    assert (config.hv.compression, config.hv.all_reduce_strategy) == ("fp16", "NO_WAIT")
    assert config.hv.timeout_waiting_for_peers == 30.0
    assert len(named) == len([part for part in EVERY_FLAG if part.startswith("--")])
    assert {"lr", "torch_compile", "hv.compression", "ckpt.topk"} <= named


def test_muon_has_a_rate_and_a_weight_decay_of_its_own_and_is_not_for_reinforcement():
    config, named = parse_train_config(["--optimizer", "muon"])
    assert (config.lr, config.weight_decay, named) == (0.02, 2e-3, {"optimizer"})
    config, _ = parse_train_config(["--optimizer", "muon", "--lr", "0.1"])
    assert (config.lr, config.weight_decay) == (0.1, 2e-3)
    with pytest.raises(UserError, match="--optimizer muon is for pretraining"):
        parse_train_config(["--optimizer", "muon"], mode="grpo")


@pytest.mark.parametrize(
    ("word", "steps"),
    [("auto", AS_LONG_AS_THE_ROUND), (str(AS_LONG_AS_THE_ROUND), AS_LONG_AS_THE_ROUND), ("5", 5)],
)
def test_an_overlap_is_a_number_or_as_long_as_the_round(word, steps):
    config, _ = parse_train_config(["--hv.overlap-steps", word])
    assert config.hv.overlap_steps == steps


@pytest.mark.parametrize("word", ["-2", "1.5", "many"])
def test_no_other_overlap_is_taken(word):
    with pytest.raises(UserError, match="overlap-steps"):
        parse_train_config(["--hv.overlap-steps", word])


def test_snake_case_means_the_same():
    assert parse_train_config(SNAKE) == parse_train_config(EVERY_FLAG)


def test_the_short_names_mean_the_long_ones():
    short = ["--initial-peers", ADDRESS, OTHER, "--world-rank", "1", "--galaxy-size", "3", "--run-id", "x"]
    long = ["--hv.initial-peers", f"{ADDRESS},{OTHER}", "--hv.world-rank", "1", "--hv.galaxy-size", "3"]
    assert parse_train_config(short) == parse_train_config([*long, "--hv.run-id", "x"])


def test_flags_beat_toml_and_toml_beats_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f'lr = 0.5\nseed = 1\n[hv]\nlocal-steps = 9\ninitial_peers = "{ADDRESS}"\n')
    config, named = parse_train_config(["--config", str(path), "--lr", "0.25"])
    assert (config.lr, config.seed, config.hv.local_steps) == (0.25, 1, 9)
    assert config.hv.outer_lr == TrainConfig().hv.outer_lr
    assert named == {"lr", "seed", "hv.local_steps", "hv.initial_peers"}


def test_toml_written_is_read_back_to_the_same_configuration(tmp_path):
    config, _ = parse_train_config(EVERY_FLAG)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert parse_train_config(["--config", str(path)])[0] == config


def test_toml_can_be_limited_to_the_fields_that_were_named(tmp_path):
    config, named = parse_train_config(["--lr", "0.5", "--hv.local-steps", "3"])
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config, only=named))
    assert parse_train_config(["--config", str(path)]) == (config, named)


def test_a_batch_size_that_was_not_named_shrinks_to_fit():
    assert parse_train_config(["--total-batch-size", "24"])[0].per_device_train_batch_size == 24
    assert parse_train_config(["--total-batch-size", "72"])[0].per_device_train_batch_size == 24
    assert (
        with_fitting_batch_size(TrainConfig(total_batch_size=24), (), num_ranks=2).per_device_train_batch_size
        == 12
    )


def test_batch_sizes_that_cannot_be_divided_among_ranks_are_refused():
    with pytest.raises(UserError, match="this peer's 5 ranks"):
        with_fitting_batch_size(TrainConfig(total_batch_size=24), (), num_ranks=5)


def test_shared_values_carry_over_to_another_peer():
    ours, _ = parse_train_config(["--lr", "0.5", "--hv.local-steps", "3", "--total-batch-size", "24"])
    theirs = with_shared(TrainConfig(project="mine"), shared_values(ours))
    assert shared_values(theirs) == shared_values(ours)
    assert theirs.project == "mine"
    assert theirs.per_device_train_batch_size == 24


def test_the_manifest_says_nothing_of_a_peers_own_business():
    own = {
        "device",
        "run_dir",
        "per_device_train_batch_size",
        "hv.world_rank",
        "hv.initial_peers",
        "ckpt.path",
    }
    assert not own & shared_fields()
    assert {"lr", "seed", "path_model", "hv.local_steps", "hv.compression"} <= shared_fields()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1.0}, "0 or more"),
        ({"lr": float("nan")}, "finite"),
        ({"lr": "much"}, "unable to convert"),
        ({"lr": [1]}, "unable to convert"),
        ({"seq_length": True}, "not a whole number"),
        ({"seq_length": 1e300}, "or less"),
        ({"seed": 2**70}, "or less"),
        ({"hv.compression": "uniform4bit"}, f"is not one of {', '.join(CODEC_NAMES)}."),
        ({"device": "cuda"}, "this version of diloco does not know"),
        ({"sleep": 1}, "this version of diloco does not know"),
    ],
)
def test_a_manifest_is_checked_like_flags(values, message):
    with pytest.raises(UserError, match=message):
        with_shared(TrainConfig(), values)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(name, name) for name in CODEC_NAMES]
    + [("none", "fp32"), ("scaled-fp16", "fp16")]
    + [(f"{kind}8bit", "int8") for kind in ("uniform", "quantile", "blockwise")],
)
def test_codecs_go_by_our_names_and_by_hiveminds(given, meant):
    for flag in ("--hv.compression", "--hv.hivemind-compression"):
        assert parse_train_config([flag, given])[0].hv.compression == meant
    # A manifest may have either name; the configuration always has ours.
    assert with_shared(TrainConfig(), {"hv.compression": given}).hv.compression == meant


def test_needless_flags_are_remarked_upon_once_and_only_when_given():
    config, named = parse_train_config(EVERY_FLAG)
    assert [text.split()[0] for text in notes_on_unused_flags(config, named)] == [
        "--num-workers",
        "--hv.skip-load-from-peers",
    ]
    waits = replace(config, hv=replace(config.hv, all_reduce_strategy="WAIT_FOR_ALL"))
    assert any("--hv.matchmaking-time has no effect" in text for text in notes_on_unused_flags(waits, named))
    assert notes_on_unused_flags(TrainConfig(), flat_values(TrainConfig())) == []


@pytest.mark.parametrize(
    ("needless", "needed"),
    [
        ("--hv.mixing 0.5", "--hv.overlap-steps 2"),
        ("--hv.data-port 30003", "--hv.transport tcp"),
        ("--hv.announce-data-maddrs /ip4/10.0.0.1/tcp/0", "--hv.transport auto"),
    ],
)
def test_a_flag_that_another_one_makes_needless_is_remarked_upon(needless, needed):
    without = notes_on_unused_flags(*parse_train_config([*needless.split(), "--hv.transport", "libp2p"]))
    assert [text.partition(" has no effect")[0] for text in without] == [needless.split()[0]]
    assert notes_on_unused_flags(*parse_train_config([*needless.split(), *needed.split()])) == []


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP"])
def test_sharding_is_remarked_upon_in_grpo_which_has_none(strategy):
    (note,) = notes_on_unused_flags(*parse_train_config(["--sharding-strategy", strategy], mode="grpo"))
    assert note.startswith("--sharding-strategy has no effect")


def test_help_ends_the_process_without_an_error(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as exit_:
        parse_train_config(["--help"])
    assert exit_.value.code == 0
    assert "--per-device-train-batch-size" in capsys.readouterr().out


def test_the_manifest_says_how_many_samples_a_peer_trains_in_an_epoch():
    config = TrainConfig(total_batch_size=8)
    config = replace(config, hv=replace(config.hv, local_steps=6, num_fragments=2))
    assert Schedule.of(shared_values(config)).samples_per_block == 8 * 3
    # With --worker it names no batch size.
    assert Schedule.of({"hv.local_steps": 6}).samples_per_block is None


def test_the_manifest_bounds_the_tokens_that_a_peer_may_claim():
    config = TrainConfig(total_batch_size=8, seq_length=32)
    bound = config.hv.local_steps * 8 * 32
    assert Aggregation.of(shared_values(config)).max_tokens_per_epoch == bound
    assert Aggregation.of(shared_values(replace(config, mode="grpo"))).max_tokens_per_epoch == 0
