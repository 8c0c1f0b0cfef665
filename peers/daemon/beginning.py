"""Where a worker begins: at the swarm's state or, in a run that has none yet, at a checkpoint or its own weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from peers.errors import UserError
from peers.protocol.certificates import verify_signature
from peers.reduce.residuals import Residuals
from peers.state import files as state_files
from peers.state.handover import Start
from peers.state.outer_state import OuterState

_PAGE_BYTES = 4096


class Beginning:
    """A worker that waits to be told where it begins. Used from one event loop."""

    def __init__(self, inn: Sequence[Tensor]) -> None:
        """`inn`: the worker's *in* memories, which receive the weights."""
        self.start: asyncio.Future[Start] = asyncio.get_running_loop().create_future()
        self._inn = inn
        # The page faults of new memory take seconds, which pass while the state is fetched.
        self._touched = asyncio.create_task(asyncio.to_thread(_touch, inn))

    async def settle(self, anchor: Sequence[Tensor], start: Start) -> None:
        """Write the anchor to *in*, and tell the worker where it begins, unless it has died meanwhile."""
        if not self.start.done():
            await self._touched
            for inn, values in zip(self._inn, anchor, strict=True):
                await asyncio.to_thread(inn.copy_, values)
        if not self.start.done():
            self.start.set_result(start)


def offered_state(out: Sequence[Tensor], resume: str | None) -> tuple[OuterState, list[Residuals] | None]:
    """The state from which the run could begin, of a worker whose initial weights are in `out`.

    Raises UserError where the checkpoint `resume` is not one of this model, or not proved to be one of a run.
    """
    if not resume:
        return OuterState.initial([weights.clone() for weights in out]), None
    state = state_files.load(Path(resume))
    _check_certificate(state, resume)
    sizes = tuple(weights.numel() for weights in out)
    if state.sizes != sizes:
        raise UserError(
            f"the checkpoint {resume} is of another model or has other fragments: it has {list(state.sizes)} "
            f"parameters in them, this one {list(sizes)}"
        )
    return state, state_files.load_residuals(Path(resume), state)


def _check_certificate(state: OuterState, resume: str) -> None:
    """That the values match the header has been checked; here, that the members of a commit have signed the header."""
    certificate = state.header.certificate
    if certificate is None:
        raise UserError(
            f"the checkpoint {resume} has no certificate: a version of diloco from before certificates saved it, and "
            "training cannot go on from it. Take its model out with `diloco export`, and begin a run with it by "
            "--path-model"
        )
    if not certificate.is_signed(verify_signature):
        raise UserError(
            f"the certificate of the checkpoint {resume} is not signed by all of those whose work it says is in it: it "
            "has been altered, or put together from parts of several. Resume from another one, of a place that only "
            "you can write to"
        )


def _touch(fresh: Sequence[Tensor]) -> None:
    """Write to every page of memory that has not been written to yet."""
    for values in fresh:
        values[:: _PAGE_BYTES // values.element_size()] = 0
