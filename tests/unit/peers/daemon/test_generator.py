"""A rollout peer's daemon and the process that generates, over the real link."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peers.daemon.generator import Generator
from peers.daemon.link import WorkerLink, listen
from peers.errors import LinkLost, ProtocolError
from peers.net import socket_io

GROUPS = [[{"tokens": [1, 2], "logprobs": [-0.5, -0.1], "scores": [1.0]}]]
Answer = Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]


def generates(path: Path, answer: Answer, num_requests: int) -> threading.Thread:
    """A thread in place of the generating process. It answers `num_requests` requests, then dies."""

    def live() -> None:
        link = WorkerLink.connect(path, silence_s=None)
        with contextlib.closing(link), contextlib.suppress(LinkLost):
            link.send("generates", num_examples=10, at_once=1, most_bytes=100)
            for _ in range(num_requests):
                kind, fields = answer(link.receive("load", "generate"))
                link.send(kind, **fields)

    thread = threading.Thread(target=live)
    thread.start()
    return thread


@contextlib.asynccontextmanager
async def serving(path: Path) -> Any:
    async with listen(path) as accept:
        generator = Generator()
        task = asyncio.create_task(generator.serve(accept))
        yield generator
        generator.close()
        task.cancel()


def honest(request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if request["kind"] == "generate":
        return "generated", {"groups": GROUPS}
    return ("loaded", {}) if request["digest"] == "good" else ("failed", {"reason": "they lead elsewhere"})


async def test_a_policy_is_loaded_and_its_files_go(tmp_path):
    (tmp_path / "file").touch()
    async with serving(tmp_path / "sock") as generator:
        thread = generates(tmp_path / "sock", honest, 2)
        assert await generator.limits() == (10, 1, 100)
        await generator.load([tmp_path / "file"], "good")
        assert generator.held == "good" and not (tmp_path / "file").exists()
        ((completion,),) = await generator.generate([3])
        assert completion.tokens == (1, 2)
        thread.join()


async def test_weights_that_cannot_be_used_are_not_held(tmp_path):
    async with serving(tmp_path / "sock") as generator:
        generates(tmp_path / "sock", honest, 1)
        with pytest.raises(ProtocolError, match="they lead elsewhere"):
            await generator.load([], "bad")
        assert generator.held == ""


async def test_a_request_that_nobody_waits_for_any_more_is_made_to_its_end(tmp_path):
    """Otherwise its answer would be taken for the answer to the next request."""
    release = threading.Event()

    def slow(request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        release.wait()
        return honest(request)

    async with serving(tmp_path / "sock") as generator:
        generates(tmp_path / "sock", slow, 2)
        await generator.limits()
        abandoned = asyncio.create_task(generator.load([], "good"))
        await asyncio.sleep(0)
        abandoned.cancel()
        await asyncio.wait({abandoned})
        release.set()
        ((completion,),) = await generator.generate([3])
        assert completion.tokens == (1, 2) and generator.held == "good"


async def test_after_its_death_a_generator_begins_without_weights(tmp_path):
    async with serving(tmp_path / "sock") as generator:
        thread = generates(tmp_path / "sock", honest, 1)
        await generator.load([], "good")
        thread.join()
        with pytest.raises(LinkLost):
            await generator.generate([3])
        assert generator.held == ""
        generates(tmp_path / "sock", honest, 1)
        await generator.load([], "good")
        assert generator.held == "good"


async def test_weights_that_give_no_completions_are_their_learners_fault(tmp_path):
    async with serving(tmp_path / "sock") as generator:
        generates(tmp_path / "sock", lambda _: ("failed", {"reason": "not finite"}), 1)
        with pytest.raises(ProtocolError, match="not finite"):
            await generator.generate([3])


async def test_what_no_learner_would_take_is_the_generators_fault(tmp_path):
    async with serving(tmp_path / "sock") as generator:
        generates(tmp_path / "sock", lambda _: ("generated", {"groups": [[{"tokens": []}]]}), 1)
        with pytest.raises(ProtocolError, match="that no learner accepts"):
            await generator.generate([3])


async def test_a_generation_of_more_than_64_mib_goes_over_the_link(tmp_path):
    large = b"x" * (65 << 20)
    async with listen(tmp_path / "sock") as accept:
        link = await asyncio.to_thread(WorkerLink.connect, tmp_path / "sock")
        connection = await accept()
        with contextlib.closing(link), contextlib.closing(connection):
            receiving = asyncio.create_task(asyncio.to_thread(link.receive, "rollouts"))
            await connection.send("rollouts", rollouts=large)
            assert (await receiving)["rollouts"] == large
            sending = asyncio.create_task(asyncio.to_thread(link.send, "generated", groups=large))
            assert (await connection.receive())["groups"] == large
            await sending


async def test_a_worker_that_cannot_be_accepted_for_lack_of_descriptors_is_accepted_later(
    tmp_path, monkeypatch
):
    loop, accepts = asyncio.get_running_loop(), asyncio.get_running_loop().sock_accept
    failures = [OSError(errno.EMFILE, "Too many open files")]

    async def accept_or_fail(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return await accepts(listener)

    monkeypatch.setattr(loop, "sock_accept", accept_or_fail)
    monkeypatch.setattr(socket_io, "RETRY_S", 0.0)
    async with serving(tmp_path / "sock") as generator:
        generates(tmp_path / "sock", honest, 0)
        assert await asyncio.wait_for(generator.limits(), 20) == (10, 1, 100)
    assert not failures
