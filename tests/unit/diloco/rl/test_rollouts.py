"""What a trainer does about its server when a request fails."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diloco.errors import DilocoError, UserError
from diloco.rl import rollouts
from diloco.rl.push import Publisher
from diloco.rl.rollouts import MAX_ATTEMPTS, Rollouts
from diloco.rl.sampling import BadPolicy
from diloco.rl.server_client import RequestRefused, Sampling, ServerClient, ServerLost
from diloco.rl.weights import unpacked


class FakeServer:
    """Holds a version, is paused or not, and fails at this path `failures` times."""

    socket, num_restarts = Path("missing"), 0

    def __init__(
        self, log_path: Path, fails_at: str, failures: int, kind: type[Exception] = ServerLost
    ) -> None:
        self.kind = kind
        self.command = SimpleNamespace(log_path=log_path)
        self.fails_at, self.failures, self.num_pushes = fails_at, failures, 0
        self.seeds: list[int] = []
        self.refuses = ""
        self._start()

    def _start(self) -> None:
        self.is_paused, self.held = False, {"digest": ""}
        self.has_ended = threading.Event()

    def restart(self, *, delay_s: float) -> None:
        self.num_restarts += 1
        self._start()

    def end(self) -> None:
        self.has_ended.set()

    def request(self, path, body=None, *, timeout_s=60.0):
        if self.has_ended.is_set():
            raise ServerLost("connection refused")
        path = path.partition("?")[0]
        assert (timeout_s is None) == (path == "/v1/completions")
        if path == self.fails_at and self.failures:
            self.failures -= 1
            raise self.kind("connection reset")
        match path:
            case "/pause" | "/resume":
                self.is_paused = path == "/pause"
            case "/collective_rpc" if body["method"] == "diloco_state":
                return {"results": [{"ok": True, **self.held}]}
            case "/collective_rpc":
                if self.refuses:
                    return {"results": [{"ok": False, "error": self.refuses}]}
                blob = Path(body["kwargs"]["path"]).read_bytes()
                label, _ = unpacked(blob)
                self.num_pushes += 1
                self.held = {"digest": label.digest}
                return {"results": [{"ok": True, "bytes": len(blob)}]}
            case "/v1/models":
                return {"data": [{"id": "m", "max_model_len": 10}]}
            case "/v1/completions":
                assert not self.is_paused
                self.seeds.append(body["seed"])
                choice = {"finish_reason": "stop", "token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}}
                return {"choices": [{**choice, "index": index} for index in range(body["n"])]}


@pytest.fixture
def opened(tmp_path, monkeypatch):
    def opened(server: FakeServer) -> Rollouts:
        monkeypatch.setattr(ServerClient, "_request", server.request)
        found = Rollouts(server, tmp_path, Publisher(torch.float32))
        found.publisher.take([("w", torch.zeros(2))])
        return found

    return opened


@pytest.mark.parametrize("path", ["/pause", "/reset_prefix_cache", "/resume", "/v1/completions"])
def test_a_server_that_fails_around_a_push_is_restarted_and_given_the_weights_again(opened, tmp_path, path):
    server = FakeServer(tmp_path / "log", path, failures=1)
    found = opened(server)
    assert len(found.complete([[1]], 1, Sampling(max_tokens=1), seed=0)) == 1
    assert server.num_restarts == found.last_push["server_restarts"] == 1
    assert server.num_pushes == (1 if path == "/pause" else 2)
    assert list(tmp_path.iterdir()) == [], "nothing of a push stays"


def test_a_server_that_fails_again_and_again_is_given_up_with_the_end_of_its_log(opened, tmp_path):
    server = FakeServer(tmp_path / "log", "/resume", failures=99)
    server.command.log_path.write_text("out of memory\n")
    with pytest.raises(DilocoError, match=r"failed 5 times in a row: connection reset[^$]*out of memory"):
        opened(server).push()
    assert server.num_restarts == MAX_ATTEMPTS - 1


def test_weights_with_which_the_server_completes_nothing_are_at_fault_at_once(opened, tmp_path):
    """vLLM answers 400 where log-probabilities are not finite, and may do so for the next weights until it restarts."""
    server = FakeServer(tmp_path / "log", "/v1/completions", failures=1, kind=RequestRefused)
    found = opened(server)
    with pytest.raises(BadPolicy, match="does not work with these weights: connection reset"):
        found.complete([[1]], 1, Sampling(max_tokens=1), seed=0)
    assert server.num_restarts == 0 and server.has_ended.is_set()
    found.publisher.take([("w", torch.ones(2))])
    assert len(found.complete([[1]], 1, Sampling(max_tokens=1), seed=0)) == 1
    assert server.num_restarts == 1


def test_weights_that_a_restarted_server_does_not_work_with_are_at_fault(opened, tmp_path):
    with pytest.raises(BadPolicy, match="failed 5 times in a row"):
        opened(FakeServer(tmp_path / "log", "/v1/completions", failures=99)).complete(
            [[1]], 1, Sampling(max_tokens=1), seed=0
        )


def test_a_server_that_does_not_come_back_is_not_the_fault_of_the_weights(opened, tmp_path, monkeypatch):
    server = FakeServer(tmp_path / "log", "/v1/completions", failures=1)

    def restart(**_: object) -> None:
        raise ServerLost("it ended with 1")

    monkeypatch.setattr(server, "restart", restart)
    with pytest.raises(DilocoError, match="failed 5 times in a row: it ended with 1") as failed:
        opened(server).complete([[1]], 1, Sampling(max_tokens=1), seed=0)
    assert not isinstance(failed.value, BadPolicy)


def test_weights_that_a_server_refuses_are_at_fault(opened, tmp_path):
    server = FakeServer(tmp_path / "log", "", failures=0)
    server.refuses = "w holds values that are not finite"
    with pytest.raises(BadPolicy, match="w holds values that are not finite"):
        opened(server).push()
    assert server.num_restarts == 0


def test_a_prompt_that_is_too_long_is_for_the_user_and_restarts_nothing(opened, tmp_path):
    server = FakeServer(tmp_path / "log", "", failures=0)
    with pytest.raises(UserError, match=r"3 tokens and 8 more .* context of 10; lower --grpo\.max-compl"):
        opened(server).complete([[1], [1, 2, 3]], 1, Sampling(max_tokens=8), seed=0)
    assert server.num_restarts == 0 and server.seeds == []


def test_each_prompt_needs_room_for_its_own_completion_only(opened, tmp_path):
    server = FakeServer(tmp_path / "log", "", failures=0)
    found, prompts = opened(server), [[1], [1] * 9]
    assert len(found.complete(prompts, 1, Sampling(max_tokens=(9, 1)), seed=0)) == 2
    with pytest.raises(UserError, match=r"9 tokens and 2 more .* context of 10"):
        found.complete(prompts, 1, Sampling(max_tokens=(1, 2)), seed=0)


def test_no_two_completions_have_the_same_seed(opened, tmp_path):
    """vLLM adds a completion's number in its request to the request's seed."""
    server = FakeServer(tmp_path / "log", "", failures=0)
    found = opened(server)
    for seed in range(3):
        found.complete([[1]] * 4, 8, Sampling(max_tokens=1), seed=seed)
    used = [seed + number for seed in server.seeds for number in range(8)]
    assert len(set(used)) == len(used) == 3 * 4 * 8


def test_a_generation_may_take_long_as_long_as_the_server_answers(opened, tmp_path, monkeypatch):
    server, asked = FakeServer(tmp_path / "log", "", failures=0), threading.Semaphore(0)
    monkeypatch.setattr(rollouts, "_LOOK_S", 0.0)
    found = opened(server)
    found.push()

    def request(path, body=None, **more):
        if path == "/collective_rpc":
            asked.release()
        if path == "/v1/completions":
            for _ in range(3):
                assert asked.acquire(timeout=60)
        return server.request(path, body, **more)

    monkeypatch.setattr(ServerClient, "_request", lambda _, *words, **more: request(*words, **more))
    assert len(found.complete([[1], [2]], 1, Sampling(max_tokens=1), seed=0)) == 2
    assert server.num_restarts == 0 and not server.has_ended.is_set()


@pytest.mark.parametrize(("count", "num_prompts", "at_once"), [(1, 128, 128), (16, 128, 64), (300, 9, 3)])
def test_the_server_is_asked_for_as_many_sequences_at_once_for_one_completion_of_a_prompt_as_for_several(
    opened, tmp_path, monkeypatch, count, num_prompts, at_once
):
    server, all_asked, lock = (
        FakeServer(tmp_path / "log", "", failures=0),
        threading.Barrier(at_once),
        threading.Lock(),
    )
    found, open_now, most = opened(server), 0, 0

    def request(path, body=None, **more):
        nonlocal open_now, most
        if path != "/v1/completions":
            return server.request(path, body, **more)
        with lock:
            open_now += 1
            most = max(most, open_now)
        all_asked.wait(60)
        with lock:
            open_now -= 1
            return server.request(path, body, **more)

    monkeypatch.setattr(ServerClient, "_request", lambda _, *words, **more: request(*words, **more))
    assert len(found.complete([[1]] * num_prompts, count, Sampling(max_tokens=1), seed=0)) == num_prompts
    assert most == at_once


def test_a_server_that_hangs_in_a_generation_is_ended_and_restarted(opened, tmp_path, monkeypatch):
    server, is_generating = FakeServer(tmp_path / "log", "", failures=0), threading.Event()
    monkeypatch.setattr(rollouts, "_LOOK_S", 0.0)
    found = opened(server)

    def request(path, body=None, **more):
        """The first server answers nothing once it generates."""
        if server.num_restarts == 0 and path == "/v1/completions":
            is_generating.set()
            assert server.has_ended.wait(60)
            raise ServerLost("connection reset")
        if server.num_restarts == 0 and is_generating.is_set():
            raise ServerLost("timed out")
        return server.request(path, body, **more)

    monkeypatch.setattr(ServerClient, "_request", lambda _, *words, **more: request(*words, **more))
    assert len(found.complete([[1], [2]], 1, Sampling(max_tokens=1), seed=0)) == 2
    assert server.num_restarts == 1


def test_a_disk_that_is_full_is_named(opened, tmp_path, monkeypatch):
    found = opened(FakeServer(tmp_path / "log", "", failures=0))
    monkeypatch.setattr(found, "_blob", tmp_path / "missing" / "pushed")
    with pytest.raises(DilocoError, match="the weights for the vLLM server cannot be written"):
        found.push()
