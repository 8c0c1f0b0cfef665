"""A daemon for tests of the worker's side: speaks the real link, averages with nobody."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from peers.daemon.link import DaemonConnection, LinkMemory, listen
from peers.errors import LinkLost
from peers.state.layout import Layout
from peers.state.whole_files import write_bytes

Answer = tuple[str, dict[str, Any]]
Rule = Callable[[dict[str, Any], np.ndarray, np.ndarray], Answer | None]
"""(message, out, in) -> the answer's kind and fields; None: no answer. An answer to `ready` is kept until a `collect`;
if none is kept, the rule answers the `collect`.

The buffers are those of the message's fragment, else of fragment 0."""

COMMITTED = {
    "local_step": 0,
    "epoch_s": 0.0,
    "head": "l",
    "anchor_digest": "d",
    "num_peers": 1,
    "contributors": [0],
    "sent_bytes": 1,
    "received_bytes": 2,
    "shifted": [],
    "round_s": 0.1,
    "connect_s": 0.0,
    "reduce_s": 0.1,
    "preview_s": 0.0,
    "vote_s": 0.0,
    "apply_s": 0.0,
    "wait_s": 0.2,
    "propose_s": 0.0,
    "bandwidth": 1e6,
}


def halving(message: dict[str, Any], out: np.ndarray, inn: np.ndarray) -> Answer | None:
    """Starts at the epoch and with the weights that are offered; each commit halves the weights."""
    match message["kind"]:
        case "offer":
            inn[:] = out
            keep = bool(message["resume"]) and message["is_own"]
            fields = {"epoch": message["epoch"], "local_step": message["local_step"], "epoch_s": 0.0}
            fields |= {"data_base": 3 * message["epoch"], "num_peers": 1}
            return "start", {**fields, "keep_local": keep, "began_run": True}
        case "ready":
            inn[:] = out / 2
            epoch = message["epoch"] + 1
            own = {"epoch": epoch, "data_base": 3 * epoch}
            return "committed", {**COMMITTED, **own, "fragment": message["fragment"], "last": message["last"]}
        case "snapshot":
            return "snapped", {}
        case "written":
            return "checkpointed", {"files": {"outer.bin": written_state(message)}, "head": "l"}
        case "finished":
            return "bye", {}
    return None


def leaving_a_fork() -> Rule:
    """The first commit returns the peer from a lost fork to the run's first epoch."""
    epochs = [0]

    def rule(message: dict[str, Any], out: np.ndarray, inn: np.ndarray) -> Answer | None:
        answer = halving(message, out, inn)
        if answer and message["kind"] == "ready" and epochs:
            answer[1]["epoch"] = epochs.pop()
        return answer

    return rule


def joining(epoch: int, weights: float, **place: Any) -> Rule:
    """The swarm is in this epoch already, with these weights; each commit halves them."""

    def rule(message: dict[str, Any], out: np.ndarray, inn: np.ndarray) -> Answer | None:
        if message["kind"] != "offer":
            return halving(message, out, inn)
        inn[:] = weights
        where = {"epoch": epoch, "local_step": 0, "epoch_s": 0.0, "data_base": epoch, "num_peers": 2}
        return "start", {**where, "keep_local": False, "began_run": False, **place}

    return rule


def slow_rounds() -> Rule:
    """A round takes as long as an epoch: a worker that may go ahead does, and any other gets the commit."""
    outcome: dict[str, Any] = {}

    def rule(message: dict[str, Any], out: np.ndarray, inn: np.ndarray) -> Answer | None:
        match message["kind"]:
            case "ready":
                _, fields = halving(message, out, inn) or ("", {})
                outcome.update(fields)
                return None
            case "collect" if message["may_go_ahead"]:
                return "ahead", {name: outcome[name] for name in ("epoch", "epoch_s", "data_base")}
            case "collect":
                return "committed", outcome
            case "poll":
                return "pending", {}
        return halving(message, out, inn)

    return rule


def written_state(message: dict[str, Any]) -> tuple[int, str]:
    """Write a stand-in for the outer state. Returns its size and digest."""
    record = write_bytes(Path(message["directory"], "outer.bin"), b"state")
    return record.num_bytes, record.digest


class ScriptedDaemon:
    """Listens while the block runs. `messages` are those that rank 0 sent, in order."""

    def __init__(
        self,
        path: Path,
        rule: Rule = halving,
        *,
        world_rank: int = 0,
        local_steps: int = 2,
        needs_offer: bool = True,
        **manifest: Any,
    ) -> None:
        self.path = path
        self.messages: list[dict[str, Any]] = []
        self.collects: list[dict[str, Any]] = []
        """The `collect` messages of the worker."""
        self._rule = rule
        self._welcome, self._needs_offer = {"world_rank": world_rank}, needs_offer
        self._manifest = {"hv.local_steps": local_steps, **{f"hv.{k}": v for k, v in manifest.items()}}
        self._memories: list[LinkMemory] = []
        self._descriptors: list[int] = []
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def kinds(self) -> list[str]:
        return [message["kind"] for message in self.messages]

    def buffers(self, fragment: int) -> list[np.ndarray]:
        """*Out* and *in* of a fragment."""
        memory = self._memories[fragment]
        return [np.frombuffer(buffer, np.float32, memory.numel) for buffer in (memory.out, memory.inn)]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        for fd in self._descriptors:
            os.close(fd)

    def _run(self) -> None:
        self._task = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            self._loop.close()

    async def _serve(self) -> None:
        async with listen(self.path) as accept, asyncio.TaskGroup() as ranks:
            self._listening.set()
            while True:
                ranks.create_task(self._talk(await accept()))

    async def _talk(self, connection: DaemonConnection) -> None:
        try:
            hello = await connection.receive()
            if hello["kind"] == "adopt":
                await connection.send(
                    "manifest",
                    manifest=self._manifest,
                    needs_offer=self._needs_offer,
                    run_is_alive=not self._needs_offer,
                    **self._welcome,
                )
                hello = await connection.receive()
            if hello["kind"] == "written":
                answered = self._rule(hello, np.zeros(0), np.zeros(0))
                if answered:
                    await connection.send(answered[0], **answered[1])
                connection.close()
                return
            layout = Layout.from_message(hello["layout"])
            if not self._memories:
                for index, numel in enumerate(layout.sizes):
                    memory, descriptors = LinkMemory.create(index, numel)
                    self._memories.append(memory)
                    self._descriptors += descriptors
            await connection.welcome(self._descriptors, **self._welcome)
            outcome: Answer | None = None
            while True:
                message = await connection.receive()
                if message["kind"] == "collect":
                    self.collects.append(message)
                if message["kind"] == "collect" and outcome is not None:
                    answer, outcome = outcome, None
                else:
                    if message["kind"] not in ("collect", "poll"):
                        self.messages.append(message)
                    if message["kind"] == "offer":
                        for fragment in range(1, len(self._memories)):
                            out, inn = self.buffers(fragment)
                            inn[:] = out
                    answer = self._rule(message, *self.buffers(message.get("fragment", 0)))
                if message["kind"] == "ready":
                    answer, outcome = None, answer
                if answer:
                    await connection.send(
                        answer[0], **{"world_rank": self._welcome["world_rank"], **answer[1]}
                    )
        except LinkLost:
            connection.close()
