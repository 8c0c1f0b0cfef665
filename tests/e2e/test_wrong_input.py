"""What a user reads who gave something that cannot work: one box, exit code 2, and nothing left of the attempt."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

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

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
PEER_ID = "12D3KooWHMXMfxzB2bW1hADjf1JAuC8oCiCpB1mtKpS8y6N1QwMW"
TRILLIONS = {
    "hidden_size": 65536,
    "intermediate_size": 262144,
    "num_hidden_layers": 160,
    "num_attention_heads": 512,
}

BEFORE_ANYTHING_STARTS = {
    "unknown flag": (["run", "--local-step", "5"], "Did you mean --hv.local-steps?"),
    "address that is none": (["peer", "--initial-peers", "127.0.0.1:30001"], "is not an address like"),
    "neither an address nor a world rank": (["peer"], "--initial-peers is missing"),
    "model path that is not one": (["peer", "--path-model", "/nowhere/model"], "is not a model"),
    "model directory without a model": (["run", "--path-model", "EMPTY"], "has no config.json"),
    "data that is not there": (
        ["peer", "--dataset-name-or-path", "/nowhere/text"],
        "there is no /nowhere/text",
    ),
    "data without text": (["run", "--dataset-name-or-path", "NO_TEXT"], "text"),
    "batch sizes that do not divide": (
        ["peer", "--total-batch-size", "10", "--per-device-train-batch-size", "4"],
        "--per-device-train-batch-size 2 would do",
    ),
    "unknown key in TOML": (["run", "--config", "TOML"], 'Did you mean "hv.local_steps"?'),
    "not enough memory for one peer": (["peer", "--path-model", "HUGE"], "GiB of memory, "),
    "not enough memory for several peers": (["run", "--path-model", "HUGE"], "GiB of memory for 2 peers"),
    "run directory below a file": (["run", "--run-dir", "FILE/run"], "cannot be made: Not a directory"),
    "identity that is no key": (["dht", "start", "--identity-path", "FILE"], "is not a libp2p private key"),
}


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the capital words in the tables stand for."""
    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    (root / "no_text").mkdir()
    (root / "no_text" / "numbers.jsonl").write_text('{"number": 1}\n{"number": 2}\n')
    (root / "short.txt").write_text("few words\n")
    (root / "run.toml").write_text("[hv]\nlocal_step = 5\n")
    (root / "file").write_text("not what you think\n")
    return {
        "EMPTY": str(root / "empty"),
        "NO_TEXT": str(root / "no_text"),
        "SHORT": str(root / "short.txt"),
        "TOML": str(root / "run.toml"),
        "FILE": str(root / "file"),
        "HUGE": str(model_directory(root / "huge", **TRILLIONS)),
    }


def placed(argv: list[str], places: dict[str, str]) -> list[str]:
    for word, path in places.items():
        argv = [part.replace(word, path) for part in argv]
    return argv


def check_refused(command: Command, message: str, code: int = 2) -> None:
    """The command ends with one box that says this, and leaves nothing behind."""
    assert command.wait() == code, command.stderr
    check_gone(command)
    boxes = text_of_boxes(command.stderr)
    assert len(boxes) == 1, command.stderr
    assert message in boxes[0]
    if code == 2:
        assert "Traceback" not in command.stderr
    check_nothing_left(command)


@pytest.mark.parametrize(
    ("argv", "message"), BEFORE_ANYTHING_STARTS.values(), ids=BEFORE_ANYTHING_STARTS.keys()
)
def test_what_can_be_known_at_once_is_refused_at_once(argv, message, start, places):
    command = start(*DILOCO, *placed(argv, places))
    check_refused(command, message)
    assert not (command.directory / "runs").exists()


def test_a_directory_that_cannot_be_written_to_is_named(start):
    command = start(*DILOCO, "run", cwd="/proc")
    check_refused(command, "--run-dir runs/")


@pytest.mark.parametrize("verb", [("dht", "start"), ("peer", "--world-rank", "0")], ids=lambda verb: verb[0])
def test_a_port_in_use_is_named(verb, start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = start(*DILOCO, *verb, "--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}")
        check_refused(command, f"port {port} is in use")


def test_initial_peers_that_do_not_answer_are_named(start):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{PEER_ID}"
        command = start(*DILOCO, "peer", "--world-rank", "0", *LOOPBACK, "--initial-peers", address)
        check_refused(command, f"{address}: connection refused")


def test_a_peer_says_what_its_worker_found_wrong_with_the_dataset(start, model, places):
    flags = training_flags(model, fake_data=None, dataset_name_or_path=places["SHORT"])
    command = start(*DILOCO, "peer", "--world-rank", "0", *LOOPBACK, *flags)
    check_refused(command, "has 11 tokens, too few")


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


def test_a_run_without_a_coordinator_is_told_from_one_that_has_it(swarm, start, model):
    flags = ("--initial-peers", swarm.address, "--run-id", "another")
    command = start(*DILOCO, "peer", *LOOPBACK, *flags, *training_flags(model))
    check_refused(command, "no coordinator answers")


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
