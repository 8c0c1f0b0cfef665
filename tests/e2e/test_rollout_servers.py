"""Inference servers in real processes: pushes, refusals, deaths, and no process left over."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from diloco.errors import UserError
from diloco.rl.own_server import OwnServer, ServerCommand
from diloco.rl.push import Publisher
from diloco.rl.rollouts import Rollouts
from diloco.rl.server_client import Sampling, ServerClient, ServerLost
from tests.support.commands import ROOT, wait_until
from tests.support.little_server import SocketServer
from tests.support.pushing import Trainer, check_pushes, check_refusals
from tests.support.rollouts import CLOSE, PROMPTS, SAMPLING, difference
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with tied embeddings, which servers get wrong more easily than untied ones."""
    path = tmp_path_factory.mktemp("served")
    tiny_llama(tied=True).save_pretrained(path)
    return path


def command(directory: Path, tmp_path: Path, *flags: str) -> ServerCommand:
    words = ["--model", str(directory), "--marks", str(tmp_path / "died"), *flags]
    return ServerCommand(
        argv=[sys.executable, "-m", "tests.support.little_server", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        log_path=tmp_path / "logs" / "server.log",
        timeout_s=300,
    )


@contextlib.contextmanager
def serving(directory: Path, tmp_path: Path, *flags: str) -> Iterator[OwnServer]:
    with OwnServer(command(directory, tmp_path, *flags)) as server:
        server.start()
        yield server


def processes_of(socket: Path | str) -> list[str]:
    """Process ids of the little servers with this socket in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if os.fsencode(socket) in words and b"tests.support.little_server" in words:
                found.append(path.parent.name)
    return found


def sockets_of(pid: str) -> list[Path]:
    """The directory of the server's sockets, from this process's environment. The guardian's does not name it."""
    words = Path("/proc", pid, "environ").read_bytes().split(b"\0")
    name = b"VLLM_RPC_BASE_PATH="
    return [Path(word.removeprefix(name).decode()) for word in words if word.startswith(name)]


@contextlib.contextmanager
def training(directory: Path, tmp_path: Path, *flags: str) -> Iterator[Trainer]:
    with serving(directory, tmp_path, *flags) as server:
        yield Trainer(directory, server)
    assert processes_of(server.socket) == []


@pytest.fixture(scope="module")
def server(directory, tmp_path_factory):
    """A server for tests that leave it able to serve another trainer."""
    with serving(directory, tmp_path_factory.mktemp("server")) as server:
        yield server
    assert processes_of(server.socket) == []


def test_after_every_push_the_server_has_the_trainers_log_probabilities(directory, server):
    check_pushes(Trainer(directory, server))


@pytest.mark.exhaustive
def test_what_is_not_to_be_loaded_is_refused_by_name_and_the_old_weights_serve_on(directory, tmp_path):
    with training(directory, tmp_path) as trainer:
        check_refusals(trainer)


@pytest.mark.exhaustive
def test_a_server_killed_in_a_rollout_comes_back_with_the_current_weights_and_the_rollout_is_repeated(
    directory, tmp_path
):
    # The first request is the health check; the third is the second prompt of the rollout.
    with training(directory, tmp_path, "--die-after", "3") as trainer:
        trainer.push(1)
        written = trainer.rollouts.complete(PROMPTS, 2, SAMPLING, seed=5)
        assert difference(trainer.model, written) < CLOSE
        assert [len(one.token_ids) for one in written] == [2, 2]
        assert trainer.events == ["server_lost", "server_restarted"]
        again = trainer.rollouts.complete(PROMPTS, 2, SAMPLING, seed=5)
        assert [one.token_ids for one in again] == [one.token_ids for one in written]


@pytest.mark.exhaustive
def test_a_proxy_in_the_environment_stands_between_no_trainer_and_its_server(
    directory, tmp_path, monkeypatch
):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with training(directory, tmp_path) as trainer:
        trainer.push(1)
        assert trainer.is_close(3)


@pytest.mark.exhaustive
def test_what_a_server_will_never_do_is_asked_once_and_kills_no_server(directory, tmp_path):
    with training(directory, tmp_path) as trainer:
        trainer.publisher.take(trainer.model.named_parameters())
        with pytest.raises(
            UserError, match=r"do not fit into the server's context.*--grpo\.max-completion-length"
        ):
            trainer.rollouts.complete(PROMPTS, 1, Sampling(max_tokens=1_000_000), seed=1)
        assert trainer.events == []


def test_only_this_user_reaches_a_server_and_nothing_is_left_of_its_socket(directory, tmp_path):
    with serving(directory, tmp_path) as server:
        assert server.socket.is_socket() and server.socket.parent.stat().st_mode & 0o777 == 0o700
        processes = [psutil.Process(int(pid)) for pid in processes_of(server.socket)]
        assert processes and not [one for process in processes for one in process.net_connections("inet")]
    assert not server.socket.parent.exists()


def test_a_server_that_is_healthy_and_dies_of_its_first_request_is_an_error_that_says_so(directory, tmp_path):
    with (
        OwnServer(command(directory, tmp_path, "--sick")) as server,
        pytest.raises(UserError, match="did not start"),
    ):
        server.start()
    assert processes_of(server.socket) == []


def test_servers_die_with_a_trainer_that_is_killed(directory, tmp_path):
    told = command(directory, tmp_path)
    script = (
        "import sys, time; from pathlib import Path\n"
        "from diloco.rl.own_server import OwnServer, ServerCommand\n"
        f"server = OwnServer(ServerCommand(argv={list(told.argv)!r}, env={dict(told.env)!r},\n"
        f" log_path=Path({str(told.log_path)!r}), timeout_s=300))\n"
        "server.start(); print(server.socket, flush=True); time.sleep(600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=told.env, start_new_session=True
    )
    try:
        assert trainer.stdout is not None
        socket = trainer.stdout.readline().decode().strip()
        assert len(processes_of(socket)) >= 2
        sockets = [path for pid in processes_of(socket) for path in sockets_of(pid)]
        assert sockets and all(path.is_dir() for path in sockets)
        trainer.send_signal(signal.SIGKILL)
        wait_until(lambda: not processes_of(socket), "the end of the server", 15)
        wait_until(lambda: not any(path.exists() for path in sockets), "the end of its sockets", 15)
    finally:
        trainer.kill()
        trainer.wait()


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"results": []},
        {"results": 5},
        {"results": [{}]},
        {"results": [{"ok": False}]},
        {"results": [{"ok": True}]},
        {"results": [{"ok": True, "version": 1}]},
    ],
)
def test_an_answer_that_nobody_understands_is_a_lost_server(answer, tmp_path, monkeypatch):
    # Since tmp_path may be too long for the address of a Unix socket.
    monkeypatch.chdir(tmp_path)
    content = json.dumps(answer).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with SocketServer("socket", Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with pytest.raises(ServerLost):
            ServerClient(Path("socket")).served()
        server.shutdown()
        thread.join()


def test_a_server_that_another_trainer_pushes_to_is_noticed(server, tmp_path):
    trainers = [Rollouts(server, tmp_path, Publisher(torch.float32)) for _ in range(2)]
    for seed, trainer in enumerate(trainers):
        trainer.publisher.take(tiny_llama(seed=seed, tied=True).named_parameters())
        trainer.push()
    with pytest.raises(ServerLost, match="another trainer has changed"):
        trainers[0]._complete(PROMPTS, 1, SAMPLING, 1)
