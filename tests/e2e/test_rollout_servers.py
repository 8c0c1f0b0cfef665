"""Everything around an inference server, on real processes: pushes, refusals, deaths, leases, and nothing left over."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diloco.errors import UserError
from diloco.rl.blob_server import BlobServer
from diloco.rl.fleet import Fleet, Sampling, _rpc, _served
from diloco.rl.generation import Servers
from diloco.rl.http_json import ServerLost
from diloco.rl.own_server import OwnServer, ServerCommand, _free_port
from diloco.rl.publisher import Publisher
from tests.support.commands import ROOT, wait_until
from tests.support.rollouts import CLOSE, PROMPTS, SAMPLING, difference, orders, train_a_little
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model whose head is tied to its embeddings, which servers get wrong more easily."""
    path = tmp_path_factory.mktemp("served")
    tiny_llama(tied=True).save_pretrained(path)
    return path


def command(directory: Path, tmp_path: Path, *flags: str, port: int = 0, name: str = "ours") -> ServerCommand:
    port = port or _free_port()
    words = ["--model", str(directory), "--port", str(port), "--marks", str(tmp_path / "died"), *flags]
    words += ["--served-model-name", name]
    return ServerCommand(
        argv=[sys.executable, "-m", "tests.support.little_server", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        port=port,
        model_name=name,
        log_path=tmp_path / "logs" / "server.log",
        timeout_s=60,
    )


@contextlib.contextmanager
def serving(directory: Path, tmp_path: Path, *flags: str, name: str = "ours") -> Iterator[OwnServer]:
    with OwnServer(command(directory, tmp_path, *flags, name=name)) as server:
        server.start()
        yield server


def processes_of(port: int) -> list[str]:
    """Command lines that name the port."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(port).encode() in words and b"tests.support.little_server" in words:
                found.append(path.parent.name)
    return found


def sockets_of(pid: str) -> list[Path]:
    """Where the server's processes meet; its guardian, which makes the place, is not told."""
    words = Path("/proc", pid, "environ").read_bytes().split(b"\0")
    name = b"VLLM_RPC_BASE_PATH="
    return [Path(word.removeprefix(name).decode()) for word in words if word.startswith(name)]


def test_after_every_push_the_server_has_the_trainers_log_probabilities(directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    publisher = Publisher(torch.float32)
    with serving(directory, tmp_path) as server:
        fleet = Fleet([server.url], publisher)
        kinds = []
        for step, share in enumerate((1.0, 0.01, 1.0)):
            train_a_little(model, step, share=share)
            publisher.take(model.named_parameters())
            fleet.push()
            kinds.append(fleet.pushed[0]["is_patch"])
            assert difference(model, fleet.complete(PROMPTS, 2, SAMPLING, seed=step)) < CLOSE
        assert kinds == [False, True, False]
        train_a_little(model, 9)
        assert difference(model, fleet.complete(PROMPTS, 2, SAMPLING, seed=9)) > CLOSE, (
            "no push, other weights"
        )
        fleet.close()
    assert processes_of(server.command.port) == []


def test_what_is_not_to_be_loaded_is_refused_by_name_and_the_old_weights_serve_on(directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    publisher = Publisher(torch.float32)
    with serving(directory, tmp_path) as server:
        fleet, blobs = Fleet([server.url], publisher), BlobServer("127.0.0.1")
        for step in range(2):
            train_a_little(model, step)
            publisher.take(model.named_parameters())
            fleet.push()
        before = _rpc(server.url, "diloco_state")
        for blob, version, sha256, words in orders(publisher.state, before["version"]):
            [(url, true_sha256)] = blobs.publish([blob])
            parts = [[url, sha256 or true_sha256]]
            order = {"publisher": publisher.name, "version": version, "parts": parts, "timeout_s": 10}
            answer = _rpc(server.url, "diloco_pull", order=json.dumps(order))
            assert not answer["ok"] and not answer.get("fatal")
            assert re.search(words, answer["error"]), answer["error"]
            assert _rpc(server.url, "diloco_state") == before
        assert difference(model, fleet.complete(PROMPTS, 2, SAMPLING, seed=3)) < CLOSE
        blobs.close()
        fleet.close()


def test_a_server_killed_in_a_rollout_comes_back_with_the_current_weights_and_the_rollout_is_repeated(
    directory, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    train_a_little(model, 1)
    events = []
    # The first request is that of the health check; the third is the second prompt of the rollout.
    with serving(directory, tmp_path, "--die-after", "3") as server:
        publisher = Publisher(torch.float32)
        publisher.take(model.named_parameters())
        servers = Servers(
            Fleet([server.url], publisher), server, lambda **event: events.append(event["event"])
        )
        servers.push()
        written = servers.complete(PROMPTS, 2, SAMPLING, seed=5)
        assert difference(model, written) < CLOSE
        assert [len(one.token_ids) for one in written] == [2, 2]
        assert events == ["server_lost", "server_restarted"] and server.num_restarts == 1
        again = servers.complete(PROMPTS, 2, SAMPLING, seed=5)
        assert [one.token_ids for one in again] == [one.token_ids for one in written]
        servers.close()
    assert processes_of(server.command.port) == []


def test_a_download_that_breaks_off_and_an_order_that_is_none_leave_the_old_weights_serving(
    directory, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    publisher = Publisher(torch.float32)
    with serving(directory, tmp_path) as server, socket.create_server(("127.0.0.1", 0)) as sender:
        fleet = Fleet([server.url], publisher)
        train_a_little(model, 1)
        publisher.take(model.named_parameters())
        fleet.push()
        before = _rpc(server.url, "diloco_state")

        def die_while_sending() -> None:
            connection, _ = sender.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")

        dying = threading.Thread(target=die_while_sending)
        dying.start()
        url = f"http://127.0.0.1:{sender.getsockname()[1]}/blob"
        order = {"publisher": publisher.name, "version": 7, "parts": [[url, "0" * 64]], "timeout_s": 10}
        answer = _rpc(server.url, "diloco_pull", order=json.dumps(order))
        dying.join()
        assert "IncompleteRead" in answer["error"] and answer["unfetched"]
        for none in ("", "[]", "{}", json.dumps({**order, "parts": [["http://[", "0"]]})):
            assert "it is no order" in _rpc(server.url, "diloco_pull", order=none)["error"]
        assert not _rpc(server.url, "diloco_lease", owner=publisher.name, seconds="soon")["ok"]
        assert _rpc(server.url, "diloco_state") == before
        assert difference(model, fleet.complete(PROMPTS, 1, SAMPLING, seed=3)) < CLOSE
        fleet.close()


def test_a_proxy_in_the_environment_stands_between_no_trainer_and_its_server(
    directory, tmp_path, monkeypatch
):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    publisher = Publisher(torch.float32)
    with serving(directory, tmp_path) as server:
        fleet = Fleet([server.url], publisher)
        publisher.take(model.named_parameters())
        fleet.push()
        assert difference(model, fleet.complete(PROMPTS, 1, SAMPLING, seed=3)) < CLOSE
        fleet.close()


def test_what_a_server_will_never_do_is_asked_once_and_kills_no_server(directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    publisher = Publisher(torch.float32)
    with serving(directory, tmp_path) as server:
        servers = Servers(Fleet([server.url], publisher), server, lambda **_: None)
        publisher.take(model.named_parameters())
        with pytest.raises(UserError, match=r"context is shorter.*--grpo\.max-completion-length"):
            servers.complete(PROMPTS, 1, Sampling(max_tokens=1_000_000), seed=1)
        assert server.num_restarts == 0
        servers.close()


def test_a_server_is_not_taken_for_another_one_at_its_port(directory, tmp_path):
    with serving(directory, tmp_path, name="first") as first:
        port = first.command.port
        second = OwnServer(command(directory, tmp_path / "second", port=port, name="second"))
        with pytest.raises(UserError, match=f"another server has port {port}"):
            second.start()


def test_a_server_that_is_healthy_and_dies_of_its_first_request_is_an_error_that_says_so(directory, tmp_path):
    with (
        OwnServer(command(directory, tmp_path, "--sick")) as server,
        pytest.raises(UserError, match="does not serve"),
    ):
        server.start()
    assert processes_of(server.command.port) == []


def test_servers_die_with_a_trainer_that_is_killed(directory, tmp_path):
    told = command(directory, tmp_path)
    script = (
        "import sys, time; from pathlib import Path\n"
        "from diloco.rl.own_server import OwnServer, ServerCommand\n"
        f"server = OwnServer(ServerCommand(argv={list(told.argv)!r}, env={dict(told.env)!r}, port={told.port},\n"
        f" model_name={told.model_name!r}, log_path=Path({str(told.log_path)!r}), timeout_s=60))\n"
        "server.start(); print('up', flush=True); time.sleep(600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=told.env, start_new_session=True
    )
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"up\n"
        assert len(processes_of(told.port)) >= 2
        sockets = [path for pid in processes_of(told.port) for path in sockets_of(pid)]
        assert sockets and all(path.is_dir() for path in sockets)
        trainer.send_signal(signal.SIGKILL)
        wait_until(lambda: not processes_of(told.port), "the end of the server", 15)
        wait_until(lambda: not any(path.exists() for path in sockets), "the end of its sockets", 15)
    finally:
        trainer.kill()
        trainer.wait()


def test_trainers_that_name_their_servers_in_different_orders_do_not_wait_for_each_other_for_ever(
    directory, tmp_path
):
    with serving(directory, tmp_path / "a") as one, serving(directory, tmp_path / "b") as other:
        fleets = [
            Fleet(urls, Publisher(torch.float32)) for urls in ([one.url, other.url], [other.url, one.url])
        ]
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

        def roll_out(fleet: Fleet) -> None:
            for step in range(5):
                fleet.publisher.take(model.named_parameters())
                fleet.push()
                fleet.complete(PROMPTS, 1, SAMPLING, seed=step)

        threads = [threading.Thread(target=roll_out, args=(fleet,), daemon=True) for fleet in fleets]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        for fleet in fleets:
            fleet.close()


def test_a_lease_is_renewed_as_long_as_it_is_needed_and_soon_over_where_its_owner_died(
    directory, tmp_path, monkeypatch
):
    monkeypatch.setattr("diloco.rl.fleet.LEASE_S", 0.8)
    monkeypatch.setattr("diloco.rl.fleet._RENEWAL_S", 0.05)

    def is_free(url: str) -> bool:
        return bool(_rpc(url, "diloco_lease", owner="another", seconds="0")["ok"])

    with serving(directory, tmp_path) as server:
        fleet = Fleet([server.url], Publisher(torch.float32))
        fleet._lease(server.url)
        with fleet._kept_leases():
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                assert not is_free(server.url)
        wait_until(lambda: is_free(server.url), "the end of the lease", 5)
        fleet.close()


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"results": []},
        {"results": 5},
        {"results": [{}]},
        {"results": [{"ok": False}]},
        {"results": [{"ok": True}]},
        {"results": [{"ok": True, "publisher": "p", "version": "new"}]},
    ],
)
def test_an_answer_that_nobody_understands_is_a_lost_server(answer):
    content = json.dumps(answer).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        with pytest.raises(ServerLost):
            _served(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
        thread.join()


def test_a_server_that_breaks_off_a_download_prints_nothing(capfd):
    blobs = BlobServer("127.0.0.1")
    before = threading.active_count()
    [(url, _)] = blobs.publish([bytes(2**26)])
    host, port, path = re.fullmatch(r"http://(.*):(\d+)(/.*)", url).groups()
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        connection.recv(1)
    wait_until(lambda: threading.active_count() <= before, "the end of its thread", 10)
    blobs.close()
    assert capfd.readouterr().err == ""


def test_trainers_that_share_a_server_wait_for_each_other(tmp_path):
    path = tmp_path / "model"
    tiny_llama().save_pretrained(path)
    with serving(path, tmp_path) as server:
        models = [tiny_llama(seed=seed).eval() for seed in (1, 2)]
        fleets = [Fleet([server.url], Publisher(torch.float32)) for _ in models]
        for fleet, model in zip(fleets, models, strict=True):
            fleet.publisher.take(model.named_parameters())
        fleets[0].push()
        second = threading.Thread(target=fleets[1].push)
        second.start()
        assert _rpc(server.url, "diloco_lease", owner="a third", seconds="1")["busy"]
        assert difference(models[0], fleets[0].complete(PROMPTS, 1, SAMPLING, seed=1)) < CLOSE
        second.join(30)
        assert not second.is_alive()
        assert difference(models[1], fleets[1].complete(PROMPTS, 1, SAMPLING, seed=1)) < CLOSE
        with pytest.raises(ServerLost, match="changed to version"):
            fleets[0].complete(PROMPTS, 1, SAMPLING, seed=1)
        for fleet in fleets:
            fleet.close()
