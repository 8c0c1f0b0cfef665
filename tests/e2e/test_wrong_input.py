"""Input that cannot work is answered by one box and exit code 2, and leaves no process or file behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from diloco.cli.app import exit_code
from tests.support.commands import (
    DILOCO,
    TORCHRUN,
    TRAINER,
    Command,
    check_gone,
    check_nothing_left,
    model_directory,
    text_of_boxes,
    training_flags,
    wait_until,
)
from tests.support.exhaustive import exhaustive_but

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
PEER_ID = "12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
TRILLIONS = {
    "hidden_size": 65536,
    "intermediate_size": 262144,
    "num_hidden_layers": 160,
    "num_attention_heads": 512,
}

WRONG = {
    "mistyped verb": ("pear", 'Did you mean "peer"?'),
    "mistyped verb below dht": ("dht stat", 'Did you mean "start"?'),
    "mistyped flag": ("run --local-step 5", "Did you mean --hv.local-steps?"),
    "flag of another program": ("peer --learning-rate 1e-3", "Did you mean --lr?"),
    "another's name for the batch": ("run --batch-size 8", "Did you mean --total-batch-size?"),
    "epochs, as others call them": ("run --epochs 3", "Did you mean --total-steps?"),
    "stray word": ("peer now", "flags begin with two dashes"),
    "flag of the other verb": (
        "run --worker loop.py",
        "--worker is not a flag of this command, but of `diloco peer`",
    ),
    "flag without its value": ("peer --lr", "--lr needs a value"),
    "list flag without a value": ("dht start --host-maddrs", "--host-maddrs needs a value"),
    "argument that is missing": (
        "export EMPTY",
        "DIRECTORY is missing. Usage: diloco export CHECKPOINT DIRECTORY",
    ),
    "argument that is missing below ckpt": ("ckpt rebuild EMPTY", "OUT is missing"),
    "rate that is no number": ("peer --lr fast", 'unable to convert "fast" into float'),
    "rate that is not finite": ("peer --lr inf", "finite"),
    "no steps": ("peer --max-steps 0", "1 or more"),
    "half a step": ("peer --max-steps 1.5", "not a whole number"),
    "negative rank": ("peer --world-rank -1", "0 or more"),
    "unknown precision": ("peer --precision fp8", "Choose from"),
    "unknown attention": ("run --attn-implementation fast", "It must be one of sdpa"),
    "misspelt codec": ("run --hv.compression int3", 'Did you mean "int8"?'),
    "run id that is a path": ("peer --run-id ../other", "letters, digits"),
    "unknown logger": ("run --metric-logger-type mlflow", "is not one of wandb, tensorboard, dummy"),
    "too few peers for the rule": ("run --hv.aggregation trimmed-mean", "use --peers 3"),
    "no peer to lose": ("run --peers 2 --lose-peer 2", "the highest world rank is 1"),
    "TOML that is not there": ("run --config /nowhere/run.toml", "No such file"),
    "TOML that is none": ("run --config BROKEN_TOML", "broken.toml is not"),
    "another's name in TOML": ("run --config OTHERS_TOML", 'Unknown key "learning_rate" in'),
    "unknown key in TOML": ("run --config TOML", 'Did you mean "hv.local_steps"?'),
    "batches that do not divide": (
        "peer --total-batch-size 10 --per-device-train-batch-size 4",
        "use --per-device-train-batch-size 2",
    ),
    "ranks that do not divide": ("peer --total-batch-size 10 --nproc-per-node 3", "3 ranks"),
    "fragments that do not divide": ("run --hv.num-fragments 3 --hv.local-steps 10", "12 steps would do"),
    "more fragments than layers": (
        "run --path-model demo --hv.num-fragments 50",
        "demo has 3 layers, too few for --hv.num-fragments 50",
    ),
    "nobody to join": ("peer", "--initial-peers is missing"),
    "address of an empty variable": ("peer --world-rank 0 --initial-peers=", "has no value"),
    "address that is none": ("peer --initial-peers somewhere", "is not an address"),
    "host and port of a peer": (
        "status --initial-peers 127.0.0.1:30001",
        "copy the whole address that `diloco dht start` prints, like /ip4/203.0.113.7/tcp/30001/p2p/12D3KooW…",
    ),
    "address without a peer": (
        "peer --initial-peers /ip4/127.0.0.1/tcp/1",
        "lacks the peer's id at its end; copy the whole address that `diloco dht start` prints, like /ip4/",
    ),
    "address that is cut short": (
        "peer --initial-peers /ip4/127.0.0.1/tcp/1/p2p/12D3",
        "copy the whole address",
    ),
    "port in use, of the peer": (
        "peer --world-rank 0 --host-maddrs /ip4/127.0.0.1/tcp/OTHER",
        "port OTHER is in use",
    ),
    "port in use, for gradients": (
        "peer --world-rank 0 --host-maddrs /ip4/127.0.0.1/tcp/0 --hv.data-port OTHER",
        "port OTHER is in use",
    ),
    "port in use, for figures": ("peer --world-rank 0 --hv.metrics-port OTHER", "port OTHER is in use"),
    "port in use, of the coordinator": (
        "dht start --host-maddrs /ip4/127.0.0.1/tcp/OTHER",
        "port OTHER is in use",
    ),
    "key that is none": ("dht start --identity-path FILE", "is not a libp2p private key"),
    "model path that leads nowhere": ("peer --path-model /nowhere/model", "is not a model"),
    "vocabulary that cannot hold the bytes": (
        "run --path-model NARROW",
        "knows 100 token ids, but has no tokenizer, so text is read byte by byte, which takes 264",
    ),
    "directory without a model": ("run --path-model EMPTY", "has no config.json"),
    "model whose config.json is broken": ("run --path-model BROKEN_MODEL", "is not a model's config.json"),
    "model too large for the machine": ("peer --world-rank 0 --path-model HUGE", "GiB of memory, "),
    "models too large for the machine": ("run --path-model HUGE", "GiB of memory for 2 peers"),
    "batch too large for the machine": (
        "run --path-model 2m --per-device-train-batch-size 2000000 --total-batch-size 2000000",
        "a smaller --per-device-train-batch-size",
    ),
    "GPUs that are not there": ("run --device cuda", "no GPU here"),
    "data that is not there": ("peer --dataset-name-or-path /nowhere/text", "there is no /nowhere/text"),
    "data of another kind": ("run --dataset-name-or-path NO_TEXT", "has no column with text"),
    "the data of the other mode": (
        "run --dataset EMPTY",
        "is for --mode grpo, which is not given. To pretrain on it: --dataset-name-or-path",
    ),
    "empty file": ("run --dataset-name-or-path EMPTY_FILE", "holds no text"),
    "empty directory": ("run --dataset-name-or-path EMPTY", "so there is no text to train on"),
    "tiny data": ("run --dataset-name-or-path SHORT", "has 10 bytes of text, too few"),
    "broken JSONL": ("run --dataset-name-or-path BROKEN_JSONL", "broken.jsonl, line 3 is not JSON"),
    "JSONL that is not UTF-8": ("run --dataset-name-or-path LATIN", "latin.jsonl, line 2 is not UTF-8"),
    "broken Parquet": ("run --dataset-name-or-path PARQUET", "is not a readable Parquet file"),
    "binary file": ("run --dataset-name-or-path BINARY", "holds NUL bytes, so it is not text"),
    "baseline of reinforcement": (
        "run --mode grpo --path-model 2m --baseline",
        "--baseline is for pretraining",
    ),
    "unknown task": ("run --mode grpo --dataset sums", "--dataset sums is no task"),
    "checkpoint that is not there": ("run --ckpt.resume /nowhere", "there is no such directory"),
    "checkpoint to export that is not there": (
        "export /nowhere out",
        "/nowhere does not exist; give the directory",
    ),
    "checkpoints below a file": (
        "run --ckpt.path FILE/ckpt --ckpt.interval 5",
        "cannot be written to: Not a directory",
    ),
    "run directory below a file": ("run --run-dir FILE/run", "cannot be written to: Not a directory"),
    "run directory on a full disk": (
        "run --path-model 2m --run-dir FULL/run",
        "run directory: FULL/run: 4 MiB free, ",
    ),
    "program that is not there": ("peer --world-rank 0 --worker ./train", "names no program"),
    "checkpoints at a URL of no kind": (
        "run --ckpt.path s4://bucket --ckpt.interval 5",
        "fsspec does not support s4://",
    ),
}


FILES = {
    "FILE": ("file", b"not what you think\n"),
    "TOML": ("run.toml", b"[hv]\nlocal_step = 5\n"),
    "BROKEN_TOML": ("broken.toml", b"lr = ["),
    "OTHERS_TOML": ("others.toml", b"learning_rate = 1.0\n"),
    "SHORT": ("short.txt", b"few words\n"),
    "EMPTY_FILE": ("empty.txt", b""),
    "BINARY": ("binary.txt", b"text\n\0\1\2"),
    "NO_TEXT": ("no_text.jsonl", b'{"number": 1}\n{"number": 2}\n'),
    "BROKEN_JSONL": ("broken.jsonl", b'{"text": "a"}\n\n{"text": "b"\n'),
    "LATIN": ("latin.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n'),
    "PARQUET": ("broken.parquet", b"PAR1 and nothing else"),
}


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The values of the placeholders (words in capitals) in the table of wrong input."""
    root = tmp_path_factory.mktemp("places")
    for name in ("empty", "broken_model", "full"):
        (root / name).mkdir()
    (root / "broken_model" / "config.json").write_text('{"model_type":')
    for name, content in FILES.values():
        (root / name).write_bytes(content)
    full = root / "full"
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "diloco-test", full], check=True)
    with socket.socket() as taken, socket.socket() as closed:
        for sock in (taken, closed):
            sock.bind(("127.0.0.1", 0))
        taken.listen()
        yield {
            **{word: str(root / name) for word, (name, _) in FILES.items()},
            "EMPTY": str(root / "empty"),
            "NARROW": str(model_directory(root / "narrow", vocab_size=100)),
            "BROKEN_MODEL": str(root / "broken_model"),
            "HUGE": str(model_directory(root / "huge", **TRILLIONS)),
            "FULL": str(full),
            "OTHER": str(taken.getsockname()[1]),
            "CLOSED": str(closed.getsockname()[1]),
        }
    if os.geteuid() == 0:
        subprocess.run(["umount", full], check=True)


