"""The daemon's side of the process that generates rollouts, which is a client of the link like a trainer (link.py):

    generator                                 daemon of a rollout peer
    generates {num_examples, ...}        ->
                                         <-   load {paths, digest}
    loaded {} | failed {reason}          ->
                                         <-   generate {examples}
    generated {groups} | failed {reason} ->

A generator may die at any moment; its next life begins without weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from peers.daemon.link import Accept, DaemonConnection
from peers.errors import LinkLost, ProtocolError
from peers.protocol.rollouts import Completion
from peers.timing import START_S

T = TypeVar("T")
_GROUPS: type[Any] = list[list[Completion]]


class Generator:
    """Used from one event loop, by one task."""

    def __init__(self) -> None:
        self._ready: asyncio.Future[tuple[DaemonConnection, dict[str, Any]]] = (
            asyncio.get_running_loop().create_future()
        )
        self.held = ""
        """Digest of the weights that the generator has."""
        self._turn = asyncio.Lock()

    async def serve(self, accept: Accept) -> None:
        """Accept one life of the generator after the other, for ever."""
        while True:
            connection = await accept()
            try:
                hello = await asyncio.wait_for(connection.receive(), START_S)
            except (LinkLost, TimeoutError):
                connection.close()
                continue
            if self._ready.done():
                self._ready.result()[0].close()
                self._ready = asyncio.get_running_loop().create_future()
            self.held = ""
            self._ready.set_result((connection, hello))

    async def limits(self) -> tuple[int, int, int]:
        """The generator's number of examples, prompts at once and most bytes of weights. Waits until it is here."""
        _, hello = await asyncio.shield(self._ready)
        return int(hello["num_examples"]), int(hello["at_once"]), int(hello["most_bytes"])

    async def load(self, paths: Sequence[Path], digest: str) -> None:
        """Apply these files, one after the other, and remove them.

        Raises ProtocolError if they are not the weights of this digest.
        """
        await self._undisturbed(self._load(paths, digest))

    async def generate(self, examples: Sequence[int]) -> list[tuple[Completion, ...]]:
        """The judged completions of each example. Raises ProtocolError if the weights that are held give none."""
        answer = await self._undisturbed(self._ask("generate", "generated", examples=list(examples)))
        try:
            groups = msgspec.convert(answer["groups"], _GROUPS)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the generator made completions that no learner accepts: {error}") from error
        return [tuple(group) for group in groups]

    def close(self) -> None:
        if self._ready.done():
            self._ready.result()[0].close()

    async def _load(self, paths: Sequence[Path], digest: str) -> None:
        try:
            await self._ask("load", "loaded", paths=[str(path) for path in paths], digest=digest)
        except ProtocolError:
            self.held = ""
            raise
        finally:
            for path in paths:
                path.unlink(missing_ok=True)
        self.held = digest

    async def _undisturbed(self, request: Coroutine[Any, Any, T]) -> T:
        """Make the request after the last one, to its end even if the caller is cancelled.

        Otherwise its answer would be taken for that of the next request.
        """

        async def in_turn() -> T:
            async with self._turn:
                return await request

        task = asyncio.create_task(in_turn())
        # Marks the exception as retrieved: there may be no caller any more.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(task)

    async def _ask(self, kind: str, answered_by: str, **fields: Any) -> dict[str, Any]:
        connection, _ = await asyncio.shield(self._ready)
        try:
            await connection.send(kind, **fields)
            answer = await connection.receive()
        except LinkLost:
            if self._ready.done() and self._ready.result()[0] is connection:
                self._ready = asyncio.get_running_loop().create_future()
                self.held = ""
            connection.close()
            raise
        if answer["kind"] == "failed":
            raise ProtocolError(str(answer["reason"]))
        if answer["kind"] != answered_by:
            raise ProtocolError(f"expected {answered_by}, got {answer['kind']}")
        return answer
