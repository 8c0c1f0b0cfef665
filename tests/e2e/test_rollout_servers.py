"""Everything around an inference server, on real processes: pushes, refusals, deaths, leases, and nothing left over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diloco.errors import UserError
from diloco.grpo.blob_server import BlobServer
from diloco.grpo.fleet import Fleet, _rpc
from diloco.grpo.generation import Servers
from diloco.grpo.http_json import ServerLost
from diloco.grpo.own_server import OwnServer, ServerCommand, _free_port
from diloco.grpo.publisher import Publisher
from tests.support.commands import ROOT, wait_until
from tests.support.rollouts import CLOSE, PROMPTS, SAMPLING, difference, orders, train_a_little
from tests.support.tiny_model import tiny_llama


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model whose head is tied to its embeddings, which servers get wrong more easily."""
    path = tmp_path_factory.mktemp("served")
    tiny_llama(tied=True).save_pretrained(path)
    return path


def command(directory: Path, tmp_path: Path, *flags: str) -> ServerCommand:
    port = _free_port()
    words = ["--model", str(directory), "--port", str(port), "--marks", str(tmp_path / "died"), *flags]
    return ServerCommand(
        argv=[sys.executable, "-m", "tests.support.little_server", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        port=port,
        log_path=tmp_path / "logs" / "server.log",
        timeout_s=60,
    )


@contextlib.contextmanager
def serving(directory: Path, tmp_path: Path, *flags: str) -> Iterator[OwnServer]:
    with OwnServer(command(directory, tmp_path, *flags)) as server:
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
        "from diloco.grpo.own_server import OwnServer, ServerCommand\n"
        f"server = OwnServer(ServerCommand(argv={list(told.argv)!r}, env={dict(told.env)!r}, port={told.port},\n"
        f" log_path=Path({str(told.log_path)!r}), timeout_s=60))\n"
        "server.start(); print('up', flush=True); time.sleep(600)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=told.env, start_new_session=True
    )
    try:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"up\n"
        assert len(processes_of(told.port)) >= 2
        trainer.send_signal(signal.SIGKILL)
        wait_until(lambda: not processes_of(told.port), "the end of the server", 15)
    finally:
        trainer.kill()
        trainer.wait()


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