def placed(text: str, places: dict[str, str]) -> str:
    # The longest first: some placeholders contain others.
    for word in sorted(places, key=len, reverse=True):
        text = text.replace(word, places[word])
    return text


def check_refused(command: Command, message: str, code: int = 2) -> None:
    """The command ends with this code and one box with this message, and leaves nothing behind."""
    assert command.wait() == code, command.stderr
    check_gone(command)
    boxes = text_of_boxes(command.stderr)
    assert len(boxes) == 1, command.stderr
    assert message in boxes[0]
    if code == 2:
        assert "Traceback" not in command.stderr
    check_nothing_left(command)


def processes_of_ours() -> set[psutil.Process]:
    """Descendants of this process, without multiprocessing's resource tracker: it starts on first use and stays."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                found.add(process)
    return found


@pytest.mark.parametrize(("line", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said_in_a_sentence_before_anything_starts(
    line, message, places, tmp_path, monkeypatch, capfd
):
    """Runs the command in this process, which saves the imports of a new one."""
    if "FULL" in line and os.geteuid() != 0:
        pytest.skip("only root can mount a disk that is full")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others, began = processes_of_ours(), time.thread_time()
    assert exit_code(placed(line, places).split()) == 2
    assert time.thread_time() - began < 6
    said = capfd.readouterr()
    (box,) = text_of_boxes(said.err)
    assert placed(message, places) in box and len(box) < 500
    # Only the box is printed, no process was started, and no file is left.
    assert said.out == ""
    assert said.err.startswith("╭─ diloco ─") and said.err.endswith("╯\n")
    assert processes_of_ours() <= others
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name.startswith("diloco-")] == []


@pytest.mark.parametrize(
    "name",
    exhaustive_but(
        ("mistyped verb", "port in use, of the peer"),
        ["mistyped verb", "port in use, of the peer", "broken Parquet"],
    ),
)
def test_a_command_says_no_more_than_that(name, start, places):
    line, message = WRONG[name]
    command = start(*DILOCO, *placed(line, places).split())
    check_refused(command, placed(message, places))
    assert command.stdout == ""
    assert command.stderr.startswith("╭─ diloco ─") and command.stderr.endswith("╯\n")


@pytest.mark.exhaustive
def test_a_directory_that_cannot_be_written_to_is_named(start):
    command = start(*DILOCO, "run", cwd="/proc")
    check_refused(command, "run directory: runs cannot be written to")


@pytest.mark.exhaustive
def test_initial_peers_that_do_not_answer_are_named(start, places):
    address = f"/ip4/127.0.0.1/tcp/{places['CLOSED']}/p2p/{PEER_ID}"
    command = start(*DILOCO, "peer", "--world-rank", "0", *LOOPBACK, "--initial-peers", address)
    check_refused(command, f"{address}: connection refused", code=1)


def test_a_worker_by_hand_refuses_a_model_that_does_not_fit(start, places):
    command = start(*DILOCO[:1], *TRAINER, *training_flags(Path(places["HUGE"])))
    check_refused(command, "GiB of memory, ")


@dataclass
class LiveSwarm:
    """A coordinator and one peer, which trains as world rank 0."""

    address: str
    peer: Command
    run_dir: Path

    @property
    def num_steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count('"kind": "step"') if path.exists() else 0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[LiveSwarm]:
    directory = tmp_path_factory.mktemp("swarm")
    flags = training_flags(model, run_dir=directory / "run", **{"hv.local-steps": 2})
    coordinator = Command([*DILOCO, "dht", "start", *LOOPBACK], directory / "dht")
    peer = None
    try:
        line = wait_until(lambda: coordinator.stdout, "the coordinator's address", command=coordinator)
        address = line.split()[1]
        peer = Command([*DILOCO, "peer", "--initial-peers", address, *LOOPBACK, *flags], directory / "peer")
        live = LiveSwarm(address, peer, directory / "run")
        wait_until(lambda: live.num_steps, "the first step", command=peer)
        yield live
    finally:
        coordinator.close()
        if peer is not None:
            peer.close()


@pytest.mark.exhaustive
def test_a_run_without_a_coordinator_is_told_from_one_that_has_it(swarm, start, model):
    flags = ("--initial-peers", swarm.address, "--run-id", "another")
    command = start(*DILOCO, "peer", *LOOPBACK, *flags, *training_flags(model))
    check_refused(command, "no coordinator answers", code=1)


@pytest.mark.exhaustive
def test_a_model_that_differs_from_the_swarms_goes_by_its_name(swarm, start):
    flags = ("--initial-peers", swarm.address, "--path-model", "demo")
    command = start(*DILOCO, "peer", *LOOPBACK, *flags)
    check_refused(command, "model: here ")


@pytest.mark.exhaustive
def test_a_world_rank_that_a_live_peer_has_is_refused(swarm, start, model):
    command = start(
        *DILOCO,
        "peer",
        "--initial-peers",
        swarm.address,
        *LOOPBACK,
        "--world-rank",
        0,
        *training_flags(model),
    )
    check_refused(command, "world rank 0 is taken by the live peer")


def test_settings_that_differ_from_the_swarms_are_listed(swarm, start, model):
    flags = training_flags(model, seq_length=32, **{"hv.local-steps": 3})
    command = start(*DILOCO, "peer", "--initial-peers", swarm.address, *LOOPBACK, *flags)
    check_refused(command, "settings differ from the swarm's")
    said = text_of_boxes(command.stderr)[0]
    assert "hv.local_steps: here 3, in the swarm 2" in said and "seq_length" in said and "batch" not in said


@pytest.mark.exhaustive
def test_a_program_of_the_users_own_is_refused_where_the_swarm_trains_with_ours(swarm, start):
    flags = ("--initial-peers", swarm.address, "--worker", "python -c pass")
    command = start(*DILOCO, "peer", *LOOPBACK, *flags)
    check_refused(command, "with diloco's trainer, this peer with a program of its own")


@pytest.mark.exhaustive
def test_two_ranks_under_torchrun_print_one_box(swarm, start, model):
    flags = training_flags(model, per_device_train_batch_size=2, **{"hv.local-steps": 3})
    command = start(
        *TORCHRUN,
        *("--standalone", *TRAINER, "--hv.initial-peers", swarm.address, "--hv.world-rank", 1),
        *("--hv.host-maddrs", LOOPBACK[1], *flags),
    )
    # The exit code is torchrun's own.
    check_refused(command, "settings differ from the swarm's", code=1)


def test_the_swarm_trains_on_past_all_who_were_refused(swarm):
    before = swarm.num_steps
    wait_until(lambda: swarm.num_steps > before, "another step", command=swarm.peer)
