"""A program of the user's own as the worker of a peer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import peers.daemon
from diloco.cli.machine_recipes import Choice, chosen
from diloco.cli.peer import NO_CHECKPOINTS, WorkerSetup, app, note_on_ignored_flags, parse_worker
from diloco.errors import UserError
from diloco.launch.peer_workers import PRINTED_LOGGERS
from diloco.options.flags import CkptConfig
from diloco.options.trainer import TrainConfig
from diloco.train.devices import Machine

MADDR = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWLZxmnhnSbbNQmXZkBCVKnsYEdqSbmuPkFNTR8k2rDCz5"


def test_the_words_of_a_program_are_split_as_a_shell_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").touch()
    assert parse_worker(None) == ()
    assert parse_worker('python loop.py --name "two words"') == ("python", "loop.py", "--name", "two words")


@pytest.mark.parametrize(
    "worker",
    [
        'bash -c "cd sub && python loop.py"',
        "env A=b.py true",
        "python -m http.server --directory x.py",
        "bash run.py",
    ],
)
def test_only_the_script_of_an_interpreter_has_to_be_there(worker):
    assert parse_worker(worker)


@pytest.mark.parametrize("worker", ["", "no-such-program loop.py", 'python "loop.py', "python loop.py"])
def test_a_program_that_cannot_be_started_is_refused(worker):
    with pytest.raises(UserError, match="--worker"):
        parse_worker(worker)


def test_flags_without_effect_on_a_program_are_named():
    assert note_on_ignored_flags({"hv.local_steps", "run_dir", "device", "optimizer"}) == ""
    said = note_on_ignored_flags({"ckpt.interval", "total_steps", "hv.local_steps"})
    assert said.startswith("--ckpt.interval, --total-steps: no effect with --worker")


def test_a_program_runs_by_the_python_of_its_peer_and_finds_its_daemon(tmp_path):
    workers = WorkerSetup(Choice(config=TrainConfig()), frozenset(), tmp_path, "1", 0, ("python", "loop.py"))
    command = workers.command({}, False, 3, tmp_path / "link.sock")
    assert command.argv == ("python", "loop.py")
    assert command.env["DILOCO_LINK"] == str(tmp_path / "link.sock")
    assert command.env["PATH"].split(":")[0] == str(Path(sys.executable).parent)


def test_without_one_the_trainer_reads_what_the_swarm_agreed_on(tmp_path):
    workers = WorkerSetup(Choice(config=TrainConfig()), frozenset(), tmp_path, "1", 0)
    command = workers.command({"seq_length": 77}, False, 3, tmp_path / "link.sock")
    assert command.argv[1:] == ("-m", "diloco.train_fsdp", "--config", str(tmp_path / "config.toml"))
    assert "seq_length = 77" in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize(
    ("is_own", "interval", "is_said"), [(True, None, True), (True, 100, False), (False, None, False)]
)
def test_the_first_peer_says_what_becomes_of_a_run_without_checkpoints(
    tmp_path, capsys, is_own, interval, is_said
):
    config = TrainConfig(ckpt=CkptConfig(interval=interval))
    workers = WorkerSetup(Choice(config=config), frozenset(), tmp_path, "1", 0)
    workers.command({}, is_own, 3, tmp_path / "link.sock")
    assert (NO_CHECKPOINTS in capsys.readouterr().out) == is_said


def test_who_joins_trains_as_the_swarm_does_whatever_it_would_have_chosen(tmp_path, capsys):
    choice = chosen(TrainConfig(), (), Machine(num_cores=2, memory_bytes=None))
    workers = WorkerSetup(choice, frozenset(), tmp_path, "1", 0)
    workers.command({}, False, 0, tmp_path / "link.sock")
    assert "; as the swarm does" in capsys.readouterr().out


def test_a_peer_that_joins_a_run_of_reinforcement_starts_that_trainer(tmp_path):
    workers = WorkerSetup(Choice(config=TrainConfig()), frozenset(), tmp_path, "1", 0)
    command = workers.command({"mode": "grpo", "grpo.dataset": "gsm8k"}, False, 3, tmp_path / "link.sock")
    assert command.argv[1:] == ("-m", "diloco.train_grpo", "--config", str(tmp_path / "config.toml"))
    assert 'dataset = "gsm8k"' in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize(
    ("batch_size", "num_gpus", "ranks"), [(56, 8, 7), (64, 8, 4), (64, 4, 2), (64, 1, 1)]
)
def test_who_joins_a_run_of_reinforcement_leaves_a_gpu_to_the_server_and_divides_the_runs_batch(
    tmp_path, capsys, batch_size, num_gpus, ranks
):
    workers = WorkerSetup(Choice(config=TrainConfig()), frozenset(), tmp_path, "auto", num_gpus)
    manifest = {"mode": "grpo", "grpo.dataset": "gsm8k", "total_batch_size": batch_size}
    assert workers.command(manifest, False, 3, tmp_path / "link.sock").num_ranks == ranks
    is_less = ranks < max(num_gpus - 1, 1)
    assert ("--total-batch-size is 64, which is not a multiple of" in capsys.readouterr().err) == is_less


@pytest.mark.parametrize(
    ("flags", "num_gpus", "ranks", "batch_size"),
    [
        (["--mode", "grpo", "--path-model", "tiny-grpo"], 8, 7, 56),
        (["--mode", "grpo", "--path-model", "tiny-grpo", "--total-batch-size", "64"], 8, 4, 64),
        (["--path-model", "my-own"], 6, 6, 510),
    ],
)
def test_the_first_peer_which_enters_by_the_coordinator_too_trains_on_all_gpus_that_its_batch_allows(
    monkeypatch, flags, num_gpus, ranks, batch_size
):
    gpus = Machine(num_cores=64, gpus=tuple(map(str, range(num_gpus))), gpu_bytes=80 << 30)
    seen = []

    def check(train, *_, num_ranks, **__):
        seen.append((num_ranks, train.total_batch_size))
        raise UserError("far enough")

    monkeypatch.setattr("diloco.cli.peer.this_machine", lambda *_, **__: gpus)
    monkeypatch.setattr("diloco.doctor.before_start.check_choices", lambda *_, **__: None)
    monkeypatch.setattr("diloco.doctor.before_start.check_memory_and_disk", check)
    monkeypatch.setattr("diloco.launch.swarm_config.daemon_config", lambda *_, **__: {})
    with pytest.raises(UserError, match="far enough"):
        app(["--initial-peers", MADDR, *flags], exit_on_error=False, print_error=False)
    assert seen == [(ranks, batch_size)]


def test_a_program_of_the_users_own_gets_all_gpus_whatever_the_batch_size_of_our_trainers(tmp_path):
    workers = WorkerSetup(
        Choice(config=TrainConfig()), frozenset(), tmp_path, "auto", 3, ("python", "loop.py")
    )
    assert workers.command({}, False, 3, tmp_path / "link.sock").num_ranks == 3


def test_what_the_daemon_says_of_its_life_is_told_in_the_terminal():
    """Except the addresses on which it listens (peers.daemon.presence), which stay in its log."""
    folder = Path(peers.daemon.__file__).parent
    texts = {f"peers.daemon.{path.stem}": path.read_text() for path in folder.glob("*.py")}
    assert {name for name in texts if "log.info(" in texts[name]} - {"peers.daemon.presence"} <= set(
        PRINTED_LOGGERS
    )
    assert all("log." in texts[name] for name in PRINTED_LOGGERS)
